//! The table, the JSON, and whether the goals were met.

use anyhow::{Context, Result};
use comfy_table::{Table, presets};
use serde_json::{Value, json};

use super::Samples;
use super::attach::Attach;
use super::foreign::Foreign;
use super::gate::Gate;
use super::idle::Idle;
use super::work::Work;

/// Largest ratio to the floor with links down, at [`RATIO_NICS`] and more NICs.
const RATIO_GOAL: f64 = 1.10;
/// With fewer, what is done once for a pod outweighs the moves; there is no goal.
const RATIO_NICS: usize = 8;
/// Microseconds, median.
const FOREIGN_GOAL_US: f64 = 100.0;
/// MB.
const RSS_GOAL_MB: f64 = 20.0;
/// A second, over all threads. The wish is none beyond the slow rescan; this is what was reached before the health stream came.
const WAKEUPS_GOAL: f64 = 0.5;

/// Everything that was measured.
#[derive(Debug, Default)]
pub struct Report {
    /// Rounds of each.
    pub rounds: usize,
    /// By number of NICs.
    pub attach: Vec<Attach>,
    /// Several sockets against one.
    pub ways: Vec<Ways>,
    /// By hold and number of NICs.
    pub gate: Vec<Gate>,
    /// With routes, rules and neighbours.
    pub work: Work,
    /// A pod that is not ours.
    pub foreign: Foreign,
    /// The agent before its first pod.
    pub idle: Idle,
    /// Memory after all pods.
    pub after: Idle,
    /// Size of the program, bytes.
    pub program: u64,
}

/// The same moves, sent in several ways.
#[derive(Debug, Clone, Default)]
pub struct Ways {
    /// Links moved.
    pub nics: usize,
    /// How, and the times.
    pub ways: Vec<(String, Samples)>,
}

impl Report {
    /// Each goal that was missed, in words.
    #[must_use]
    pub fn missed(&self) -> Vec<String> {
        let mut missed = Vec::new();
        for attach in self.attach.iter().filter(|a| a.nics >= RATIO_NICS && a.ratio_down() > RATIO_GOAL) {
            let (nics, ratio) = (attach.nics, attach.ratio_down());
            missed.push(format!("RunPodSandbox with {nics} NICs takes {ratio:.3} of the floor, goal {RATIO_GOAL:.2}"));
        }
        if self.work.ratio() > RATIO_GOAL {
            missed.push(format!(
                "RunPodSandbox with routes and rules takes {:.3} of the floor, goal {RATIO_GOAL:.2}",
                self.work.ratio()
            ));
        }
        let foreign = self.foreign.busy.median_us();
        if foreign > FOREIGN_GOAL_US {
            missed.push(format!("RunPodSandbox of a pod that is not ours takes {foreign:.0} us, goal {FOREIGN_GOAL_US}"));
        }
        if self.idle.rss_mb > RSS_GOAL_MB {
            missed.push(format!("the idle agent has {:.1} MB, goal {RSS_GOAL_MB}", self.idle.rss_mb));
        }
        if self.idle.wakeups_per_s() > WAKEUPS_GOAL {
            let rate = self.idle.wakeups_per_s();
            missed.push(format!("the idle agent wakes {rate:.2} times a second, goal {WAKEUPS_GOAL}"));
        }
        missed
    }

