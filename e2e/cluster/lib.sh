# e2e/cluster/lib.sh: what the scripts beside it share. Not a program.
# DRANIC_CLUSTER: the scratch folder, with everything of one running cluster; several clusters can run in different folders.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
S=${DRANIC_CLUSTER:-/tmp/dranic-cluster}   # short: sockets below it have at most 107 bytes

die() { echo "${0##*/}: $*" >&2; exit 1; }

running() { [ -s "$S/$1/init.pid" ] && kill -0 "$(cat "$S/$1/init.pid")" 2>/dev/null; }

# The programs of this cluster, chosen when it was brought up.
programs() { cat "$S/path" 2>/dev/null; }

# enter NODE COMMAND...: become that command inside the node, in all its namespaces (the working directory is / then).
enter() {
  local n=$1
  shift
  running "$n" || die "$n is not up"
  exec nsenter -t "$(cat "$S/$n/init.pid")" -m -n -p -u -i -- \
    env PATH="$(programs):$PATH" KUBECONFIG="$S/pki/admin.kubeconfig" NODE="$n" "$@"
}
node() { (enter "$@"); }

# wait_for SECONDS WORDS COMMAND...: until it succeeds.
wait_for() {
  local end=$((SECONDS + $1)) words=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt "$end" ] || { echo "gave up waiting: $words ($*)" >&2; return 1; }
    sleep 0.1
  done
}
