#!/usr/bin/env bash
# e2e/cluster/down.sh: end the cluster and remove everything of it: processes, mounts, namespaces, cgroups, files.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
[ -e "$S" ] || exit 0

gone() { ! kill -0 "$1" 2>/dev/null || [ "$(awk '{print $3}' "/proc/$1/stat" 2>/dev/null)" = Z ]; }

for world in node2 node1 fabric; do
  [ -s "$S/$world/outer.pid" ] || continue
  outer=$(cat "$S/$world/outer.pid")
  inner=$(cat "$S/$world/init.pid" 2>/dev/null || true)
  # The pid may be another program's by now, if this machine was started anew.
  [[ $(tr '\0' ' ' <"/proc/$outer/cmdline" 2>/dev/null) == *"$S"* || $(tr '\0' ' ' <"/proc/$outer/cmdline" 2>/dev/null) == "sleep infinity "* ]] || continue
  kill -KILL "$outer"   # unshare ignores TERM; with it goes process 1 of the node, and so all others
  for pid in $outer $inner; do wait_for 20 "the end of $world" gone "$pid"; done
done

for _ in $(seq 50); do
  for group in /sys/fs/cgroup/*/dranic-"$(basename "$S")"-node* /sys/fs/cgroup/dranic-"$(basename "$S")"-node*; do
    [ ! -d "$group" ] || find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
  done
  rm -rf "$S" 2>/dev/null || true
  left=$(find /sys/fs/cgroup -maxdepth 2 -name "dranic-$(basename "$S")-node*" 2>/dev/null | head -n 1)
  if [ ! -e "$S" ] && [ -z "$left" ]; then exit 0; fi
  sleep 0.1
done
die "could not remove all: $(ls -d "$S" 2>/dev/null) $left"
