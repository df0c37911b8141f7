#!/usr/bin/env bash
# e2e/cluster/install.sh: the agent on all nodes as a user installs it: the image built on the spot and imported, the chart by helm,
# a DaemonSet with its own service account and rights. PROFILE=release builds the image from a release build (dev), which lacks
# what the scenarios reboot and match-attribute need (src/doubles.rs). Nodes without the
# label e2e-agent=yes get no agent: tests take it away that way. More words are handed to helm, such as `--set agent.logLevel=debug`.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
running node1 || die "no cluster is up in $S: make cluster brings one up"
repo=$(cd "$here/../.." && pwd)
S=$(cd "$S" && pwd -P)
tag=e2e
image=localhost/dranic:$tag
tar=$(PROFILE=${PROFILE:-dev} "$repo/hack/image.sh" "$S/dranic-image.tar" "$image")
mkdir -p "$S/bin"
# For `dranic status` in the shell.
[ ! -x "$("$repo/hack/target.sh")/debug/dranic" ] || install "$("$repo/hack/target.sh")/debug/dranic" "$S/bin/dranic"
for n in $(cd "$S" && echo node[0-9]*); do
  node "$n" ctr -n k8s.io image import "$tar" >/dev/null
  node node1 kubectl label node "$n" --overwrite e2e-agent=yes >/dev/null
done
node node1 helm upgrade --install dranic "$repo/charts/dranic" --namespace dranic --create-namespace --wait --timeout 90s \
  --set "image.tag=$tag,image.pullPolicy=Never,driverName=dra.net" --set-string nodeSelector.e2e-agent=yes \
  --set-json 'agent.extraEnv=[{"name":"DRANIC_TEST_BOOT_ID","value":"/run/dranic/boot-id"},{"name":"DRANIC_TEST_SYSFS","value":"/run/dranic/sys"}]' \
  --set-string "podAnnotations.e2e-image=$(sha256sum "$tar" | cut -c 1-16)" "$@" >/dev/null   # same tag, other image: pods are made anew
echo "the agent is installed by helm $(node node1 helm version --template '{{ .Version }}')"
