#!/usr/bin/env bash
# hack/containerd.sh [DIR]: bring a real containerd, runc, ctr, the CNI plugins and a static busybox from Debian's packages
# into DIR (default ${DRANIC_CACHE:-~/.cache/dranic}/containerd). The packages are only unpacked: nothing is installed, no
# service is started, and apt's own state is not touched. Needs no root. A second run does nothing.
#
# Prints DIR on stdout when all is there: DIR/bin/{containerd,containerd-shim-runc-v2,ctr,runc,busybox}, DIR/cni/*, DIR/versions.
# Exit code 75 (EX_TEMPFAIL) with the reason on stderr when it can't be had here; tests then say "skipped: ...".
set -euo pipefail

# containerd: Debian 12's own (1.6) has no NRI; sid's is 2.1 with NRI 0.8 and runs on Debian 12's libc.
# runc, plugins, busybox: Debian 12's; sid's runc needs a newer libc.
runtime_suite=sid   runtime_packages=(containerd)
stable_suite=bookworm stable_packages=(runc containernetworking-plugins busybox-static)
format=1            # raise it when the content of DIR changes, so that older folders are made again

dir=${1:-${DRANIC_CACHE:-${HOME:-/tmp}/.cache/dranic}/containerd}
say() { echo "containerd.sh: $*" >&2; }
unavailable() { say "no containerd: $*"; exit 75; }

ready() { [ "$(cat "$dir/ready" 2>/dev/null)" = "$format" ]; }
if ready; then (cd "$dir" && pwd); exit 0; fi

for tool in apt-get dpkg flock timeout; do
  command -v "$tool" >/dev/null || unavailable "$tool is missing (this needs Debian's tools)"
done
mkdir -p "$dir" 2>/dev/null || unavailable "can't make the folder $dir"
dir=$(cd "$dir" && pwd)
exec 9>"$dir/lock"
flock 9             # tests of one run may ask at the same time
if ready; then echo "$dir"; exit 0; fi

# The mirror and the keys are the machine's own: the first Debian archive that apt already uses.
source=$(apt-get indextargets --format '$(REPO_URI) $(SIGNED_BY) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' 2>/dev/null |
  awk '$(NF) == "main" && $(NF-1) ~ /^(bookworm|trixie|forky|sid|stable|testing|unstable)$/ { print $1, (NF > 3 ? $2 : ""); exit }') ||
  source=
read -r mirror keys <<<"$source" || true
[ -n "${mirror:-}" ] || unavailable "apt has no source of Debian's main archive"
[ -r "${keys:-}" ] || keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -r "$keys" ] || unavailable "$keys is missing: apt-get install debian-archive-keyring"

work=$(mktemp -d "$dir/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{lists/partial,cache/archives/partial,debs,root,new/bin,new/cni}
touch "$work/status"
for suite in "$runtime_suite" "$stable_suite"; do
  echo "deb [signed-by=$keys] $mirror $suite main"
done >"$work/sources.list"

own_apt() {
  timeout 300 apt-get -qq \
    -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=- \
    -o Dir::Etc::Preferences=- -o Dir::Etc::PreferencesParts=- -o APT::Default-Release= \
    -o Dir::State="$work" -o Dir::State::Lists="$work/lists" -o Dir::State::Status="$work/status" \
    -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root -o Acquire::Languages=none \
    -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 "$@"
}

log=$work/apt.log
why() { grep -m 1 -E '^(W|E):' "$log" || tail -n 1 "$log"; }
say "taking ${runtime_packages[*]} ($runtime_suite) and ${stable_packages[*]} ($stable_suite) into $dir"
own_apt -o APT::Update::Error-Mode=any update >"$log" 2>&1 || unavailable "apt-get update: $(why)"
(cd "$work/debs" && own_apt download "${runtime_packages[@]/%//$runtime_suite}" "${stable_packages[@]/%//$stable_suite}") \
  >"$log" 2>&1 || unavailable "apt-get download: $(why)"
for deb in "$work"/debs/*.deb; do
  dpkg -x "$deb" "$work/root" || unavailable "dpkg -x ${deb##*/} failed"
  dpkg-deb --show --showformat '${Package} ${Version}\n' "$deb"
done >"$work/new/versions"

pick() { # pick NAME FOLDER: the program NAME, wherever its package keeps it
  local found
  found=$(find "$work/root" -type f -name "$1" -perm -u+x | head -n 1)
  [ -n "$found" ] || unavailable "no $1 in the packages"
  mv "$found" "$work/new/$2/"
}
for program in containerd containerd-shim-runc-v2 ctr runc busybox; do pick "$program" bin; done
for plugin in loopback bridge ptp host-local; do pick "$plugin" cni; done
for program in containerd ctr runc; do   # a package of a newer Debian may ask for a newer libc
  said=$("$work/new/bin/$program" --version 2>&1) || unavailable "$program does not run here: ${said##*$'\n'}"
done

rm -rf "$dir/bin" "$dir/cni" "$dir/versions"
mv "$work/new/bin" "$work/new/cni" "$work/new/versions" "$dir/"
echo "$format" >"$dir/ready"
say "ready: $(tr '\n' ';' <"$dir/versions")"
echo "$dir"
