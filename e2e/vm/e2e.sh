#!/usr/bin/env bash
# e2e/vm/e2e.sh [NAME...]: build the tests that need a kernel and NICs of their own, and run them in the virtual machine. `tests` lists
# them; NAME... runs only these of them. The last line is "N passed, N failed, N skipped".
#   VM_ARGS="--nics 8"   options of run.sh
# What was printed is also in target/e2e-vm, with the guest's kernel log.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
export PATH=$PATH:${HOME:-}/.cargo/bin
. hack/sum.sh
read -r -a vm_args <<<"${VM_ARGS:-}"
limit=900 # seconds for all tests; they take 2 to 4 minutes

mapfile -t lines < <(sed 's/ *#.*//; /^$/d' "$here/tests")
if [ $# -gt 0 ]; then
  chosen=()
  for name; do
    for line in "${lines[@]}"; do [ "${line%% *}" != "$name" ] || chosen+=("$line"); done
  done
  [ ${#chosen[@]} -gt 0 ] || { echo "e2e-vm: none of $* is in e2e/vm/tests" >&2; exit 64; }
  lines=("${chosen[@]}")
fi

skip() { # everything, where the machine can't have the guest
  echo "skipped: no virtual machine here: $*"
  echo "0 passed, 0 failed, ${#lines[@]} skipped"
  exit 0
}
[ "$(id -u)" = 0 ] || skip "no root"
code=0
cache=$("$here/prep.sh") || code=$?
[ $code != 75 ] || skip "the reason is above"
[ $code = 0 ] || exit $code

# programs NAME...: builds test binaries, and prints each one's name and path.
programs() {
  local name args=()
  for name; do args+=(--test "$name"); done
  cargo test --locked --package dranic --features verbs "${args[@]}" --no-run --message-format=json-render-diagnostics |
    python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable") and message["target"]["kind"] == ["test"]:
        print(message["target"]["name"], message["executable"])'
}

OUT=$(hack/target.sh)/e2e-vm
export OUT
rm -rf "$OUT"
mkdir -p "$OUT"
# What the guest has to run: the program, its arguments.
: >"$OUT/commands"
names=()
for line in "${lines[@]}"; do [ "${line%% *}" = smoke ] || names+=("${line%% *}"); done
declare -A path
if [ ${#names[@]} -gt 0 ]; then
  mapfile -t built < <(programs "${names[@]}")
  for line in "${built[@]}"; do path[${line%% *}]=${line#* }; done
fi
for line in "${lines[@]}"; do
  read -r name filters <<<"$line"
  if [ "$name" = smoke ]; then
    echo "$here/smoke.sh"
  else
    [ -n "${path[$name]:-}" ] || { echo "e2e-vm: no test binary $name was built" >&2; exit 1; }
    echo "${path[$name]} $filters"
  fi
done >"$OUT/commands"

code=0
{
  # One guest at a time: it takes both cores of a small machine.
  flock 9
  "$here/run.sh" "$cache" --timeout $limit "${vm_args[@]}" -- "$here/in-guest.sh" "$OUT/commands" 2>&1 9>&- || code=$?
  # What has not ended has not passed.
  [ $code -lt 124 ] || echo "test result: FAILED. 0 passed; 1 failed; 0 ignored; the guest ended with $code"
  echo $code >"$OUT/code"
} 9>"$cache/guest.lock" | tee "$OUT/output.txt" | sum_up
exit "$(cat "$OUT/code")"
