#!/usr/bin/env bash
# e2e/cluster/up.sh: bring a cluster of two nodes up and wait until both are Ready. Programs come from build.sh.
#
# world.sh has what a node is; node1 has the control plane. The rails: each node has NICS links nic0, nic1, ... (macvlan on a veth),
# each on a bridge of its own in the fabric, to which both nodes are joined. They have addresses 10.20.RAIL.NODE/24 and an MTU of 9000.
#
# From the environment: DRANIC_CLUSTER (scratch folder), K8S (see build.sh), CONTAINERD=released|policy|debian (released),
# NODES (2), NICS (8), KUBELET_V (2), CONTAINERD_LOG (info), NRI_TIMEOUT (like 2s; the runtime's own default), APISERVER_ARGS.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
. "$here/world.sh"

nodes=${NODES:-2} nics=${NICS:-8} containerd=${CONTAINERD:-released}
case $containerd in released | policy | debian) ;; *) die "CONTAINERD=$containerd: released, policy or debian" ;; esac
[ "$(id -u)" = 0 ] || die "needs root"
! running node1 || die "a cluster is up in $S already: make cluster-down ends it"
"$here/down.sh"
cache=$("$here/build.sh")

since=$(date +%s%N)
say() { printf 'up %7.1f s  %s\n' "$((($(date +%s%N) - since) / 100000000))e-1" "$*"; }

mkdir -p "$S/pki"
S=$(cd "$S" && pwd -P)
echo "$S/bin:$cache/bin-$containerd:$cache/kube-${K8S:-1.37.2}:$cache/bin" >"$S/path"
minor=$(cut -d . -f 2 <<<"${K8S:-1.37.2}")
all=$(seq -f 'node%.0f' "$nodes")

# --- certificates: one CA, short keys -------------------------------------------------------------------------------------------

certificates() {
  cd "$S/pki"
  openssl ecparam -name prime256v1 -genkey -noout -out ca.key
  openssl req -x509 -new -key ca.key -days 30 -subj /CN=ca -out ca.crt
  certificate apiserver /CN=kube-apiserver "IP:$(address node1),IP:$service,IP:127.0.0.1,DNS:kubernetes.default.svc,DNS:kubernetes.default"
  certificate apiserver-kubelet /O=system:masters/CN=apiserver
  certificate admin /O=system:masters/CN=admin
  certificate manager /CN=system:kube-controller-manager
  certificate scheduler /CN=system:kube-scheduler
  for n in $all; do
    certificate "$n" "/O=system:nodes/CN=system:node:$n" "IP:$(address "$n"),DNS:$n"
  done
  openssl genrsa -out accounts.key 2048
  openssl rsa -in accounts.key -pubout -out accounts.pub
  for user in admin manager scheduler $all; do kubeconfig "$user" >"$user.kubeconfig"; done
}

certificate() { # certificate NAME SUBJECT [ALTERNATIVE NAMES]
  openssl ecparam -name prime256v1 -genkey -noout -out "$1.key"
  openssl req -new -key "$1.key" -subj "$2" -out "$1.csr"
  openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -out "$1.crt" \
    -extfile <(echo "extendedKeyUsage=serverAuth,clientAuth"; [ -z "${3-}" ] || echo "subjectAltName=$3")
}

kubeconfig() { # kubeconfig USER; the certificates inside, so that the file alone is enough
  cat <<Y
apiVersion: v1
kind: Config
clusters: [{name: dranic, cluster: {server: "https://$(address node1):443", certificate-authority-data: $(base64 -w 0 ca.crt)}}]
users: [{name: $1, user: {client-certificate-data: $(base64 -w 0 "$1.crt"), client-key-data: $(base64 -w 0 "$1.key")}}]
contexts: [{name: dranic, context: {cluster: dranic, user: $1}}]
current-context: dranic
Y
}

# --- programs -----------------------------------------------------------------------------------------------------------------------

define() { local n=$1 name=$2; shift 2; "$here/daemon.sh" "$n" "$name" define "$@"; }
start() { "$here/daemon.sh" "$1" "$2" start; }