    /// For machines.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "machine": machine(), "kernel": kernel(), "rounds": self.rounds,
            "attach": self.attach.iter().map(attach_json).collect::<Vec<_>>(),
            "ways": self.ways.iter().map(ways_json).collect::<Vec<_>>(),
            "work": self.work.json(),
            "gate": self.gate.iter().map(gate_json).collect::<Vec<_>>(),
            "foreign_us": round(self.foreign.busy.median_us()),
            "foreign_p90_us": round(self.foreign.busy.percentile_us(0.9)),
            "foreign_paused_us": round(self.foreign.paused.median_us()),
            "foreign_requests": self.foreign.busy.all().len(),
            "rss_mb": round(self.idle.rss_mb), "rss_anon_mb": round(self.idle.rss_anon_mb),
            "rss_after_mb": round(self.after.rss_mb), "rss_peak_mb": round(self.after.rss_peak_mb),
            "threads": self.idle.threads,
            "wakeups_per_s": round(self.idle.wakeups_per_s()), "wakeups": self.idle.wakeups,
            "idle_window_s": round(self.idle.window.as_secs_f64()),
            "idle_cpu_ms": round(self.idle.cpu.as_secs_f64() * 1000.0),
            "program_bytes": self.program,
            "missed": self.missed(),
        })
    }

    /// For people.
    pub fn print(&self) {
        println!("\nmachine: {}; kernel: {}; {} rounds; medians (smallest to largest)\n", machine(), kernel(), self.rounds);
        println!("{}\n", self.attach_table());
        println!("{}\n", self.parts_table());
        println!("{}\n", self.ways_table());
        println!("{}\n", self.gate_table());
        println!("{}", self.work.text());
        let foreign = &self.foreign;
        println!(
            "A pod that is not ours, RunPodSandbox at the socket: {:.0} us (p10 {:.0}, p90 {:.0}; {} requests), with pauses {:.0} us",
            foreign.busy.median_us(),
            foreign.busy.percentile_us(0.1),
            foreign.busy.percentile_us(0.9),
            foreign.busy.all().len(),
            foreign.paused.median_us()
        );
        let (idle, after) = (&self.idle, &self.after);
        println!(
            "Idle agent: {:.1} MB resident ({:.1} of it not the program's file), {} threads; after the pods {:.1} MB ({:.1}), peak {:.1}",
            idle.rss_mb, idle.rss_anon_mb, idle.threads, after.rss_mb, after.rss_anon_mb, after.rss_peak_mb
        );
        let names: Vec<String> = idle.wakeups.iter().map(|(name, count)| format!("{name} {count}")).collect();
        println!(
            "Idle agent over {:.0} s: {:.2} wake-ups a second ({}), {:.1} ms of processor time; the program has {:.1} MB",
            idle.window.as_secs_f64(),
            idle.wakeups_per_s(),
            if names.is_empty() { "none".to_owned() } else { names.join(", ") },
            idle.cpu.as_secs_f64() * 1000.0,
            megabytes(self.program)
        );
        println!();
        let missed = self.missed();
        missed.iter().for_each(|goal| println!("goal missed: {goal}"));
        if missed.is_empty() {
            println!("all goals met");
        }
    }

    fn attach_table(&self) -> Table {
        let mut rows: Vec<Vec<String>> = vec![vec!["ms for all NICs".to_owned()]];
        rows[0].extend(self.attach.iter().map(|a| format!("{} NICs", a.nics)));
        let mut line = |name: &str, of: &dyn Fn(&Attach) -> String| {
            rows.push(std::iter::once(name.to_owned()).chain(self.attach.iter().map(of)).collect());
        };
        line("floor, links down before", &|a| spread(&a.floor_down));
        line("floor, links up before", &|a| spread(&a.floor_up));
        line("RunPodSandbox", &|a| spread(&a.ours));
        line("ratio to floor down", &|a| format!("{:.3}", a.ratio_down()));
        line("  median of the rounds' ratios", &|a| format!("{:.3}", a.round_ratio_down()));
        line("ratio to floor up", &|a| format!("{:.3}", a.ratio_up()));
        line("NodePrepareResources", &|a| spread(&a.prepare));
        line("StopPodSandbox answered", &|a| spread(&a.stop));
        line("all NICs back after Stop", &|a| spread(&a.back));
        line("NodeUnprepareResources", &|a| spread(&a.unprepare));
        table(rows)
    }

    fn parts_table(&self) -> Table {
        let mut rows: Vec<Vec<String>> = vec![vec!["ms by the agent's clock".to_owned()]];
        rows[0].extend(self.attach.iter().map(|a| format!("{} NICs", a.nics)));
        for part in ["open", "look", "intent", "moves", "configure", "verify", "record", "total"] {
            let of = |a: &Attach| a.parts.get(part).map_or_else(|| "-".to_owned(), |s| format!("{:.2}", s.median_ms()));
            rows.push(std::iter::once(part.to_owned()).chain(self.attach.iter().map(of)).collect());
        }
        table(rows)
    }

    fn ways_table(&self) -> Table {
        let mut rows: Vec<Vec<String>> = vec![vec!["ms, links down before".to_owned()]];
        rows[0].extend(self.ways.iter().map(|w| format!("{} NICs", w.nics)));
        for (position, (name, _)) in self.ways.first().map_or(&[][..], |w| &w.ways).iter().enumerate() {
            let of = |w: &Ways| w.ways.get(position).map_or_else(|| "-".to_owned(), |(_, s)| spread(s));
            rows.push(std::iter::once(name.clone()).chain(self.ways.iter().map(of)).collect());
        }
        table(rows)
    }
}

