# e2e/cluster/world.sh: how a node comes to be and ends, for up.sh, reboot.sh and down.sh. Not a program; lib.sh comes first.
# A node is one `unshare` (mount, net, pid, uts, ipc): ending its outermost process ends everything in it. Its links are veth pairs
# into the fabric, a network namespace of its own, with a bridge for the nodes' network and one for each rail. So a node's end takes
# no link from the other one.

service=10.96.0.1   # of the API, on node1; so no kube-proxy is needed
pid_of() { cat "$S/$1/init.pid"; }
address() { echo "192.168.77.${1#node}"; }
pods_of() { echo "10.244.$((${1#node} - 1)).0/24"; }
cgroup() { echo "dranic-$(basename "$S")-$1"; }
inside() { nsenter -t "$1" -n "${@:2}"; }   # by pid, in the network namespace only
nodes_of() { (cd "$S" && echo node[0-9]*); }
rails_of() { inside "$(cat "$S/fabric/outer.pid")" ip -o link show type bridge | grep -c '^[0-9]*: rail'; }

world() { # world NODE: its namespaces
  local n=$1 outer
  mkdir -p "$S/$n"/{log,root,daemons}
  rm -f "$S/$n/ready"
  setsid nohup unshare --mount --net --pid --uts --ipc --fork --mount-proc --kill-child=SIGKILL \
    bash "$here/node.sh" "$S" "$n" >"$S/$n/log/node.log" 2>&1 </dev/null &
  outer=$!
  echo "$outer" >"$S/$n/outer.pid"
  wait_for 20 "$n's namespaces" test -e "$S/$n/ready" || { cat "$S/$n/log/node.log" >&2; exit 1; }
  tr -d ' ' <"/proc/$outer/task/$outer/children" >"$S/$n/init.pid"
  cgroups "$n"
}

cgroups() { # a cgroup of its own in each hierarchy, so that it is known what to remove
  local hierarchy group
  for hierarchy in /sys/fs/cgroup /sys/fs/cgroup/*/; do
    hierarchy=${hierarchy%/}
    [ -e "$hierarchy/cgroup.procs" ] && [ ! -L "$hierarchy" ] || continue
    if [ "$hierarchy" != /sys/fs/cgroup ] && [ -e /sys/fs/cgroup/cgroup.procs ]; then continue; fi   # a group of cgroup v2
    group=$hierarchy/$(cgroup "$1")
    mkdir -p "$group"
    if [ -e "$hierarchy/cgroup.controllers" ]; then
      for controller in $(cat "$hierarchy/cgroup.controllers"); do
        echo "+$controller" >"$hierarchy/cgroup.subtree_control" 2>/dev/null || true
        echo "+$controller" >"$group/cgroup.subtree_control" 2>/dev/null || true
      done
    elif [ -e "$group/cpuset.cpus" ]; then
      cat "$hierarchy/cpuset.cpus" >"$group/cpuset.cpus"
      cat "$hierarchy/cpuset.mems" >"$group/cpuset.mems"
    fi
  done
}

fabric() { # fabric RAILS: the bridges
  local rail
  mkdir -p "$S/fabric"
  setsid nohup unshare --net sleep infinity >/dev/null 2>&1 </dev/null &
  echo $! >"$S/fabric/outer.pid"
  wait_for 5 "the fabric" bash -c "[ \"\$(readlink /proc/$!/ns/net)\" != \"\$(readlink /proc/self/ns/net)\" ]"
  {
    echo "link add nodes type bridge"
    echo "link set nodes up"
    for rail in $(seq 0 $(($1 - 1))); do
      echo "link add rail$rail mtu 9000 type bridge"
      echo "link set rail$rail up"
    done
  } | inside "$!" ip -batch -
}

links() { # links NODE: all its links, made anew
  local n=$1 fabric rails rail other
  fabric=$(cat "$S/fabric/outer.pid") rails=$(rails_of)
  {
    echo "link add $n-node type veth peer name node0 netns $(pid_of "$n")"
    echo "link set $n-node master nodes up"
    for rail in $(seq 0 $((rails - 1))); do
      echo "link add $n-$rail mtu 9000 type veth peer name port$rail netns $(pid_of "$n")"
      echo "link set $n-$rail mtu 9000 master rail$rail up"
    done
  } | inside "$fabric" ip -batch -
  {
    echo "addr add $(address "$n")/24 dev node0"
    [ "$n" != node1 ] || echo "addr add $service/32 dev node0"
    echo "link set node0 up"
    if [ "$n" = node1 ]; then echo "route add default dev node0"; else echo "route add default via $(address node1)"; fi
    for other in $(nodes_of); do
      [ "$other" = "$n" ] || echo "route add $(pods_of "$other") via $(address "$other")"
    done
  } | inside "$(pid_of "$n")" ip -batch -
  "$here/nics.sh" "$n" "$rails"
}

is_gone() { ! kill -0 "$1" 2>/dev/null || [ "$(awk '{print $3}' "/proc/$1/stat" 2>/dev/null)" = Z ]; }

end_world() { # end_world NODE|fabric: as by a power cut
  local outer inner pid line
  [ -s "$S/$1/outer.pid" ] || return 0
  outer=$(cat "$S/$1/outer.pid")
  inner=$(cat "$S/$1/init.pid" 2>/dev/null || true)
  # The pid may be another program's by now, if this machine was started anew.
  line=$(tr '\0' ' ' <"/proc/$outer/cmdline" 2>/dev/null) || true
  [[ $line == *"$S"* || $line == "sleep infinity "* ]] || return 0
  kill -KILL "$outer"   # unshare ignores TERM; with it goes process 1 of the node, and so all others
  for pid in $outer $inner; do wait_for 20 "the end of $1" is_gone "$pid"; done
}

remove_cgroups() { # remove_cgroups NODE: what is left of its processes' groups; fails while some are in use
  local group
  for group in /sys/fs/cgroup/*/"$(cgroup "$1")" /sys/fs/cgroup/"$(cgroup "$1")"; do
    [ ! -d "$group" ] || find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
    [ ! -d "$group" ] || return 1
  done
}
