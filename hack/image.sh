#!/usr/bin/env bash
# hack/image.sh [OUT.tar [NAME...]]: build a static dranic and dranic-guard and pack them, alone, into an image: an OCI layout as one tar, which
# `ctr -n k8s.io image import`, `podman load` and `skopeo copy oci-archive:` take. No container builder takes part.
#   OUT.tar  target/dranic-image.tar where absent
#   NAME     localhost/dranic:VERSION where absent, as the chart's values have it; several names are one image
# VERBS=1 adds dranic-verbs, which is not static, with its loader and libraries and the RDMA providers that are installed here.
# PROFILE=dev builds faster and larger. BINARY=file packs that program, and the dranic-guard beside it, instead of building them.
# The same programs give the same image, byte for byte: times are SOURCE_DATE_EPOCH (0), owners are root.
set -euo pipefail
repo=$(cd "$(dirname "$0")/.." && pwd)
export PATH=$PATH:${HOME:-}/.cargo/bin
profile=${PROFILE:-release}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$repo/Cargo.toml" | head -n 1)
target_dir=$("$repo/hack/target.sh")
out=${1:-$target_dir/dranic-image.tar}
names=("${@:2}")
[ ${#names[@]} -gt 0 ] || names=("localhost/dranic:$version")
for name in "${names[@]}"; do
  [[ $name =~ ^[a-z0-9./:@_-]+:[A-Za-z0-9._-]+$ ]] || { echo "image.sh: $name is not an image name with a tag" >&2; exit 64; }
done
epoch=${SOURCE_DATE_EPOCH:-0}
say() { echo "image.sh: $*" >&2; }

case $(uname -m) in
  x86_64) arch=amd64 triple=x86_64-unknown-linux-gnu ;;
  aarch64) arch=arm64 triple=aarch64-unknown-linux-gnu ;;
  *) say "$(uname -m) is not supported: x86_64 and aarch64 are"; exit 64 ;;
esac

# Static, so that the image needs no libc. --target keeps build scripts and macros, which can't be static, out of it.
build() {
  local flags="-C target-feature=+crt-static"
  # Paths of this machine in messages would make the image of a release another one on each machine. Changed flags build every crate
  # anew, so a build for tests keeps them the same in all folders.
  [ "$profile" = dev ] || flags+=" --remap-path-prefix=$repo=/src --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo"
  (cd "$repo" && RUSTFLAGS="${RUSTFLAGS:-} $flags" \
    cargo build --locked --package dranic --bin dranic --bin dranic-guard --profile "$profile" --target "$triple" >&2)
  local folder=$profile
  [ "$profile" != dev ] || folder=debug
  echo "$target_dir/$triple/$folder/dranic"
}
binary=${BINARY:-$(build)}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/root/usr/bin" "$work/oci/blobs/sha256"
cp "$binary" "$work/root/usr/bin/dranic"
# The agent puts it onto the node.
cp "$(dirname "$binary")/dranic-guard" "$work/root/usr/bin/dranic-guard"
# verbs: dranic-verbs and all that it loads, under the paths where it looks for that. libibverbs is made for libraries that are loaded.
verbs() {
  local folder=$profile program part
  [ "$profile" != dev ] || folder=debug
  "$repo/hack/setup.sh" verbs >&2
  (cd "$repo" && cargo build --locked --package dranic --bin dranic-verbs --features verbs --profile "$profile" >&2)
  program=$target_dir/$folder/dranic-verbs
  cp "$program" "$work/root/usr/bin/dranic-verbs"
  local providers=()
  for part in /etc/libibverbs.d/*.driver /usr/lib/*/libibverbs/*.so; do
    [ -e "$part" ] || continue
    cp -L --parents "$part" "$work/root"
    [[ $part != *.so ]] || providers+=("$part")
  done
  [ ${#providers[@]} -gt 0 ] || { say "no RDMA provider is installed here: apt-get install ibverbs-providers"; exit 1; }
  # Each library with its path, and the loader without a name before it.
  ldd "$program" "${providers[@]}" | sed -nE 's#^.*[[:space:]](/[^ ]+) \(0x[0-9a-f]+\)$#\1#p' | sort -u |
    while read -r part; do cp -L --parents "$part" "$work/root"; done
}
[ -z "${VERBS:-}" ] || verbs
# Debug information is of no use in the image; release builds have none.
if command -v strip >/dev/null; then strip --strip-debug "$work"/root/usr/bin/*; fi
find "$work/root" -exec chmod 0755 {} +
# A program that asks for a loader would not start in an empty image.
for program in "$work"/root/usr/bin/dranic{,-guard}; do
  if grep -aq -m 1 -e '/ld-linux' "$program" && command -v readelf >/dev/null && readelf -lW "$program" | grep -q INTERP; then
    say "$(dirname "$binary")/${program##*/} is not static"; exit 1
  fi
