#!/usr/bin/env bash
# e2e/cluster/node.sh SCRATCH NODE: process 1 of a node, called by world.sh inside the node's new namespaces.
# Standard paths are bind mounts of the scratch folder, so that paths are those of production and this machine is not touched.
set -euo pipefail
scratch=$1 name=$2
root=$scratch/$name/root

mount --make-rprivate /
# sysfs shows the network namespace of whoever mounted it, so /sys/class/net needs a new one; what is mounted below it moves over.
# While mounts are private: the unmounting would else take the cgroup hierarchies of this machine with it.
mkdir -p "$scratch/$name/cgroup"
mount --rbind /sys/fs/cgroup "$scratch/$name/cgroup"
mount -t sysfs sysfs /sys
mount --rbind "$scratch/$name/cgroup" /sys/fs/cgroup
umount -l "$scratch/$name/cgroup"
mount -t bpf bpf /sys/fs/bpf 2>/dev/null || true

hostname "$name"
# Folders that this machine may lack are made in a layer above it.
for path in /etc /opt /var/lib /var/log; do
  mkdir -p "$scratch/$name/layer$path"/{upper,work}
  mount -t overlay overlay -o "lowerdir=$path,upperdir=$scratch/$name/layer$path/upper,workdir=$scratch/$name/layer$path/work" "$path"
done
for path in /run /var/lib/{kubelet,containerd,cni,dranic} /etc/{cni,containerd,nri,cdi} /opt/{cni,containerd,nri} /var/log/{pods,containers}; do
  mkdir -p "$path" "$root$path"
  mount --bind "$root$path" "$path"
done
mount --make-rshared /   # inside the node only: for volumes with mount propagation
mkdir -p /run/{lock,netns,cdi,nri}
# Of this start of the node: another one than the machine's, and than before.
mkdir -p /run/dranic
cat /proc/sys/kernel/random/uuid >/run/dranic/boot-id
mount --bind /run/dranic/boot-id /proc/sys/kernel/random/boot_id
ip link set lo up
echo 1 >/proc/sys/net/ipv4/ip_forward
touch "$scratch/$name/ready"

trap 'exit 0' TERM
while :; do sleep 3600 & wait $!; done   # reaps what is left to it
