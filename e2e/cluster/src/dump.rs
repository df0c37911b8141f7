//! The state of everything, for whoever looks into a failure.

use std::path::Path;
use std::time::Duration;

use tokio::process::Command;

use crate::cluster::{Cluster, output};

/// Of each log, bytes.
const LOG_TAIL: usize = 512 * 1024;
const DAEMONS: [&str; 7] =
    ["agent", "kubelet", "containerd", "kube-apiserver", "kube-scheduler", "kube-controller-manager", "etcd"];

const LINKS: &str = "ip -d address; ip route show table all; ip rule; \
    for f in /run/netns/*; do [ -e $f ] || continue; echo; echo == $f; nsenter --net=$f ip -d address; \
    nsenter --net=$f ip route show table all; nsenter --net=$f ip rule; done";

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
        for daemon in DAEMONS {
            let log = tail(&cluster.log(node, daemon));
            if !log.is_empty() {
                put(format!("{node}-{daemon}.log"), &log);
            }
        }
        put(format!("{node}-links.txt"), &text(cluster.inside(node, &["bash", "-c", LINKS])).await);
        put(format!("{node}-status.json"), &text(cluster.inside(node, &["dranic", "status", "-o", "json"])).await);
        put(
            format!("{node}-ledger.txt"),
            &text(cluster.inside(node, &["sh", "-c", "head -n -0 /var/lib/dranic/*/* /var/lib/dranic/*"])).await,
        );
        let containers = "ctr -n k8s.io containers ls; ctr -n k8s.io tasks ls; ls -la /run/netns /var/run/cdi";
        put(format!("{node}-containers.txt"), &text(cluster.inside(node, &["sh", "-c", containers])).await);
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

async fn text(mut command: Command) -> String {
    match output(&mut command).await {
        Ok(text) => text,
        Err(error) => format!("{error:#}\n"),
    }
}

fn tail(file: &Path) -> String {
    let bytes = std::fs::read(file).unwrap_or_default();
    String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(LOG_TAIL)..]).into_owned()
}