done

pack() { tar -C "$1" --format=ustar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$epoch" -cf "$2" "${@:3}"; }
digest_of() { echo "sha256:$(sha256sum "$1" | cut -d ' ' -f 1)"; }
put() { # put FILE: into the blobs; prints "DIGEST SIZE"
  local digest
  digest=$(digest_of "$1")
  echo "$digest $(stat -c %s "$1")"
  mv "$1" "$work/oci/blobs/sha256/${digest#sha256:}"
}

mapfile -t folders < <(cd "$work/root" && echo * | tr ' ' '\n' | LC_ALL=C sort)
pack "$work/root" "$work/layer" "${folders[@]}"
diff_id=$(digest_of "$work/layer")
gzip --no-name -6 "$work/layer"
read -r layer layer_size < <(put "$work/layer.gz")
created=$(date --utc --date="@$epoch" +%Y-%m-%dT%H:%M:%SZ)
media=application/vnd.oci.image
cat >"$work/config" <<JSON
{"architecture":"$arch","os":"linux","created":"$created",
"config":{"Entrypoint":["/usr/bin/dranic"],"Cmd":["agent"],"Env":["PATH=/usr/bin"],"WorkingDir":"/",
"Labels":{"org.opencontainers.image.title":"dranic","org.opencontainers.image.version":"$version","org.opencontainers.image.licenses":"Apache-2.0"}},
"rootfs":{"type":"layers","diff_ids":["$diff_id"]}}
JSON
read -r config config_size < <(put "$work/config")
cat >"$work/manifest" <<JSON
{"schemaVersion":2,"mediaType":"$media.manifest.v1+json",
"config":{"mediaType":"$media.config.v1+json","digest":"$config","size":$config_size},
"layers":[{"mediaType":"$media.layer.v1.tar+gzip","digest":"$layer","size":$layer_size}]}
JSON
read -r manifest manifest_size < <(put "$work/manifest")
entries=
for name in "${names[@]}"; do
  entries+="${entries:+,}{\"mediaType\":\"$media.manifest.v1+json\",\"digest\":\"$manifest\",\"size\":$manifest_size,"
  entries+="\"platform\":{\"architecture\":\"$arch\",\"os\":\"linux\"},"
  entries+="\"annotations\":{\"io.containerd.image.name\":\"$name\",\"org.opencontainers.image.ref.name\":\"${name##*:}\"}}"
done
echo "{\"schemaVersion\":2,\"mediaType\":\"$media.index.v1+json\",\"manifests\":[$entries]}" >"$work/oci/index.json"
echo '{"imageLayoutVersion":"1.0.0"}' >"$work/oci/oci-layout"
mkdir -p "$(dirname "$out")"
pack "$work/oci" "$work/tar" oci-layout index.json blobs
mv "$work/tar" "$out"

say "program $(stat -c %s "$work/root/usr/bin/dranic") bytes, guard $(stat -c %s "$work/root/usr/bin/dranic-guard"), image $(stat -c %s "$out") bytes, $manifest"
echo "$out"
