#!/usr/bin/env bash
# e2e/cluster/reboot.sh NODE [down|up]: a power cut, and the node starts again; both without a second word. Not node1, which has the
# control plane. What a disk keeps stays (/var/lib, /etc, /opt); /run is empty, links are made anew, the boot id is another one.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
. "$here/world.sh"
[ $# -ge 1 ] || die "usage: reboot.sh NODE [down|up]"
n=$1
[ "$n" != node1 ] || die "node1 has the control plane"
[ -s "$S/$n/outer.pid" ] || die "there is no $n in $S"
S=$(cd "$S" && pwd -P)

down() {
  running "$n" || die "$n is not up"
  end_world "$n"
  wait_for 10 "the end of $n's groups" remove_cgroups "$n"
  rm -rf --one-file-system "$S/$n/root/run" "$S/$n"/daemons/*.pid "$S/$n/init.pid"
}

up() {
  ! running "$n" || die "$n is up"
  world "$n"
  links "$n"
  "$here/daemon.sh" "$n" containerd start
  [ ! -e "$S/$n/daemons/agent" ] || "$here/daemon.sh" "$n" agent start
  wait_for 30 "containerd on $n" node "$n" ctr version
  "$here/daemon.sh" "$n" kubelet start
}

case ${2-both} in
  down) down ;;
  up) up ;;
  both) down; up ;;
  *) die "down or up, not $2" ;;
esac
