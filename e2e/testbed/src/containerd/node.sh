# Process 1 of a scratch node, in mount, net, pid, uts and ipc namespaces of its own. Arguments: SCRATCH KIT.
# Ends, and with it everything in the node, when its stdin closes, which is when the test's process closes it or dies.
set -eu
scratch=$1 kit=$2
exec 3<&0

# sysfs shows the network namespace of whoever mounted it: /sys/class/net must be this node's. The cgroup mounts, which the new
# sysfs would hide, are put back.
mkdir -p "$scratch/cgroup"
mount --rbind /sys/fs/cgroup "$scratch/cgroup"
mount -t sysfs sysfs /sys
mount --rbind "$scratch/cgroup" /sys/fs/cgroup
umount -l "$scratch/cgroup"

# private FOLDER NAME...: what the node makes in FOLDER stays in SCRATCH/root/FOLDER. The host's own entries stay visible, as
# symlinks, except the NAMEs. So all paths are production's, and nothing needs to be made on the host.
private() {
  folder=$1 own=$scratch/root$1 host=$scratch/host$1
  shift
  mkdir -p "$own" "$host"
  mount --rbind "$folder" "$host"
  for entry in "$host"/*; do
    if [ -e "$entry" ]; then ln -s "$entry" "$own/"; fi
  done
  mount --bind "$own" "$folder"
  for name; do
    rm -f "$folder/$name"
    mkdir "$folder/$name"
  done
}
private /run containerd netns nri cdi runc
private /var/lib containerd cni kubelet

"$kit/bin/busybox" ip link set lo up

trap 'exit 0' TERM
(cat <&3 >/dev/null; kill -TERM 1) &

# containerd comes back when it is killed, unless the file "hold" says to wait.
while :; do
  "$kit/bin/containerd" --config "$scratch/config.toml" >>"$scratch/containerd.log" 2>&1 3<&- &
  echo $! >"$scratch/containerd.pid"
  wait $! || true
  rm -f "$scratch/containerd.pid"
  sleep 0.05
  while [ -e "$scratch/hold" ]; do sleep 0.02; done
done
