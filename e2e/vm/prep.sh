#!/usr/bin/env bash
# e2e/vm/prep.sh: everything that the virtual machine needs: Debian packages (they are installed), and a guest kernel with movable RDMA
# modules and an initrd in ${DRANIC_CACHE:-~/.cache/dranic}/vm. For Debian 12, as root. Does next to nothing when all is there.
# KERNEL=VERSION asks for another 6.12 kernel.
#
# Prints the folder on stdout, progress on stderr. Exit code 75 (EX_TEMPFAIL) with the reason on stderr when it can't be had here.
set -euo pipefail
shopt -s nullglob

here=$(dirname "$(readlink -f "$0")")
dir=${DRANIC_CACHE:-${HOME:-/tmp}/.cache/dranic}/vm
mkdir -p "$dir" && dir=$(readlink -f "$dir")
kernel=${KERNEL:-6.12.117+deb12-amd64} # the version that movable_rxe.py was tried with
suite=bookworm
exec 3>&1 1>&2 # the folder is all that goes to stdout
say() { printf 'vm [%3d s] %s\n' "$SECONDS" "$*"; }
die() { echo "vm: $*"; exit 1; }
unavailable() { echo "vm: $*"; exit 75; }

[ "$(id -u)" = 0 ] || unavailable "packages are installed by root only"
[ "$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)" = $suite ] || unavailable "made for Debian 12 ($suite) only"
[ "$(uname -m)" = x86_64 ] || unavailable "the guest's kernel is for x86_64, this is $(uname -m)"
exec 9>"$dir/lock" && flock 9

# --- apt, with backports, beside the machine's own set-up: neither its sources nor its lists are changed

apt_set_up() {
  local a=$dir/apt file
  [ -z "$(find "$a/ready" -mmin -600 2>/dev/null)" ] || return 0 # lists of today
  rm -rf "$a" && mkdir -p "$a/sources" "$a/lists/partial" "$a/cache/archives/partial"
  for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources}; do
    [ -e "$file" ] || continue
    cp "$file" "$a/sources/"
    # each entry for the suite itself, once more for its backports: in both of apt's formats
    case $file in
      *.sources) awk -v RS= -v ORS='\n\n' -v s=$suite '
        match($0, /(^|\n)Suites:[^\n]*/) {
          line = substr($0, RSTART, RLENGTH)
          if (line ~ "[ \t]" s "([ \t]|$)") {
            sub(/(^|\n)Suites:[^\n]*/, (RSTART > 1 ? "\n" : "") "Suites: " s "-backports"); print
          }
        }' "$file" >>"$a/sources/backports.sources" ;;
      *) sed -nE "s/^(deb .*[ \t])$suite([ \t].*)/\1$suite-backports\2/p" "$file" >>"$a/sources/backports.list" ;;
    esac
  done
  cat "$a"/sources/backports.* | grep -q -- -backports || unavailable "apt has no source of Debian's $suite"
  apt_do apt-get -qq -o APT::Update::Error-Mode=any update || unavailable "apt-get update failed (see above)"
  touch "$a/ready"
}

apt_do() {
  local tool=$1 a=$dir/apt
  shift
  DEBIAN_FRONTEND=noninteractive "$tool" -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts="$a/sources" \
    -o Dir::State::Lists="$a/lists" -o Dir::Cache="$a/cache" -o APT::Sandbox::User=root -o DPkg::Lock::Timeout=300 "$@"
}

# --- packages

want=(busybox-static cpio kmod gcc-12 make xz-utils iproute2 iputils-ping python3
  ibverbs-utils ibverbs-providers rdmacm-utils perftest pciutils numactl ethtool)
