#!/usr/bin/env bash
# e2e/cluster/agent.sh start|stop [NODE...]: the agent as a plain process on the nodes, instead of by the chart: for trying a change
# without an image. DRANIC: the program (target/debug/dranic). AGENT_ARGS: more flags. AGENT_ENV: more environment, a line each. As the
# kubelet would, it starts an agent that ends by itself again.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
[ $# -ge 1 ] || die "usage: agent.sh start|stop [NODE...]"
verb=$1
shift
[ $# -gt 0 ] || { cd "$S"; set -- node[0-9]*; }
S=$(cd "$S" && pwd -P)

start() {
  local n=$1 program=${DRANIC:-$("$here/../../hack/target.sh")/debug/dranic}
  [ -x "$program" ] || die "$program is missing: cargo build --bin dranic --bin dranic-guard"
  mkdir -p "$S/bin"
  install "$program" "$S/bin/dranic"
  # What the agent puts onto the node.
  install "$(dirname "$program")/dranic-guard" "$S/bin/dranic-guard"
  local environment
  mapfile -t environment < <(printf '%s' "${AGENT_ENV-}")
  # shellcheck disable=SC2086 # AGENT_ARGS is a list of words
  "$here/daemon.sh" "$n" agent define env DRANIC_TEST_SYSFS=/run/dranic/sys "${environment[@]}" bash "$here/keep.sh" "$S/bin/dranic" agent \
    --node-name "$n" --driver-name dra.net --kubeconfig "$S/pki/admin.kubeconfig" ${AGENT_ARGS-}
  "$here/daemon.sh" "$n" agent start
}

for n; do
  case $verb in
    start) start "$n" ;;
    stop) "$here/daemon.sh" "$n" agent stop ;;
    *) die "start or stop, not $verb" ;;
  esac
done
