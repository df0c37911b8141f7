#!/bin/bash
# e2e/vm/guest.sh: process 1 of the guest, started by the initrd from the control folder that run.sh made. Not for use by hand.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
control=$(dirname "$0")
modules=$(cat "$control/modules") # where the host keeps /lib/modules for this kernel
out=$(cat "$control/out")         # the host's name of the writable share

stty -opost </dev/console
ln -sfn /proc/self/fd /dev/fd
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t debugfs debugfs /sys/kernel/debug
mount -t tracefs tracefs /sys/kernel/tracing
v=$(uname -r)
mkdir -p "/lib/modules/$v" && mount --bind "$modules/$v" "/lib/modules/$v"
mkdir -p "$out" && mount --bind /run/vm "$out"
ip link set lo up

OUT=$out setsid bash "$control/command" </dev/null
rc=$?
dmesg >"$out/dmesg.txt"
echo $rc >"$control/rc"
# the debug port ends QEMU at once; the key is for the case that it does not
printf '\0' | dd of=/dev/port bs=1 seek=244 conv=notrunc status=none
echo o >/proc/sysrq-trigger
sleep 10
