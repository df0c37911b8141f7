#!/usr/bin/env bash
# hack/test.sh [CARGO TEST ARGUMENTS]: run all tests, show their output as it comes, and end with one line:
# "N passed, N failed, N skipped". The exit code is cargo's.
# A test that can't run on this machine prints "skipped: <reason>"; it counts as skipped, not as passed.
# Without root, the tests run in a user namespace where they are root (needs `unshare`); those that need real root are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PATH:${HOME:-}/.cargo/bin

. hack/sum.sh

# With what is optional, too: the release is built without.
tests=(cargo test --workspace --locked --features dranic/verbs --no-fail-fast "$@")
world=()
if [ "$(id -u)" != 0 ]; then
  world=(unshare --user --map-root-user --net --mount)
  if ! "${world[@]}" true 2>/dev/null; then
    echo "test: no root and no user namespaces here: tests that make network namespaces are skipped"
    world=()
  else
    echo "test: no root: the tests run in a user namespace, without network; a real containerd is skipped"
    cargo test --workspace --locked --features dranic/verbs --no-run "$@" # in the namespace nothing can be fetched
    tests+=(--offline)
  fi
fi
tests+=(-- --show-output) # so that "skipped:" of a passing test is seen

"${world[@]}" "${tests[@]}" </dev/null 2>&1 | sum_up
