#!/usr/bin/env bash
# e2e/nri-reference/run.sh [FLAGS OF dranic-nri-reference]: build the reference and run all cases. The last line is
# "N passed, N failed, N skipped". What can't be had here is skipped, with the reason.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
cargo build --quiet --locked --workspace --bin dranic --bin dranic-nri-reference
code=0
reference=$("$here/build.sh") || code=$?
case $code in
  0) set -- --reference "$reference" "$@" ;;
  75) ;; # the reason is above
  *) exit "$code" ;;
esac
exec "$(hack/target.sh)/debug/dranic-nri-reference" "$@"
