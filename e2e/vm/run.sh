#!/usr/bin/env bash
# e2e/vm/run.sh DIR [--nics N] [--pxb P] [--nic igb|virtio-net-pci] [--mem MIB] [--timeout S] -- COMMAND...
# Run COMMAND as root in a virtual machine that sees this machine's files; stream its output; exit with its exit code.
# DIR: made by prep.sh. From the environment: OUT (folder that COMMAND can write to), MEM (as --mem), CPUS.
set -euo pipefail

usage() { sed -n '2,4s/^# //p' "$0" >&2; exit 64; }
here=$(dirname "$(readlink -f "$0")")
nics=2 pxb=1 nic=igb limit=300 mem=${MEM:-1024} cpus=${CPUS:-1}
[ $# -ge 1 ] || usage
dir=$1
shift
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  [ $# -ge 2 ] || usage
  case $1 in
    --nics) nics=$2 ;;
    --pxb) pxb=$2 ;;
    --nic) nic=$2 ;;
    --mem) mem=$2 ;;
    --timeout) limit=$2 ;;
    *) usage ;;
  esac
  shift 2
done
[ $# -ge 2 ] || usage
shift
guest=$(readlink -f "$dir")/guest
[ -e "$guest/version" ] || { echo "run.sh: $dir is not ready: run prep.sh $dir" >&2; exit 1; }
v=$(cat "$guest/version")
args=$(python3 "$here/topology.py" --nics "$nics" --pxb "$pxb" --nic "$nic" --mem "$mem" --cpus "$cpus")
mapfile -t topology <<<"$args"

# the control folder lies in the writable share: the command goes in, the exit code comes out
temporary=
if [ -n "${OUT:-}" ]; then mkdir -p "$OUT"; else OUT=$(mktemp -d) && temporary=$OUT; fi
out=$(readlink -f "$OUT")
control=$(mktemp -d "$out/.vm.XXXXXX")
trap 'rm -rf "$control" ${temporary:+"$temporary"}' EXIT
cp "$here/guest.sh" "$control/"
echo "$guest/lib/modules" >"$control/modules"
echo "$out" >"$control/out"
{
  printf 'export PATH=%q\ncd %q || exit\n' "$PATH" "$PWD"
  printf 'exec'
  printf ' %q' "$@"
  echo
} >"$control/command"

# KVM of the "pvm" kind can't start a Debian kernel
if [ -e /dev/kvm ] && [ ! -e /sys/module/kvm_pvm ]; then
  machine=(-accel kvm -cpu host)
else
  machine=(-accel "tcg,thread=single,tb-size=256" -cpu max)
fi

# One socket for each CPU: the kernel warns when a socket lies on two NUMA nodes. Where a server has an idle CPU for whoever must answer in
# time, one that is emulated can only be taken from the one who works: preempt=full lets the kernel do that inside a driver, too. Two CPUs
# in one thread take turns of 100 ms (QEMU), and everything takes longer.
start() {
  exec timeout --foreground --kill-after=5 "$limit" qemu-system-x86_64 "${machine[@]}" -machine q35 -m "$mem" \
    -smp "$cpus,sockets=$cpus" -nodefaults -no-reboot -display none -monitor none -serial stdio \
    -kernel "$guest/boot/vmlinuz-$v" -initrd "$guest/initrd" \
    -append "console=ttyS0 quiet loglevel=3 panic=1 mitigations=off no_timer_check preempt=full vm.control=$(basename "$control")" \
    -fsdev local,id=root,path=/,security_model=none,readonly=on,multidevs=remap \
    -device virtio-9p-pci,bus=pcie.0,fsdev=root,mount_tag=root \
    -fsdev local,id=out,path="${out//,/,,}",security_model=none,multidevs=remap \
    -device virtio-9p-pci,bus=pcie.0,fsdev=out,mount_tag=out \
    -device isa-debug-exit,iobase=0xf4,iosize=1 "${topology[@]}" </dev/null \
    2> >(grep -v 'is not connected to host network' >&2)
}

for try in 1 2; do
  status=0
  start &
  trap 'kill $!' INT TERM
  wait $! || status=$?
  [ ! -e "$control/rc" ] || exit "$(cat "$control/rc")"
  # an emulator's assertion, seen rarely: once more
  if [ "$status" != 134 ] || [ "$try" = 2 ]; then break; fi
  echo "run.sh: QEMU aborted, trying once more" >&2
done
if [ "$status" = 124 ]; then
  echo "run.sh: longer than $limit s" >&2
  exit 124
fi
echo "run.sh: the guest gave no exit code; QEMU's was $status" >&2
exit 125
