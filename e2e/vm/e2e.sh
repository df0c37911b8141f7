#!/usr/bin/env bash
# e2e/vm/e2e.sh [NAME...]: build the tests that need a kernel and NICs of their own, and run them in the virtual machine. `tests` lists
# them, each with what its guest must have; NAME... runs only these of them. The last line is "N passed, N failed, N skipped".
#   VM_ARGS="--nics 8"   options of run.sh, instead of those in `tests`
# What was printed is also in target/e2e-vm, with each guest's kernel log.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
export PATH=$PATH:${HOME:-}/.cargo/bin
. hack/sum.sh
read -r -a vm_args <<<"${VM_ARGS:-}"
limit=1800 # seconds for the tests of one guest; they take 5 to 10 minutes

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

out=$(hack/target.sh)/e2e-vm
rm -rf "$out"
mkdir -p "$out"
names=()
for line in "${lines[@]}"; do [ "${line%% *}" = smoke ] || names+=("${line%% *}"); done
declare -A path
if [ ${#names[@]} -gt 0 ]; then
  mapfile -t built < <(programs "${names[@]}")
  for line in "${built[@]}"; do path[${line%% *}]=${line#* }; done
fi

# One guest for each mode of RDMA, since only a boot can change it: with as many NICs, NUMA nodes and MiB as its most demanding line wants.
declare -A most
want() { # want MODE OPTION NUMBER
  [[ $3 =~ ^[0-9]+$ ]] || { echo "e2e-vm: $2 of e2e/vm/tests wants a number, not ${3:-nothing}" >&2; exit 64; }
  [ "$3" -le "${most[$1 $2]:-0}" ] || most[$1 $2]=$3
}
for line in "${lines[@]}"; do
  mode=shared words=()
  if [[ $line =~ ^([^ ]+)\ *\[([^]]*)\](.*)$ ]]; then
    line=${BASH_REMATCH[1]}${BASH_REMATCH[3]}
    read -r -a words <<<"${BASH_REMATCH[2]}"
    [[ " ${words[*]} " != *' exclusive '* ]] || mode=exclusive
  fi
  for ((i = 0; i < ${#words[@]}; i++)); do
    case ${words[i]} in
      exclusive) ;;
      --nics | --pxb | --mem) want $mode "${words[i]}" "${words[++i]:-}" ;;
      *) echo "e2e-vm: e2e/vm/tests: ${words[i]} is none of exclusive, --nics, --pxb, --mem" >&2; exit 64 ;;
    esac
  done
  read -r name filters <<<"$line"
  mkdir -p "$out/$mode"
  # What the guest has to run: the program, its arguments.
  if [ "$name" = smoke ]; then
    echo "$here/smoke.sh"
  else
    [ -n "${path[$name]:-}" ] || { echo "e2e-vm: no test binary $name was built" >&2; exit 1; }
    echo "${path[$name]} $filters"
  fi >>"$out/$mode/commands"
done

guest() { # guest MODE: becomes the guest of that mode, which runs its commands
  local mode=$1 option args=()
  for option in --nics --pxb --mem; do
    [ -z "${most[$mode $option]:-}" ] || args+=("$option" "${most[$mode $option]}")
  done
  echo "=== guest with RDMA devices $mode: run.sh ${args[*]} ${vm_args[*]}"
  OUT=$out/$mode exec "$here/run.sh" "$cache" --timeout $limit "${args[@]}" "${vm_args[@]}" -- \
    "$here/in-guest.sh" "$mode" "$out/$mode/commands" 2>&1
}

ended() { # ended CODE: of a guest. What has not ended has not passed.
  [ "$1" -lt 124 ] || echo "test result: FAILED. 0 passed; 1 failed; 0 ignored; the guest ended with $1"
  [ "$1" -le $worst ] || worst=$1
}

{
  # One run at a time.
  flock 9
  worst=0
  # Both guests side by side where each has a core (run.sh emulates a guest's processors in one thread). What the second prints is shown
  # when the first has ended.
  other=
  if [ -d "$out/shared" ] && [ -d "$out/exclusive" ] && [ "$(nproc)" -ge 2 ]; then
    guest exclusive >"$out/exclusive/output.txt" 9>&- &
    other=$!
    trap 'kill $other 2>/dev/null || true' EXIT
  fi
  for mode in shared exclusive; do
    code=0
    if [ "$mode" = exclusive ] && [ -n "$other" ]; then
      wait $other || code=$?
      trap - EXIT
      cat "$out/exclusive/output.txt"
    elif [ -d "$out/$mode" ]; then
      (guest $mode) 9>&- || code=$?
    else
      continue
    fi
    ended $code
  done
  echo $worst >"$out/code"
} 9>"$cache/guest.lock" | tee "$out/output.txt" | sum_up
exit "$(cat "$out/code")"
