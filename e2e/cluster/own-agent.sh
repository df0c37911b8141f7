#!/usr/bin/env bash
# e2e/cluster/own-agent.sh NODE start|back: an agent of a scenario's own on the node, as a process of agent.sh with its AGENT_ARGS and
# AGENT_ENV, in place of the one that is there; and that one again.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
[ $# = 2 ] || die "usage: own-agent.sh NODE start|back"
n=$1
home=$S/$n/daemons
chart_pod_gone() { ! node node1 kubectl get pods -n dranic --field-selector "spec.nodeName=$n" --no-headers | grep -q .; }

start() {
  [ ! -e "$home/agent.own" ] || die "$n has an agent of its own already"
  touch "$home/agent.own"
  if [ -e "$home/agent" ]; then
    cp "$home/agent" "$home/agent.before"
    "$here/agent.sh" stop "$n"
  else
    node node1 kubectl label node "$n" e2e-agent- >/dev/null
    wait_for 40 "the agent leaves $n" chart_pod_gone
  fi
  "$here/agent.sh" start "$n"
}

back() {
  [ -e "$home/agent.own" ] || return 0
  "$here/agent.sh" stop "$n"
  if [ -e "$home/agent.before" ]; then
    mv "$home/agent.before" "$home/agent"
    "$here/daemon.sh" "$n" agent start
  else
    rm -f "$home/agent"
    node node1 kubectl label node "$n" --overwrite e2e-agent=yes >/dev/null
  fi
  rm "$home/agent.own"
}

case $2 in
  start | back) "$2" ;;
  *) die "start or back, not $2" ;;
esac
