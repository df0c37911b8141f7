#!/usr/bin/env bash
# e2e/cluster/nics.sh NODE COUNT: exactly the NICs nic0 ... on the node's ports of the rails; those that are there stay as they are,
# other links of their kind, and of kind ifb, go. macvlan, since the links of pods' own network are veth, which a node does not offer.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
n=$1 count=$2
pid=$(cat "$S/$n/init.pid")
inside() { nsenter -t "$pid" -n "$@"; }

declare -A have=()
for link in $({ inside ip -o link show type macvlan; inside ip -o link show type ifb; } | sed 's/^[0-9]*: \([^@:]*\).*/\1/'); do have[$link]=1; done
ports=$(inside ip -o link show type veth | grep -c '^[0-9]*: port')
{
  for number in $(seq 0 $((count - 1))); do
    nic=nic$number port=port$((number % ports))
    if [ -n "${have[$nic]:-}" ]; then unset "have[$nic]"; continue; fi
    echo "link set $port mtu 9000 up"
    echo "link add $nic link $port mtu 9000 address 02:20:00:00:$(printf '%02x' "$number"):0${n#node} type macvlan mode bridge"
    echo "addr add 10.20.$number.${n#node}/24 dev $nic"
    echo "link set $nic up"
  done
  for link in "${!have[@]}"; do echo "link del $link"; done
} | inside ip -batch -
