//! What an agent costs that has nothing to do, from `/proc`.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// Memory and wake-ups of a process.
#[derive(Debug, Clone, Default)]
pub struct Idle {
    /// `VmRSS`, MB (10^6 bytes).
    pub rss_mb: f64,
    /// `RssAnon`: what is not the program file's pages, MB.
    pub rss_anon_mb: f64,
    /// `VmHWM`: the most it ever had, MB.
    pub rss_peak_mb: f64,
    /// Threads at the end.
    pub threads: usize,
    /// How long was looked.
    pub window: Duration,
    /// Voluntary context switches meanwhile, by thread name; names with none are left out.
    pub wakeups: BTreeMap<String, u64>,
    /// Processor time meanwhile.
    pub cpu: Duration,
}

impl Idle {
    /// Wake-ups of all threads for each second.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "small numbers")]
    pub fn wakeups_per_s(&self) -> f64 {
        self.wakeups.values().sum::<u64>() as f64 / self.window.as_secs_f64()
    }
}

/// Looks at process `pid` for `window`.
///
/// # Errors
/// When it ends.
pub async fn measure(pid: u32, window: Duration) -> Result<Idle> {
    let before = threads(pid)?;
    let start = Instant::now();
    tokio::time::sleep(window).await;
    let after = threads(pid)?;
    let mut idle = Idle { window: start.elapsed(), threads: after.len(), ..Idle::default() };
    for (tid, now) in &after {
        let then = before.get(tid).map_or((0, 0), |t| (t.switches, t.cpu_ns));
        let switches = now.switches.saturating_sub(then.0);
        if switches > 0 {
            *idle.wakeups.entry(now.name.clone()).or_default() += switches;
        }
        idle.cpu += Duration::from_nanos(now.cpu_ns.saturating_sub(then.1));
    }
    memory(pid, &mut idle)?;
    Ok(idle)
}

/// Reads memory figures into `idle`.
///
/// # Errors
/// When the process is gone.
pub fn memory(pid: u32, idle: &mut Idle) -> Result<()> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).context("the agent's /proc/PID/status")?;
    idle.rss_mb = kilobytes(&status, "VmRSS:")?;
    idle.rss_anon_mb = kilobytes(&status, "RssAnon:")?;
    idle.rss_peak_mb = kilobytes(&status, "VmHWM:")?;
    Ok(())
}

/// A field of `/proc/PID/status` (KiB) in MB.
fn kilobytes(status: &str, field: &str) -> Result<f64> {
    let text = value(status, field).with_context(|| format!("no {field} in /proc/PID/status"))?;
    Ok(text.trim_end_matches(" kB").parse::<f64>()? * 1024.0 / 1e6)
}

fn value<'a>(status: &'a str, field: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(field)).map(str::trim)
}

struct Thread {
    name: String,
    switches: u64,
    cpu_ns: u64,
}

fn threads(pid: u32) -> Result<BTreeMap<u32, Thread>> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/task")).context("the agent's /proc/PID/task")? {
        let path = entry?.path();
        let Some(tid) = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok()) else { continue };
        // A thread may end between the listing and the look.
        if let Some(thread) = thread(&path) {
            all.insert(tid, thread);
        }
    }
    Ok(all)
}

fn thread(path: &Path) -> Option<Thread> {
    let status = std::fs::read_to_string(path.join("status")).ok()?;
    // Kernels without statistics of the scheduler have no such file.
    let schedstat = std::fs::read_to_string(path.join("schedstat")).unwrap_or_default();
    Some(Thread {
        name: value(&status, "Name:")?.to_owned(),
        switches: value(&status, "voluntary_ctxt_switches:")?.parse().ok()?,
        cpu_ns: schedstat.split_whitespace().next().and_then(|ns| ns.parse().ok()).unwrap_or(0),
    })
}
