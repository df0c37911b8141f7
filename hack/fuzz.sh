#!/usr/bin/env bash
# hack/fuzz.sh: fuzz the parsers of hostile bytes (src/fuzzing.rs), two at a time; ends with "N passed, N failed, N skipped".
#   FUZZ=a,b           only these targets
#   FUZZ_SECONDS=60    how long each runs
#   FUZZ_SEED=1        libFuzzer's seed: the same one, with the same program, begins the same way
# Inputs that were found interesting are lost at the end; fuzz/seeds is where every run begins. An input that breaks something is kept
# in fuzz/artifacts, and printed as base64. Again: DRANIC_FUZZ=target target/debug/dranic-fuzz FILE
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PATH:${HOME:-}/.cargo/bin
seconds=${FUZZ_SECONDS:-60} seed=${FUZZ_SEED:-1} wanted=${FUZZ:-}

RUSTC_WORKSPACE_WRAPPER=$PWD/hack/sancov.sh cargo build --locked --package dranic-fuzz --features fuzzing
program=$(hack/target.sh)/debug/dranic-fuzz

mapfile -t targets < <(find fuzz/seeds -mindepth 1 -maxdepth 1 -type d -printf '%f\n' | sort)
if [ -n "$wanted" ]; then
  IFS=, read -r -a chosen <<<"$wanted"
  for target in "${chosen[@]}"; do
    [ -d "fuzz/seeds/$target" ] || { echo "fuzz: no target $target; there are: ${targets[*]}" >&2; exit 64; }
  done
  targets=("${chosen[@]}")
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p fuzz/artifacts
echo "fuzz: ${targets[*]}, $seconds s each, seed $seed"

dictionary() { # dictionary TARGET: words that its inputs are made of
  case $1 in
    doctor) echo toml ;;
    guard | parameters | record) echo json ;;
    nri | ttrpc) echo protobuf ;;
  esac
}

run() { # run TARGET: its log is in $work/TARGET.log
  local words
  words=$(dictionary "$1")
  mkdir -p "$work/$1"
  # Twice the time: building, reading seeds and a last input that takes long come on top.
  DRANIC_FUZZ=$1 timeout $((seconds * 2 + 60)) "$program" -seed="$seed" -max_total_time="$seconds" -max_len=16384 -timeout=20 \
    -rss_limit_mb=1024 -artifact_prefix="fuzz/artifacts/$1-" ${words:+"-dict=fuzz/dictionaries/$words"} -print_final_stats=1 "$work/$1" "fuzz/seeds/$1" \
    </dev/null >"$work/$1.log" 2>&1
}

report() { # report TARGET CODE
  local log=$work/$1.log runs covered
  runs=$(sed -n "s/^stat::number_of_executed_units: *//p" "$log")
  covered=$(sed -n 's/.* cov: \([0-9]*\).*/\1/p' "$log" | tail -n 1)
  if [ "$2" = 0 ]; then
    passed=$((passed + 1))
    echo "fuzz: $1: ok, ${runs:-?} inputs, ${covered:-?} edges seen"
  else
    failed=$((failed + 1))
    echo "fuzz: $1: FAILED with $2:"
    grep -a -v -E '^(#[0-9]+|INFO: |WARNING: Failed to find function|stat::)|NEW_FUNC|^Base64: ' "$log" | head -n 60
    for input in fuzz/artifacts/"$1"-*; do
      [ ! -e "$input" ] || echo "fuzz: $input as base64: $(base64 -w 0 "$input")"
    done
  fi
}

passed=0 failed=0
while [ ${#targets[@]} -gt 0 ]; do
  pair=("${targets[@]:0:2}")
  targets=("${targets[@]:2}")
  pids=()
  for target in "${pair[@]}"; do
    run "$target" &
    pids+=($!)
  done
  for n in "${!pair[@]}"; do
    code=0
    wait "${pids[n]}" || code=$?
    report "${pair[n]}" "$code"
  done
done
echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" = 0 ]
