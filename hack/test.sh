#!/usr/bin/env bash
# hack/test.sh [CARGO TEST ARGUMENTS]: run all tests, show their output as it comes, and end with one line:
# "N passed, N failed, N skipped". The exit code is cargo's.
# A test that can't run on this machine prints "skipped: <reason>"; it counts as skipped, not as passed.
# Without root, the tests run in a user namespace where they are root (needs `unshare`); those that need real root are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PATH:${HOME:-}/.cargo/bin

# Reads the output of `cargo test -- --show-output` and sums it up. Lines go through as they come, but of what passing tests
# wrote only "skipped: ..." is shown, with the test's name. (Not awk: Debian's reads ahead, so nothing would be seen for minutes.)
sum_up() {
  local line name='' last='' quiet='' passed=0 failed=0 ignored=0 skipped=0
  while IFS= read -r line; do
    case $line in
      'successes:') quiet=1 ;;
      'failures:' | 'test result: '*) quiet='' ;;
      '---- '*' stdout ----') name=${line#---- } name=${name% stdout ----} ;;
    esac
    if [ -n "$quiet" ]; then
      [[ $line == 'skipped: '* ]] || continue
      if [ "$name" != "$last" ]; then skipped=$((skipped + 1)) last=$name; fi
      line="$name $line"
    fi
    printf '%s\n' "$line"
    if [[ $line =~ ^test\ result:.*\ ([0-9]+)\ passed\;\ ([0-9]+)\ failed\;\ ([0-9]+)\ ignored ]]; then
      passed=$((passed + BASH_REMATCH[1])) failed=$((failed + BASH_REMATCH[2])) ignored=$((ignored + BASH_REMATCH[3])) last=''
    fi
  done
  echo "$((passed - skipped)) passed, $failed failed, $((skipped + ignored)) skipped"
}

tests=(cargo test --workspace --locked --no-fail-fast "$@")
world=()
if [ "$(id -u)" != 0 ]; then
  world=(unshare --user --map-root-user --net --mount)
  if ! "${world[@]}" true 2>/dev/null; then
    echo "test: no root and no user namespaces here: tests that make network namespaces are skipped"
    world=()
  else
    echo "test: no root: the tests run in a user namespace, without network; a real containerd is skipped"
    cargo test --workspace --locked --no-run "$@" # in the namespace nothing can be fetched
    tests+=(--offline)
  fi
fi
tests+=(-- --show-output) # so that "skipped:" of a passing test is seen

"${world[@]}" "${tests[@]}" </dev/null 2>&1 | sum_up
