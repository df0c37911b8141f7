//! A container that is about to start, and its guard.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use dranic_testbed::cluster::{Cluster, Pod};
use dranic_testbed::fabric::NodeCommand;
use dranic_testbed::kubelet::Claim;
use serde_json::{Value, json};

/// The first process of a container, in a network namespace. Killed when dropped.
pub(crate) struct Container(Child);

impl Container {
    pub(crate) fn of(pod: &Pod) -> Self {
        Self(pod.netns.netns().unwrap().run(|| sleeper().spawn()).unwrap().unwrap())
    }

    /// One that shares the node's network.
    pub(crate) fn of_host(cluster: &Cluster) -> Self {
        Self(cluster.node.netns().run(|| sleeper().spawn()).unwrap().unwrap())
    }

    /// The OCI state, as containerd's runtime hands it to hooks.
    pub(crate) fn state(&self, pod: &Pod) -> Value {
        json!({
            "ociVersion": "1.2.0", "id": "container", "status": "creating", "pid": self.0.id(), "bundle": "/nowhere",
            "annotations": {
                "io.kubernetes.cri.sandbox-id": pod.sandbox.id,
                "io.kubernetes.cri.sandbox-uid": pod.uid,
                "io.kubernetes.cri.sandbox-name": pod.name,
                "io.kubernetes.cri.sandbox-namespace": "default",
                "io.kubernetes.cri.container-name": "main",
            }
        })
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn sleeper() -> Command {
    let mut command = Command::new("sleep");
    command.arg("300").stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// The hook of a claim's CDI spec.
pub(crate) struct Hook {
    path: PathBuf,
    pub(crate) args: Vec<String>,
}

impl Hook {
    pub(crate) fn of(cluster: &Cluster, claim: &Claim) -> Self {
        let file = cluster.path("cdi").join(format!("dranic-{}-{}.json", super::node::DRIVER, claim.uid));
        let spec: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
        let hook = &spec["containerEdits"]["hooks"][0];
        assert_eq!(hook["hookName"], "createRuntime", "{spec:#}");
        let args = hook["args"].as_array().unwrap().iter().map(|a| a.as_str().unwrap().to_owned());
        Self { path: hook["path"].as_str().unwrap().into(), args: args.collect() }
    }

    /// Another bound, in seconds.
    pub(crate) fn waiting(mut self, seconds: u32) -> Self {
        self.args.extend(["--wait".to_owned(), seconds.to_string()]);
        self
    }

    /// Times of so many runs that let the container start, one after the other, sorted. `DRANIC_TEST_GUARD` names another build.
    pub(crate) fn measure(&self, cluster: &Cluster, state: &Value, count: usize) -> Vec<Duration> {
        let program = std::env::var_os("DRANIC_TEST_GUARD").map_or_else(|| self.path.clone(), PathBuf::from);
        let run = || {
            let mut command = Command::new(&program);
            command.args(&self.args[1..]).env_clear().stdin(Stdio::piped());
            let begin = Instant::now();
            let mut child = command.spawn().unwrap();
            child.stdin.take().unwrap().write_all(state.to_string().as_bytes()).unwrap();
            assert!(child.wait().unwrap().success());
            begin.elapsed()
        };
        let mut times: Vec<_> = cluster.node.netns().run(|| (0..count).map(|_| run()).collect()).unwrap();
        times.sort();
        times
    }

    /// Runs it on the node, as an OCI runtime does.
    pub(crate) fn run(&self, cluster: &Cluster, state: &Value) -> Guard {
        let mut command = Command::new(&self.path);
        command.args(&self.args[1..]).env_clear();
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let begin = Instant::now();
        let mut child = NodeCommand::spawn(&cluster.node, &mut command).unwrap();
        // It need not read all of what is too long.
        let _ = child.stdin.take().unwrap().write_all(state.to_string().as_bytes());
        Guard { child, begin }
    }
}

/// A guard at work. Killed when dropped.
pub(crate) struct Guard {
    child: Child,
    begin: Instant,
}

impl Guard {
    /// Waits for its end; gives whether the container may start, what it said, and how long it took.
    pub(crate) async fn end(mut self) -> (bool, String, Duration) {
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(self.begin.elapsed() < Duration::from_secs(100), "the guard does not end");
            tokio::time::sleep(Duration::from_millis(2)).await;
        };
        let took = self.begin.elapsed();
        let mut said = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(status.success(), said.is_empty(), "{status}: {said}");
        assert!(said.lines().count() <= 1 && said.chars().count() <= 1025, "more than a line: {said}");
        (status.success(), said, took)
    }

    /// It lets the container start.
    #[track_caller]
    pub(crate) fn passes(self, cluster: &Cluster) -> impl Future<Output = Duration> {
        let place = std::panic::Location::caller();
        async move {
            let (passed, said, took) = self.end().await;
            assert!(passed, "{place}: held back: {said}\n{}", cluster.log());
            took
        }
    }

    /// It holds the container back, and says each of `words`.
    pub(crate) async fn refuses(self, words: &[&str]) -> Duration {
        let (passed, said, took) = self.end().await;
        assert!(!passed, "it was let through");
        println!("the guard says: {said}");
        super::node::assert_says(&said, words);
        took
    }

    pub(crate) fn is_waiting(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
