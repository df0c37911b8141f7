#!/usr/bin/env bash
# e2e/cluster/shell.sh: a shell on node1 with kubectl, helm and ctr in it.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
running node1 || die "no cluster is up in $S: make cluster brings one up"
echo "A shell on node1. kubectl, helm and ctr are at hand; exit leaves it."
enter node1 env PS1='node1 \w # ' bash --norc --noprofile
