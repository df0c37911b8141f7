#!/usr/bin/env bash
# e2e/cluster/in.sh NODE COMMAND...: run a command inside a node (node1, node2), with kubectl, helm and ctr at hand.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
enter "$@"
