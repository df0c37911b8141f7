#!/usr/bin/env bash
# e2e/cluster/e2e.sh [FLAGS OF dranic-e2e]: run the scenarios on the cluster that is up, else on one that is brought up for them and
# ended afterwards. The last line is "N passed, N failed, N skipped".
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$here/../.."
target=$("$PWD/hack/target.sh")
cargo build --quiet --locked --package dranic-e2e
runner=$target/debug/dranic-e2e
case " $* " in *" --list "*) exec "$runner" --list ;; esac

skip() { # everything, where the machine can't have a cluster
  echo "skipped: $*"
  echo "0 passed, 0 failed, $("$runner" --list | wc -l) skipped"
  exit 0
}

[ "$(id -u)" = 0 ] || skip "no root"
if ! running node1; then
  code=0
  cache=$("$here/build.sh") || code=$?
  [ $code != 75 ] || skip "the programs of a cluster can't be had here (the reason is above)"
  [ $code = 0 ] || exit $code
  trap '"$here/down.sh"' EXIT
  "$here/cluster.sh"
fi
cache=$(dirname "$(tr ':' '\n' <"$S/path" | tail -n 1)")
code=0
PATH=$cache/bin:$PATH nsenter -t "$(cat "$S/node1/init.pid")" -n "$runner" --cluster "$S" --scripts "$here" --dump "$target/e2e" "$@" || code=$?
exit $code
