#!/usr/bin/env bash
# e2e/cluster/down.sh: end the cluster and remove everything of it: processes, mounts, namespaces, cgroups, files.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
. "$here/world.sh"
[ -e "$S" ] || exit 0

for world in $(nodes_of) fabric; do end_world "$world"; done

clean() {
  for n in $(nodes_of); do remove_cgroups "$n" || return 1; done
  rm -rf "$S" 2>/dev/null && [ ! -e "$S" ]
}
wait_for 10 "the end of what is left" clean ||
  die "could not remove all: $(ls -d "$S" /sys/fs/cgroup/*/"$(cgroup node)"* 2>/dev/null | tr '\n' ' ')"
