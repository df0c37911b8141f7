#!/usr/bin/env bash
# e2e/cluster/nics.sh NODE COUNT: exactly the NICs nic0 ... on the node's ports of the rails; those that are there stay as they are,
# other links of their kind, of kind ifb, and those that a scenario calls bm..., go. macvlan, since the links of pods' own network are veth, which a node does not offer.
# e2e/cluster/nics.sh NODE again NUMBER: that one alone, which died, while others are in pods.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
n=$1 count=$2
pid=$(cat "$S/$n/init.pid")
inside() { nsenter -t "$pid" -n "$@"; }

nic() { # nic NUMBER: what makes it
  local nic=nic$1 port=port$(($1 % ports))
  echo "link set $port mtu 9000 up"
  echo "link add $nic link $port mtu 9000 address 02:20:00:00:$(printf '%02x' "$1"):0${n#node} type macvlan mode bridge"
  echo "addr add 10.20.$1.${n#node}/24 dev $nic"
  echo "link set $nic up"
}

ports=$(inside ip -o link show type veth | grep -c '^[0-9]*: port')
if [ "$count" = again ]; then
  inside ip link show "nic$3" >/dev/null 2>&1 || nic "$3" | inside ip -batch -
  exit
fi
declare -A have=()
all() { inside ip -o link show type "$1" | sed 's/^[0-9]*: \([^@:]*\).*/\1/'; }
for link in $(all macvlan; all ifb; all veth | grep '^bm'); do have[$link]=1; done
{
  for number in $(seq 0 $((count - 1))); do
    if [ -n "${have[nic$number]:-}" ]; then unset "have[nic$number]"; continue; fi
    nic "$number"
  done
  for link in "${!have[@]}"; do echo "link del $link"; done
} | inside ip -batch -