missing=()
for p in "${want[@]}"; do
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null)" = installed ] || missing+=("$p")
done
install() {
  say "installing $*"
  apt_set_up
  apt_do apt-get -q -y --no-remove --no-install-recommends install "$@" >"$dir/install.log" 2>&1 ||
    { rm -f "$dir/apt/ready"; tail -20 "$dir/install.log"; unavailable "packages can't be installed (see above)"; }
}
[ ${#missing[@]} = 0 ] || install "${missing[@]}"
# only backports' QEMU has the igb NIC; taking it must not remove an installed part of QEMU
qemu-system-x86_64 -device igb,help >/dev/null 2>&1 || install -t $suite-backports qemu-system-x86
# --- up to date?

key="$kernel $(cat "$here/prep.sh" "$here/movable_rxe.py" | sha256sum | cut -c1-16)"
if [ "$(cat "$dir/guest/key" 2>/dev/null)" = "$key" ]; then
  echo "$dir" >&3
  exit 0
fi

# --- download

apt_set_up
version_of() { apt_do apt-cache show "linux-image-$1" 2>/dev/null | awk '/^Version:/ { print $2; exit }'; }
v=$kernel
if [ -z "$(version_of "$v")" ]; then
  v=$(apt_do apt-cache depends linux-image-6.12-amd64 | sed -n 's/.*Depends: linux-image-//p' | head -1)
  say "linux-image-$kernel is gone, taking $v"
fi
version=$(version_of "$v")
base=${v%-amd64}
names=("linux-image-$v" "linux-headers-$v" "linux-headers-$base-common" "linux-kbuild-$base" linux-source-6.12)
mkdir -p "$dir/debs"
if [ "$(cat "$dir/debs/version" 2>/dev/null)" != "$version" ]; then
  rm -rf "$dir/debs" && mkdir "$dir/debs"
  (cd "$dir/debs" && apt_do apt-get -qq download "${names[@]/%/=$version}") ||
    { rm -f "$dir/apt/ready"; unavailable "the kernel's packages can't be had (see above)"; }
  echo "$version" >"$dir/debs/version"
fi
say "kernel packages: $(du -sm "$dir/debs" | cut -f1) MB"

# --- unpack the kernel and the modules that tests may want

b=$dir/build n=$dir/build/guest
rm -rf "$b" && mkdir -p "$n" "$b/headers" "$b/source"
k=./lib/modules/$v/kernel
dpkg --fsys-tarfile "$dir"/debs/linux-image-*.deb | tar -x -C "$n" --wildcards \
  "./boot/*-$v" "./lib/modules/$v/modules.*" "$k"/{arch,crypto,lib,net}'/*' \
  "$k"/drivers/{dca,i2c,infiniband,net,pps,ptp,virtio}'/*' "$k"/fs/{9p,configfs,netfs,overlayfs}'/*'
for p in "$dir"/debs/linux-{headers,kbuild}-*.deb; do dpkg -x "$p" "$b/headers"; done
h=$b/headers/usr/src/linux-headers-$v
sed -i "s#/usr/src/#$b/headers/usr/src/#" "$h/Makefile"
s=linux-source-6.12
dpkg --fsys-tarfile "$dir"/debs/linux-source-*.deb | tar -xO "./usr/src/$s.tar.xz" | xz -dc |
  tar -x -C "$b/source" $s/drivers/infiniband/sw $s/drivers/net/netdevsim
say "unpacked"

# --- edit and build; modprobe prefers updates/ to the kernel's own folder

python3 "$here/movable_rxe.py" "$b/source/$s/drivers/infiniband/sw"
mkdir "$n/lib/modules/$v/updates"
for m in infiniband/sw/rxe infiniband/sw/siw net/netdevsim; do
  make -s -j"$(nproc)" -C "$h" M="$b/source/$s/drivers/$m" CONFIG_DEBUG_INFO_BTF_MODULES= \
    CONFIG_RDMA_SIW=m CONFIG_NETDEVSIM=m modules >"$b/make.log" 2>&1 || { tail -20 "$b/make.log"; die "make failed"; }
  for p in "$b/source/$s/drivers/$m"/*.ko; do
    strip --strip-debug -o "$n/lib/modules/$v/updates/$(basename "$p")" "$p"
  done
done
depmod -b "$n" "$v" 2>/dev/null
say "built $(cd "$n/lib/modules/$v/updates" && echo *)"

# --- initrd: reach the host's root over 9p, lay a RAM overlay on it, go on with guest.sh

i=$b/initrd
mkdir -p "$i"/{bin,dev,proc,sys,mnt,lower,ram,m}
cp /bin/busybox "$i/bin/"
for p in sh cat insmod mkdir mount poweroff switch_root; do ln -s busybox "$i/bin/$p"; done
for m in virtio_pci 9pnet_virtio 9p overlay; do
  modprobe -d "$n" -S "$v" --show-depends $m 2>/dev/null | sed -n 's/^insmod *\([^ ]*\).*/\1/p'
done | awk '!seen[$0]++' | while read -r p; do
  m=$(basename "$p" .xz)
  case $p in *.xz) xz -dc "$p" >"$i/m/$m" ;; *) cp "$p" "$i/m/$m" ;; esac
  echo "$m" >>"$i/m/list"
done
cat >"$i/init" <<'INIT'
#!/bin/sh
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
for m in $(cat /m/list); do insmod /m/$m; done
p=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o ro,$p,cache=loose root /lower
mount -t tmpfs ram /ram && mkdir /ram/up /ram/work
mount -t overlay -o lowerdir=/lower,upperdir=/ram/up,workdir=/ram/work root /mnt
mount -t tmpfs run /mnt/run && mkdir /mnt/run/vm
mount -t 9p -o $p out /mnt/run/vm
for m in dev proc sys; do mount --move /$m /mnt/$m; done
for a in $(cat /mnt/proc/cmdline); do case $a in vm.control=*) c=${a#*=} ;; esac; done
exec switch_root /mnt /bin/bash /run/vm/$c/guest.sh
poweroff -f
INIT
chmod +x "$i/init"
(cd "$i" && find . | cpio -o -H newc --quiet) | gzip -1 >"$n/initrd"

echo "$v" >"$n/version"
echo "$key" >"$n/key"
rm -rf "$dir/guest" && mv "$n" "$dir/guest" && rm -rf "$b"
say "ready: $dir/guest, $(du -sm "$dir/guest" | cut -f1) MB, kernel $v"
echo "$dir" >&3
