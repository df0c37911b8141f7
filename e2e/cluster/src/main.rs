//! Scenarios on a real cluster that `up.sh` beside this package brought up: kubelet, API server, scheduler, runtime and the agent.
//!
//! Must run in the network namespace of node1 (`hack` and `make e2e` see to it), since the API server listens there.

mod cluster;
mod context;
mod dump;
mod gpu;
mod held;
mod inspect;
mod objects;
mod own_agent;
mod runner;
mod scenarios;
mod server;
mod table;
mod tap;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

/// Runs scenarios on a real cluster, one after the other.
#[derive(Debug, Clone, Parser)]
struct Args {
    /// Lists the scenarios and what is pending, and ends.
    #[arg(long)]
    list: bool,

    /// Only scenarios whose name contains one of these.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,

    /// Not these.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    skip: Vec<String>,

    /// Only the few that show in less than two minutes whether a cluster works: for each containerd and each Kubernetes.
    #[arg(long)]
    smoke: bool,

    /// The pending ones too: they fail until their feature is there.
    #[arg(long)]
    pending: bool,

    /// Where the results go as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Scratch folder of the cluster.
    #[arg(long, env = "DRANIC_CLUSTER", default_value = "/tmp/dranic-cluster", value_name = "DIR")]
    cluster: PathBuf,

    /// Folder of the scripts (e2e/cluster).
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR")), value_name = "DIR")]
    scripts: PathBuf,

    /// Where the state of everything goes when a scenario fails.
    #[arg(long, default_value = "target/e2e", value_name = "DIR")]
    dump: PathBuf,

    /// Full numbers of rounds, as in the issue (the default is smaller, for each push).
    #[arg(long)]
    full: bool,

    /// Seed of what is random; printed, so that a run can be repeated.
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,

    /// Leaves a failed scenario's objects where they are.
    #[arg(long)]
    keep: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    if args.list {
        scenarios::list();
        return ExitCode::SUCCESS;
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("dranic-e2e: {error}");
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(runner::run(&args)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("dranic-e2e: {error:#}");
            ExitCode::FAILURE
        }
    }
}
