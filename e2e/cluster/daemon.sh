#!/usr/bin/env bash
# e2e/cluster/daemon.sh NODE NAME start|stop|kill|restart|pid|define COMMAND...
# A daemon inside a node: its command in NODE/daemons/NAME, its output in NODE/log/NAME.log, its pid (of this machine, not of the
# node) from `pid`. `stop` sends TERM and waits, `kill` sends KILL. Nothing starts it again by itself. A kubelet waits for its runtime.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
[ $# -ge 3 ] || die "usage: daemon.sh NODE NAME start|stop|kill|restart|pid|define COMMAND..."
n=$1 name=$2 verb=$3
shift 3
home=$S/$n/daemons
mkdir -p "$home"

outside() {
  local pid
  [ -s "$home/$name.pid" ] && pid=$(cat "$home/$name.pid") && kill -0 "$pid" 2>/dev/null && echo "$pid"
}

start() {
  ! outside >/dev/null || die "$name runs on $n already"
  rm -f "$home/$name.pid"
  # A kubelet that finds no runtime exits, and here no service manager starts it again.
  [ "$name" != kubelet ] || wait_for 30 "containerd on $n" node "$n" ctr version
  # The node's /proc shows the node's own pids, so the pid on this machine comes from outside: nsenter forks once.
  setsid nohup "$here/in.sh" "$n" bash "$home/$name" >>"$S/$n/log/$name.log" 2>&1 </dev/null &
  local outer=$! inner
  for _ in $(seq 500); do
    if [ "$(cat "/proc/$outer/comm" 2>/dev/null)" = nsenter ]; then
      read -r inner _ <"/proc/$outer/task/$outer/children" || true
      if [ -n "${inner:-}" ]; then
        echo "$inner" >"$home/$name.pid"
        return 0
      fi
    fi
    kill -0 "$outer" 2>/dev/null || break
    sleep 0.01
  done
  die "$name did not start on $n: $(tail -n 3 "$S/$n/log/$name.log")"
}

signal() { # signal NAME: and wait for the end
  local pid
  pid=$(outside) || return 0
  kill "-$1" "$pid" 2>/dev/null || true
  wait_for 30 "$name ends" bash -c "! kill -0 $pid 2>/dev/null"
}

case $verb in
  define)
    { echo '#!/usr/bin/env bash'; printf 'exec'; printf ' %q' "$@"; echo; } >"$home/$name"
    ;;
  start) start ;;
  stop) signal TERM ;;
  kill) signal KILL ;;
  restart) signal TERM; start ;;
  pid) outside ;;
  *) die "unknown: $verb" ;;
esac