control_plane() {
  local p=$S/pki
  # shellcheck disable=SC2086 # APISERVER_ARGS is a list of words
  define node1 etcd etcd --data-dir "$S/node1/etcd" --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
    --listen-peer-urls http://127.0.0.1:2380 --unsafe-no-fsync
  # shellcheck disable=SC2086
  define node1 kube-apiserver kube-apiserver --etcd-servers=http://127.0.0.1:2379 --bind-address=0.0.0.0 --secure-port=443 \
    --advertise-address="$(address node1)" --tls-cert-file="$p/apiserver.crt" --tls-private-key-file="$p/apiserver.key" \
    --client-ca-file="$p/ca.crt" --anonymous-auth=false --service-account-issuer=https://kubernetes.default.svc \
    --service-account-key-file="$p/accounts.pub" --service-account-signing-key-file="$p/accounts.key" \
    --service-cluster-ip-range=10.96.0.0/16 --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction \
    --allow-privileged=true --kubelet-client-certificate="$p/apiserver-kubelet.crt" --kubelet-client-key="$p/apiserver-kubelet.key" \
    --kubelet-certificate-authority="$p/ca.crt" --kubelet-preferred-address-types=InternalIP ${APISERVER_ARGS-}
  define node1 kube-controller-manager kube-controller-manager --kubeconfig="$p/manager.kubeconfig" --leader-elect=false \
    --use-service-account-credentials --service-account-private-key-file="$p/accounts.key" --root-ca-file="$p/ca.crt" --bind-address=127.0.0.1
  define node1 kube-scheduler kube-scheduler --kubeconfig="$p/scheduler.kubeconfig" --leader-elect=false --bind-address=127.0.0.1
}

workers() { # workers NODE: containerd's and the kubelet's configuration and commands
  local n=$1 root=$S/$1/root
  mkdir -p "$root/etc/cni/net.d" "$root/opt/cni/bin"
  cp "$cache"/cni/* "$root/opt/cni/bin/"
  cat >"$root/etc/cni/net.d/10-pods.conflist" <<J
{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "pods0", "isGateway": true, "ipMasq": false,
  "ipam": {"type": "host-local", "ranges": [[{"subnet": "$(pods_of "$n")"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
J
  containerd_config >"$root/etc/containerd/config.toml"
  kubelet_config "$n" >"$S/$n/kubelet.yaml"
  define "$n" containerd containerd --config /etc/containerd/config.toml
  define "$n" kubelet kubelet --config="$S/$n/kubelet.yaml" --kubeconfig="$S/pki/$n.kubeconfig" --hostname-override="$n" \
    --node-ip="$(address "$n")" --v="${KUBELET_V:-2}"
}

containerd_config() {
  cat <<T
version = 3
[debug]
  level = "${CONTAINERD_LOG:-info}"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "registry.local/pause:1"
[plugins.'io.containerd.cri.v1.runtime']
  enable_cdi = true
  restrict_oom_score_adj = true   # the machine may lack CAP_SYS_RESOURCE; each sandbox would fail
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      BinaryName = "$cache/bin/runc"
      SystemdCgroup = false
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["/opt/cni/bin"]
    conf_dir = "/etc/cni/net.d"
[plugins.'io.containerd.nri.v1.nri']
  disable = false
  socket_path = "/var/run/nri/nri.sock"
${NRI_TIMEOUT:+  plugin_request_timeout = "$NRI_TIMEOUT"}
$([ "$containerd" = debian ] || printf "  [plugins.'io.containerd.nri.v1.nri'.default_validator]\n    enable = true   # pods may say that they require a plugin")
T
}

kubelet_config() {
  cat <<Y
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $S/pki/ca.crt}}
authorization: {mode: Webhook}
tlsCertFile: $S/pki/$1.crt
tlsPrivateKeyFile: $S/pki/$1.key
cgroupDriver: cgroupfs
cgroupRoot: /$(cgroup "$1")
failCgroupV1: false
crashLoopBackOff: {maxContainerRestartPeriod: 2s}   # an agent that tests kill is back soon
$([ "$minor" -ge 35 ] || echo 'featureGates: {KubeletCrashLoopBackOffMax: true}')
failSwapOn: false
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
evictionHard: {memory.available: "0%", nodefs.available: "0%", nodefs.inodesFree: "0%", imagefs.available: "0%", imagefs.inodesFree: "0%"}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
localStorageCapacityIsolation: false
maxPods: 250
syncFrequency: 10s   # a failed prepare is tried again only then (1.37), by default after 60 to 90 s
resolvConf: ""
Y
}
kubectl() { node node1 kubectl "$@"; }
node_ready() { kubectl get node "$1" -o 'jsonpath={.status.conditions[?(@.type=="Ready")].status}' | grep -q True; }

certificates 2>"$S/pki/log" || { cat "$S/pki/log" >&2; exit 1; }
say "certificates"
fabric "$nics"
for n in $all; do world "$n"; done
for n in $all; do links "$n"; done
say "nodes' namespaces, $nics NICs for each"
control_plane
start node1 etcd
start node1 kube-apiserver
for n in $all; do workers "$n"; start "$n" containerd; done
for n in $all; do
  wait_for 30 "containerd on $n" node "$n" ctr version
  node "$n" ctr -n k8s.io image import "$cache/image.tar" >/dev/null
done
say "containerd with its image"
wait_for 60 "the API server" kubectl get --raw /readyz
say "API server ready"
for n in $all; do start "$n" kubelet; done
start node1 kube-controller-manager
start node1 kube-scheduler
for n in $all; do wait_for 60 "$n is Ready" node_ready "$n"; say "$n Ready"; done
wait_for 60 "the default service account" kubectl get serviceaccount default
say "default service account: pods can be created"
