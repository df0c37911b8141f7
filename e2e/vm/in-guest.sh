#!/usr/bin/env bash
# e2e/vm/in-guest.sh shared|exclusive FILE: inside the guest: set the mode of RDMA devices, load drivers, run each line of FILE, a test
# binary with its filters or a script, one after the other. Exit code 1 when one of them failed.
set -u
# As an administrator's options in modprobe.d do it: 1 is shared. Before anything makes a network namespace.
modprobe ib_core netns_mode=$([ "$1" = exclusive ] && echo 0 || echo 1)
rdma system show | grep -q "netns $1" || { echo "in-guest.sh: RDMA devices are not $1: $(rdma system show)"; exit 1; }
modprobe -a ib_uverbs ib_umad rdma_ucm rdma_rxe siw
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
done <"$2"
echo "=== at $SECONDS s; the guest's kernel is $(uname -r)"
exit $failed
