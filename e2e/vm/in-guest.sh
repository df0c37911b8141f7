#!/usr/bin/env bash
# e2e/vm/in-guest.sh FILE: inside the guest: run each line of FILE, a test binary with its filters or a script, one after the other.
# Exit code 1 when one of them failed.
set -u
modprobe -a igb igbvf veth bridge macvlan ipvlan vrf 8021q bonding dummy sch_tbf
failed=0
while read -r program filters; do
  echo "=== ${program##*/} $filters (at $SECONDS s)"
  code=0
  case $program in
    *.sh) bash "$program" </dev/null || code=$? ;;
    # One test at a time: they share the NICs, and the guest's clock is slow. Filters are words.
    # shellcheck disable=SC2086
    *) "$program" $filters --show-output --test-threads 1 --color never </dev/null || code=$? ;;
  esac
  case $code in
    0) ;;
    1 | 101) failed=1 ;; # it said how many tests failed
    *) failed=1 && echo "test result: FAILED. 0 passed; 1 failed; 0 ignored; ${program##*/} ended with $code" ;;
  esac
done <"$1"
echo "=== at $SECONDS s; the guest's kernel is $(uname -r)"
exit $failed
