#!/usr/bin/env bash
# hack/manifests.sh [DIR]: render the chart with its defaults into plain manifests in DIR (default manifests/), for
# `kubectl apply -f` without Helm. Needs helm (hack/helm.sh). tests/chart.rs holds that manifests/ is what this makes.
set -euo pipefail
repo=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$repo/manifests}
helm=$("$repo/hack/helm.sh")/bin/helm

header="# Made by hack/manifests.sh from charts/dranic: change it there."
settings=()
part() { # part FILE TEMPLATE...: what those templates give with ${settings[@]}, as one file
  local file=$1 template shown=()
  shift
  for template; do shown+=(--show-only "templates/$template.yaml"); done
  {
    echo "$header"
    "$helm" template dranic "$repo/charts/dranic" --namespace kube-system "${settings[@]}" "${shown[@]}" |
      sed -e '/^# Source: /d' -e '/^ *helm.sh\/chart: /d' -e '/app.kubernetes.io\/managed-by: Helm/d' |
      cat -s
  } >"$out/$file.yaml"
}

mkdir -p "$out/optional"
part rbac serviceaccount rbac
part admissionpolicy admissionpolicy
part daemonset daemonset
part deviceclass deviceclasses
# Not of the defaults: `kubectl apply -f manifests/` does not go into folders.
settings=(--set requiredPlugin.policy.create=true)
part optional/required-plugin-policy requiredplugin
settings=(--set configPolicy.create=true)
part optional/config-policy configpolicy
