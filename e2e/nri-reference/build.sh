#!/usr/bin/env bash
# e2e/nri-reference/build.sh: the reference runtime side of NRI in three versions, each a small Go program of ours around the package
# that containerd and CRI-O embed, into ${DRANIC_CACHE:-~/.cache/dranic}/nri-reference. What is there is not built again (a second run
# takes less than 1 s). The versions are those of go/*.mod; go.sum pins all they need.
#
# Prints the folder on stdout, progress on stderr. Exit code 75 (EX_TEMPFAIL) with the reason on stderr when it can't be had here.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
dir=${DRANIC_CACHE:-${HOME:-/tmp}/.cache/dranic}/nri-reference
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)

say() { echo "nri-reference: $*" >&2; }
unavailable() { say "$*"; exit 75; }

export CGO_ENABLED=0 GOFLAGS=-mod=readonly GOTOOLCHAIN=local
go_wanted=$(sed -n 's/^go //p' "$here/go/go.mod")
[ -n "$(command -v go)" ] || unavailable "go is missing: the reference is a Go module; install Go $go_wanted or newer"
go_here=$(go env GOVERSION)
[ "$(printf '%s\n' "$go_wanted" "${go_here#go}" | sort -V | head -n 1)" = "$go_wanted" ] ||
  unavailable "this is Go ${go_here#go}, the reference needs $go_wanted or newer"

exec 9>"$dir/lock"
flock 9 # two runs at the same time would build it twice
cd "$here/go"
stamp="$go_here $(cat -- *.go *.mod *.sum | sha256sum | cut -c 1-16)"
for mod in *.mod; do
  version=$(sed -n 's#^require github.com/containerd/nri v##p' "$mod")
  out=$dir/nri-$version
  [ "$(cat "$out.stamp" 2>/dev/null)" != "$stamp" ] || continue
  say "building the runtime side of NRI $version"
  rm -f "$out.stamp"
  tags=nri_no_wasm
  case $version in 0.8.*) tags+=,nri08 ;; esac
  # What can't be fetched is a matter of this machine; what does not compile is one of ours.
  go list -modfile="$mod" -tags "$tags" -deps . >/dev/null || unavailable "the modules of NRI $version can't be had here (see above)"
  nice -n 10 go build -modfile="$mod" -tags "$tags" -trimpath -ldflags '-s -w' -o "$out.new" . >&2
  mv "$out.new" "$out"
  echo "$stamp" >"$out.stamp"
done
echo "$dir"