impl Report {
    fn gate_table(&self) -> Table {
        let head = [
            "NICs",
            "--hold",
            "RunPodSandbox (every pod waits), ms",
            "until its container starts, ms",
            "the guard, all there, ms",
        ];
        let row = |g: &Gate| vec![g.nics.to_string(), g.hold.to_owned(), spread(&g.run), spread(&g.started), spread(&g.guard)];
        table(std::iter::once(head.map(str::to_owned).to_vec()).chain(self.gate.iter().map(row)).collect())
    }
}

fn gate_json(g: &Gate) -> Value {
    json!({"nics": g.nics, "hold": g.hold, "run_ms": round(g.run.median_ms()), "started_ms": round(g.started.median_ms()),
        "guard_ms": round(g.guard.median_ms()), "guard_max_ms": round(g.guard.max_ms())})
}

fn attach_json(a: &Attach) -> Value {
    json!({
        "nics": a.nics,
        "p50_ms": round(a.ours.median_ms()), "min_ms": round(a.ours.min_ms()), "max_ms": round(a.ours.max_ms()),
        "floor_down_ms": round(a.floor_down.median_ms()), "floor_up_ms": round(a.floor_up.median_ms()),
        "floor_down_min_ms": round(a.floor_down.min_ms()), "floor_down_max_ms": round(a.floor_down.max_ms()),
        "floor_up_min_ms": round(a.floor_up.min_ms()), "floor_up_max_ms": round(a.floor_up.max_ms()),
        "ratio_down": round(a.ratio_down()), "ratio_up": round(a.ratio_up()),
        "ratio_down_rounds": round(a.round_ratio_down()),
        "prepare_ms": round(a.prepare.median_ms()), "stop_ms": round(a.stop.median_ms()),
        "back_ms": round(a.back.median_ms()), "unprepare_ms": round(a.unprepare.median_ms()),
        "parts_ms": a.parts.iter().map(|(name, s)| (name.clone(), round(s.median_ms()).into())).collect::<serde_json::Map<_, _>>(),
    })
}

fn ways_json(w: &Ways) -> Value {
    let ways: Vec<Value> = w
        .ways
        .iter()
        .map(|(name, s)| json!({"way": name, "p50_ms": round(s.median_ms()), "min_ms": round(s.min_ms()), "max_ms": round(s.max_ms())}))
        .collect();
    json!({"nics": w.nics, "ways": ways})
}

fn table(rows: Vec<Vec<String>>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    let mut rows = rows.into_iter();
    table.set_header(rows.next().unwrap_or_default());
    table.add_rows(rows);
    table
}

fn spread(samples: &Samples) -> String {
    format!("{:.1} ({:.1} to {:.1})", samples.median_ms(), samples.min_ms(), samples.max_ms())
}

/// Three decimals.
fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

#[allow(clippy::cast_precision_loss, reason = "for people")]
fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

fn machine() -> String {
    let model = std::fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("model name"))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    });
    let count = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    format!("{count} x {}", model.unwrap_or_else(|| std::env::consts::ARCH.to_owned()))
}

fn kernel() -> String {
    let version = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!("Linux {}", version.trim())
}

/// Writes the JSON to `path`.
///
/// # Errors
/// When the file can't be written.
pub fn write_json(report: &Report, path: &std::path::Path) -> Result<()> {
    let text = serde_json::to_string_pretty(&report.json())? + "\n";
    std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}
