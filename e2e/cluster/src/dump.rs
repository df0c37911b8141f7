//! The state of everything, for whoever looks into a failure.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

use crate::cluster::Cluster;

/// Of each log, bytes.
const LOG_TAIL: usize = 512 * 1024;
/// Of each command; a part that hangs must not hide the others.
const COMMAND_LIMIT: Duration = Duration::from_secs(20);
const LOGS: [&str; 8] =
    ["agent", "nri-tap", "kubelet", "containerd", "kube-apiserver", "kube-scheduler", "kube-controller-manager", "etcd"];

/// Of every network namespace that a process or a file holds; the node's own first.
const LINKS: &str = "seen=; for f in /proc/[0-9]*/ns/net /run/netns/*; do \
    id=$(stat -Lc %i $f 2>/dev/null) || continue; case $seen in *\" $id \"*) continue ;; esac; seen+=\" $id \"; \
    echo; echo == $f $(tr '\\0' ' ' <${f%/ns/net}/cmdline 2>/dev/null); nsenter --net=$f ip -d address; \
    nsenter --net=$f ip route show table all; nsenter --net=$f ip rule; nsenter --net=$f ip neigh; done";
const LEDGER: &str =
    "find /var/lib/dranic -ls; find /var/lib/dranic -type f | while read -r f; do echo; echo == $f; cat $f; done";

/// Writes everything into `folder`, and gives an excerpt for the console.
pub(crate) async fn everything(cluster: &Cluster, folder: &Path, namespace: &str, since: Duration) -> String {
    if let Err(error) = std::fs::create_dir_all(folder) {
        return format!("no dump: {}: {error}", folder.display());
    }
    let put = |name: String, text: &str| {
        // What can't be written must not hide what failed.
        if let Err(error) = std::fs::write(folder.join(&name), text) {
            eprintln!("dump: {name}: {error}");
        }
    };
    let api = "kubectl get pods,resourceclaims,resourceclaimtemplates -A -o yaml; kubectl get deviceclasses,resourceslices,nodes -o yaml";
    for (name, line) in [
        ("objects.yaml", api),
        ("events.txt", "kubectl get events -A --sort-by=.lastTimestamp"),
        ("pods.txt", "kubectl get pods -A -o wide; kubectl describe pods -A"),
        (
            "agent-pods.log",
            "kubectl logs -n dranic -l app.kubernetes.io/name=dranic --all-containers --prefix --tail=5000; \
          kubectl logs -n dranic -l app.kubernetes.io/name=dranic --all-containers --prefix --previous --tail=5000 || true",
        ),
    ] {
        put(name.to_owned(), &text(cluster.inside("node1", &["bash", "-c", line])).await);
    }
    for node in &cluster.nodes {
        for daemon in LOGS {
            let log = tail(&cluster.log(node, daemon));
            if !log.is_empty() {
                put(format!("{node}-{daemon}.log"), &log);
            }
        }
        put(format!("{node}-links.txt"), &text(cluster.inside(node, &["bash", "-c", LINKS])).await);
        put(format!("{node}-devices.txt"), &text(cluster.inside(node, &["dranic", "devices"])).await);
        put(format!("{node}-status.json"), &text(cluster.inside(node, &["dranic", "status", "-o", "json"])).await);
        put(format!("{node}-ledger.txt"), &text(cluster.inside(node, &["bash", "-c", LEDGER])).await);
        let containers = "ctr -n k8s.io containers ls; ctr -n k8s.io tasks ls; ls -la /run/netns /var/run/cdi";
        put(format!("{node}-containers.txt"), &text(cluster.inside(node, &["sh", "-c", containers])).await);
    }
    if let Ok(pid) = std::fs::read_to_string(cluster.scratch().join("fabric/outer.pid")) {
        let mut command = Command::new("nsenter");
        command.args(["-t", pid.trim(), "-n", "ip", "-d", "address"]);
        put("fabric-links.txt".to_owned(), &text(command).await);
    }
    let complaints = format!(
        "since=$(date -u -d '-{seconds} seconds' +%FT%T); for log in {scratch}/node*/log/agent.log; do [ ! -e $log ] || \
         awk -v since=$since '$1 >= since' $log; done | grep -E ' WARN | ERROR ' | tail -n 5; \
         kubectl logs -n dranic -l app.kubernetes.io/name=dranic --prefix --since={seconds}s 2>&1 | grep -E ' WARN | ERROR ' | tail -n 5; true",
        seconds = since.as_secs() + 1,
        scratch = cluster.scratch().display()
    );
    let excerpt = text(cluster.inside("node1", &["bash", "-c", &complaints])).await;
    let get = format!(
        "kubectl get pods -n {namespace} -o wide; kubectl get events -n {namespace} --sort-by=.lastTimestamp | tail -n 15"
    );
    excerpt + &text(cluster.inside("node1", &["bash", "-c", &get])).await
}

/// What `command` writes, also when it fails: half of something is better than nothing here.
async fn text(mut command: Command) -> String {
    let done = command.stdin(Stdio::null()).kill_on_drop(true).output();
    match tokio::time::timeout(COMMAND_LIMIT, done).await {
        Ok(Ok(done)) => {
            let said = [done.stdout, done.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
            if done.status.success() { said } else { format!("{said}{:?}: {}\n", command.as_std(), done.status) }
        }
        Ok(Err(error)) => format!("{:?}: {error}\n", command.as_std()),
        Err(_) => format!("{:?}: takes longer than {} s\n", command.as_std(), COMMAND_LIMIT.as_secs()),
    }
}

fn tail(file: &Path) -> String {
    let bytes = std::fs::read(file).unwrap_or_default();
    String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(LOG_TAIL)..]).into_owned()
}
