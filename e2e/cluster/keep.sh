#!/usr/bin/env bash
# e2e/cluster/keep.sh COMMAND...: run it, again whenever it ends, until TERM.
child=
trap '[ -z "$child" ] || kill "$child"; wait "$child"; exit 0' TERM
while :; do
  "$@" &
  child=$!
  wait "$child"
  echo "keep: ended with $?, starting it again" >&2
  sleep 0.2
done
