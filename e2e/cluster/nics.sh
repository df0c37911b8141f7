#!/usr/bin/env bash
# e2e/cluster/nics.sh NODE COUNT: the node's NICs nic0, nic1, ... on its ports of the rails; those that exist stay as they are.
# macvlan, since the links of pods' own network are veth, which a node does not offer.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
n=$1 count=$2
pid=$(cat "$S/$n/init.pid")
have=$(nsenter -t "$pid" -n ip -o link)
for rail in $(seq 0 $((count - 1))); do
  [[ $have != *": nic$rail@"* ]] || continue
  cat <<B
link set port$rail mtu 9000 up
link add nic$rail link port$rail mtu 9000 address 02:20:00:00:$(printf '%02x' "$rail"):0${n#node} type macvlan mode bridge
addr add 10.20.$rail.${n#node}/24 dev nic$rail
link set nic$rail up
B
done | nsenter -t "$pid" -n ip -batch -
