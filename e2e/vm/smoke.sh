#!/usr/bin/env bash
# e2e/vm/smoke.sh: show, inside the guest (run.sh DIR -- bash smoke.sh), that RDMA devices and NICs move as a test needs them to.
# Wants at least two igb NICs joined by a wire. Prints a PASS or FAIL line for each check; the exit code says if all passed.
set -u
passed=0 failed=0

check() { # NAME COMMAND...: passes when the command does
  local name=$1 said
  shift
  if said=$("$@" 2>&1); then
    passed=$((passed + 1)) && echo "PASS $name"
  else
    failed=$((failed + 1)) && echo "FAIL $name"
    printf '     | %s\n' "${said:-$*}"
  fi
}
not() { ! "$@"; }
within() { # SECONDS COMMAND...: try until it passes
  local end=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $end ] || { "$@"; return; }
    sleep 0.2
  done
}
in_ns() { ip netns exec "$@"; }
driver_is() { [ "$(basename "$(readlink -f "/sys/class/net/$1/device/driver")")" = "$2" ]; }
over() { # NAMESPACE RDMA_DEVICE NETDEV: the device is there, over that netdev
  in_ns "$1" rdma link show "$2/1" | grep -qw "netdev $3"
}
active() { in_ns "$1" rdma link show "$2/1" | grep -q 'state ACTIVE'; }
gone_from() { not in_ns "$1" rdma dev show "$2" && not in_ns "$1" test -e "/sys/class/infiniband/$2"; }
move() { # FROM TO RDMA_DEVICE NETDEV
  in_ns "$1" rdma dev set "$3" netns "$2" && ip -n "$1" link set "$4" netns "$2"
}
set_up() { # NAMESPACE NETDEV ADDRESS
  ip -n "$1" link set lo up && ip -n "$1" addr add "$3/24" dev "$2" && ip -n "$1" link set "$2" up
}
ping_pong() { # SERVER_NS DEVICE ADDRESS CLIENT_NS DEVICE GID_INDEX
  in_ns "$1" timeout 20 ibv_rc_pingpong -d "$2" -g "$6" -n 100 >/dev/null 2>&1 &
  within 10 eval "in_ns $1 ss -Hltn | grep -q :18515" || return
  in_ns "$4" timeout 20 ibv_rc_pingpong -d "$5" -g "$6" -n 100 "$3" && wait $!
}
cm_ping() { # SERVER_NS ADDRESS CLIENT_NS
  in_ns "$1" timeout 20 rping -s -a "$2" -C 5 >/dev/null 2>&1 &
  within 10 eval "in_ns $1 rdma resource show cm_id | grep -q LISTEN" || return
  in_ns "$3" timeout 20 rping -c -a "$2" -C 5 && wait $!
}
opens() { # NAMESPACE RDMA_DEVICE: its /dev/infiniband/uverbsN can be opened
  local v
  v=$(grep -lx "$2" /sys/class/infiniband_verbs/*/ibdev) || { echo "no verbs device"; return 0; }
  in_ns "$1" bash -c "exec 9<>/dev/infiniband/$(basename "$(dirname "$v")")"
}
quiet_kernel() { ! dmesg | grep -E 'BUG:|WARNING:|Call Trace|refcount|unregister_netdevice'; }
function_of() { basename "$(readlink -f "/sys/class/infiniband/$1/device")"; }
same_function() { [ "$(function_of "$1")" = "$(basename "$(readlink -f "/sys/class/net/$2/device")")" ]; }

# --- modules and devices
check "the movable rdma_rxe comes first" eval 'modinfo -n rdma_rxe | grep -q /updates/'
for m in ib_uverbs rdma_ucm rdma_rxe siw netdevsim igb igbvf veth dummy ipvlan vrf 8021q bonding; do
  check "module $m" modprobe $m
done
ip netns attach init 1
# the guest's netdev names follow the order of probing; the MAC addresses follow topology.py's numbers
mapfile -t nics < <(for n in /sys/class/net/*; do
  driver_is "${n##*/}" igb && echo "$(cat "$n/address") ${n##*/}"
done | sort | cut -d' ' -f2)
check "two igb NICs (${nics[*]})" test ${#nics[@]} -ge 2
n0=${nics[0]:-none0} n1=${nics[1]:-none1}
ip link add v0 type veth peer name v1
ip link add d0 type dummy
for n in v0 v1 d0 "$n0" "$n1"; do ip link set "$n" up; done
check "rxe over the first NIC" rdma link add rx0 type rxe netdev "$n0"
check "rxe over the second NIC" rdma link add rx1 type rxe netdev "$n1"
check "rxe over veth" rdma link add rv0 type rxe netdev v0
check "rxe over the veth's peer" rdma link add rv1 type rxe netdev v1
check "siw over dummy" rdma link add sw0 type siw netdev d0
check "the rxe's device is the NIC's PCI function" same_function rx0 "$n0"
check "exclusive mode" rdma system set netns exclusive

# --- a NIC and its RDMA device to a namespace and back
ip netns add A
ip netns add B
check "move NIC and RDMA device to a namespace" move init A rx0 "$n0"
check "both are there" over A rx0 "$n0"
check "the RDMA device is gone from the first namespace" gone_from init rx0
check "a device of another namespace can't be opened" not opens init rx0
check "in its own it can" opens A rx0
check "move them back" move A init rx0 "$n0"
check "both are back" over init rx0 "$n0"
check "siw moves too" move init A sw0 d0
check "siw is there" over A sw0 d0

# --- traffic between two namespaces
move init A rv0 v0 && set_up A v0 10.1.0.1
move init B rv1 v1 && set_up B v1 10.1.0.2
check "veth: active in the namespace" within 10 active A rv0
check "veth: both ends answer" within 10 in_ns A ping -c1 -W1 10.1.0.2
check "veth: verbs ping-pong, IPv4" ping_pong A rv0 10.1.0.1 B rv1 1
check "veth: verbs ping-pong, IPv6 link-local" ping_pong A rv0 10.1.0.1 B rv1 0
check "veth: rdma_cm ping" cm_ping A 10.1.0.1 B
move init A rx0 "$n0" && set_up A "$n0" 10.2.0.1
move init B rx1 "$n1" && set_up B "$n1" 10.2.0.2
check "igb: active in the namespace" within 20 active A rx0
check "igb: both ends answer" within 20 in_ns A ping -c1 -W1 10.2.0.2
check "igb: verbs ping-pong" ping_pong A rx0 10.2.0.1 B rx1 1

# --- the end of a namespace
ip -n A link set "$n0" down
ip -n A link set "$n0" name roce0
ip netns del A
check "namespace deleted: the NIC is back, with its new name" within 10 driver_is roce0 igb
check "namespace deleted: its RDMA device is back" within 10 over init rx0 roce0
check "namespace deleted: the veth's RDMA device is no more" within 10 not rdma dev show rv0
ip netns del B
check "second namespace deleted: NIC and RDMA device are back" within 10 over init rx1 "$n1"

# --- SR-IOV
pf=/sys/class/net/$n1/device
check "make 2 VFs" eval "echo 2 >$pf/sriov_numvfs"
check "the VFs have netdevs" within 10 eval "ls $pf/virtfn0/net/* $pf/virtfn1/net/*"
vf=$(basename "$pf"/virtfn0/net/*)
check "rxe over a VF" rdma link add rxvf type rxe netdev "$vf"
check "the rxe's device is the VF" same_function rxvf "$vf"
ip netns add C
check "move the VF and its RDMA device" move init C rxvf "$vf"
check "both are there" over C rxvf "$vf"
ip netns del C
check "namespace deleted: both are back" within 10 over init rxvf "$vf"

# --- netdevsim: a devlink device with ports
check "netdevsim with 2 ports" eval 'echo "1 2" >/sys/bus/netdevsim/new_device && devlink port show | grep -q netdevsim/netdevsim1/1'

check "back to shared mode" within 10 rdma system set netns shared
check "the kernel did not complain" quiet_kernel
# As cargo's tests say it, so that both are summed up alike.
echo "test result: $([ $failed = 0 ] && echo ok || echo FAILED). $passed passed; $failed failed; 0 ignored"
[ $failed = 0 ]
