//! Pods whose containers first write down which of their NICs are there, into a volume that lives as long as its pod: so no start is
//! missed, however short.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::{Value, json};

use crate::context::{Context, Running, wait};
use crate::objects::{CLASS, From, devices, pod};

/// A pod starts within this once nothing is in its way: the kubelet tries again after its `syncFrequency` (10 s here).
pub(super) const LIMIT: Duration = Duration::from_secs(90);

/// What a container must see when it starts.
#[derive(Debug, Clone)]
pub(super) struct Look {
    /// Names of the links, as `grep -E` has it.
    pub(super) links: &'static str,
    /// Begin of their addresses, as well.
    pub(super) address: &'static str,
    pub(super) count: usize,
}

impl Look {
    /// The first `count` NICs of a node, as they are on the host.
    pub(super) fn nics(count: usize) -> Self {
        Self { links: "nic[0-9]+", address: r"10\.20\.", count }
    }

    /// A shell's line: writes how many have their address and how many are up.
    fn line(&self, file: &str) -> String {
        let Self { links, address, .. } = self;
        format!(
            "A=$(ip -o -4 addr); L=$(ip -o link); a=$(echo \"$A\" | grep -cE ' ({links}) .* {address}'); \
             u=$(echo \"$L\" | grep -cE ' ({links})[@:].*,UP[,>]'); echo \"$a with address, $u up\" >>/seen/{file}; "
        )
    }

    /// What it writes when all are there.
    pub(super) fn complete(&self) -> String {
        format!("{0} with address, {0} up", self.count)
    }
}

/// A template for `count` NICs of the rails' class.
pub(super) async fn template(c: &Context, name: &str, count: usize) -> Result<()> {
    let nics = json!({"name": "nics", "exactly": {"deviceClassName": CLASS, "count": count}});
    c.template(name, &devices(vec![nics], vec![])).await.map(drop)
}

/// Such a pod.
#[derive(Debug, Clone)]
pub(super) struct Watched {
    pub(super) name: String,
    node: String,
    look: Look,
    uid: String,
}

impl Watched {
    /// Makes a pod on `node` with claims of these templates.
    pub(super) async fn make(c: &Context, name: &str, node: &str, templates: &[&str], look: Look) -> Result<Self> {
        let sources: Vec<_> = templates.iter().map(|template| From::Template(template)).collect();
        Self::of(c, pod(name, Some(node), &sources), node, look).await
    }

    /// Makes the pod `value`; each of its containers looks.
    pub(super) async fn of(c: &Context, mut value: Value, node: &str, look: Look) -> Result<Self> {
        let containers = value["spec"]["containers"].as_array_mut().context("a pod without containers")?;
        for container in containers {
            let file = container["name"].as_str().context("a container without name")?;
            let first = look.line(file) + "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done";
            container["command"] = json!(["/bin/sh", "-c", first]);
            container["volumeMounts"] = json!([{"name": "seen", "mountPath": "/seen"}]);
        }
        value["spec"]["volumes"] = json!([{"name": "seen", "emptyDir": {}}]);
        let made = c.pod(&value).await?;
        let uid = made.uid().context("a pod without UID")?;
        Ok(Self { name: made.name_any(), node: node.to_owned(), look, uid })
    }

    /// `namespace/name`.
    pub(super) fn full_name(&self, c: &Context) -> String {
        format!("{}/{}", c.namespace, self.name)
    }

    /// What its containers found at their starts, with their names.
    pub(super) fn starts(&self, c: &Context) -> Result<Vec<(String, String)>> {
        let volume = format!("root/var/lib/kubelet/pods/{}/volumes/kubernetes.io~empty-dir/seen", self.uid);
        let folder: PathBuf = c.cluster.scratch().join(&self.node).join(volume);
        let mut found = Vec::new();
        let Ok(files) = std::fs::read_dir(&folder) else { return Ok(found) };
        for file in files {
            let file = file?;
            let text = std::fs::read_to_string(file.path()).with_context(|| format!("{}", file.path().display()))?;
            let name = file.file_name().to_string_lossy().into_owned();
            found.extend(text.lines().map(|line| (name.clone(), line.to_owned())));
        }
        Ok(found)
    }

    /// No container has run without all NICs so far.
    pub(super) fn none_early(&self, c: &Context) -> Result<()> {
        for (container, saw) in self.starts(c)? {
            let (name, wanted) = (&self.name, self.look.complete());
            ensure!(saw == wanted, "container {container} of {name} ran before its NICs were there: {saw}, instead of {wanted}");
        }
        Ok(())
    }

    /// It runs in the end, and each container of it had all NICs whenever it started.
    pub(super) async fn runs(&self, c: &Context) -> Result<Running> {
        // Looked at meanwhile, too: what runs too early shall be told as that.
        let running = wait(LIMIT, &format!("{} runs", self.name), || async {
            if let Err(early) = self.none_early(c) {
                return Ok(Err(early));
            }
            c.running_within(&self.name, Duration::ZERO).await.map(Ok)
        })
        .await??;
        wait(Duration::from_secs(10), "all containers have looked", || async {
            let starts = self.starts(c)?;
            let mut containers = running.pod.spec.iter().flat_map(|spec| &spec.containers);
            ensure!(containers.all(|container| starts.iter().any(|(name, _)| *name == container.name)), "those: {starts:?}");
            Ok(())
        })
        .await?;
        self.none_early(c)?;
        Ok(running)
    }

    /// It goes, and gives everything back.
    pub(super) async fn goes(&self, c: &Context) -> Result<()> {
        c.agent_ready(&self.node).await?;
        c.delete_pod(&self.name).await?;
        crate::runner::idle(&c.cluster, Duration::from_secs(30)).await
    }
}

/// How often containers of the pod were started.
pub(super) fn restarts(pod: &Pod) -> i32 {
    let statuses = pod.status.as_ref().and_then(|status| status.container_statuses.as_ref());
    statuses.into_iter().flatten().map(|status| status.restart_count).sum()
}
