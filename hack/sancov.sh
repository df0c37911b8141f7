#!/usr/bin/env bash
# RUSTC_WORKSPACE_WRAPPER of hack/fuzz.sh: compiles our own crates with the counters that libFuzzer reads, with any stable toolchain.
# Dependencies do not pass through it, so they are the same as in every other build. Build scripts link no libFuzzer, so they have
# no counters.
set -euo pipefail

rustc=$1
shift
name='' last=''
for argument; do
  [ "$last" != --crate-name ] || name=$argument
  last=$argument
done
case $name in
  dranic | dranic_fuzz) ;;
  *) exec "$rustc" "$@" ;;
esac
sancov=-Cllvm-args=-sanitizer-coverage
# Optimised, as a minute is short; overflows and debug assertions are still found.
exec "$rustc" "$@" -Copt-level=1 -Coverflow-checks=on -Cdebug-assertions=on \
  -Cpasses=sancov-module "$sancov-level=4" "$sancov-inline-8bit-counters" "$sancov-pc-table" "$sancov-trace-compares"
