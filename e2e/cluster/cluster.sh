#!/usr/bin/env bash
# e2e/cluster/cluster.sh: a cluster with the agent of this folder on both nodes.
# AGENT=chart (as users install it) or process (quicker to change: see agent.sh).
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$here/../.."
agent=${AGENT:-chart}
cargo build --locked --bin dranic --bin dranic-guard
"$here/up.sh"
case $agent in
  chart) "$here/install.sh" ;;
  process) "$here/agent.sh" start ;;
  *) die "AGENT=$agent: chart or process" ;;
esac
published() { node node1 kubectl get resourceslices --no-headers | grep -c dra.net | grep -q 2; }
wait_for 60 "both agents publish their NICs" published
cat <<T

A cluster of two nodes is up, with NICs nic0 to nic7 on each and the agent as driver dra.net.
  make cluster-shell            a shell with kubectl and helm in it; try: kubectl get resourceslices; dranic devices
  make e2e E2E="--only one-nic" a scenario on it; E2E=--list has their names
  make cluster-down             ends it
Logs are in $S/node1/log and $S/node2/log.
T
