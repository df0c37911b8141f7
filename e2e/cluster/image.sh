#!/usr/bin/env bash
# e2e/cluster/image.sh OUT.tar BUSYBOX NAME...: an image with nothing but a static busybox and its applets, under each NAME, as an
# OCI-layout tar for `ctr image import`. No registry and no builder takes part.
set -euo pipefail
out=$1 busybox=$2
shift 2

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/root/{bin,tmp,etc,proc,sys,dev} "$work/oci/blobs/sha256"
cp "$busybox" "$work/root/bin/busybox"
for applet in $("$busybox" --list); do
  [ "$applet" = busybox ] || ln -s busybox "$work/root/bin/$applet"
done

put() { # put FILE: into the blobs; prints "DIGEST SIZE"
  local digest size
  digest=$(sha256sum "$1" | cut -d ' ' -f 1)
  size=$(stat -c %s "$1")
  mv "$1" "$work/oci/blobs/sha256/$digest"
  echo "sha256:$digest $size"
}

case $(uname -m) in
  x86_64) arch=amd64 ;;
  aarch64) arch=arm64 ;;
  *) arch=$(uname -m) ;;
esac
oci=application/vnd.oci.image
tar -C "$work/root" --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 -cf "$work/layer" .
read -r layer layer_size <<<"$(put "$work/layer")"
cat >"$work/config" <<J
{"architecture": "$arch", "os": "linux", "rootfs": {"type": "layers", "diff_ids": ["$layer"]},
 "config": {"Cmd": ["/bin/sleep", "2147483647"], "Env": ["PATH=/bin"]}}
J
read -r config config_size <<<"$(put "$work/config")"
cat >"$work/manifest" <<J
{"schemaVersion": 2, "mediaType": "$oci.manifest.v1+json",
 "config": {"mediaType": "$oci.config.v1+json", "digest": "$config", "size": $config_size},
 "layers": [{"mediaType": "$oci.layer.v1.tar", "digest": "$layer", "size": $layer_size}]}
J
read -r manifest manifest_size <<<"$(put "$work/manifest")"
entries=
for name; do
  entries+="${entries:+, }{\"mediaType\": \"$oci.manifest.v1+json\", \"digest\": \"$manifest\", \"size\": $manifest_size, \"annotations\": {\"io.containerd.image.name\": \"$name\"}}"
done
echo "{\"schemaVersion\": 2, \"manifests\": [$entries]}" >"$work/oci/index.json"
echo '{"imageLayoutVersion": "1.0.0"}' >"$work/oci/oci-layout"
tar -C "$work/oci" -cf "$out" .
