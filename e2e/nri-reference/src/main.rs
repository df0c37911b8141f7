//! The same cases against the reference runtime side of NRI, in three versions, and against our double standing for each.
//!
//! `make nri-reference` builds the reference (`build.sh` beside this package) and runs this.

mod cases;
mod lab;
mod reference;
mod room;
mod runner;
mod side;
mod table;
mod tap;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

/// Runs cases against the reference runtime side of NRI and against our double of it.
#[derive(Debug, Clone, Parser)]
struct Args {
    /// Lists the cases and what each shows, and ends.
    #[arg(long)]
    list: bool,

    /// Only cases whose name contains one of these.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,

    /// Only sides whose name contains one of these, such as "double" or "0.12.5".
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    side: Vec<String>,

    /// Folder of the reference's programs, which build.sh prints. Without it, only the double is there.
    #[arg(long, value_name = "DIR")]
    reference: Option<PathBuf>,

    /// Where the results go as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    if args.list {
        cases::all().iter().for_each(|case| println!("{:24} {}", case.name, case.shows));
        return ExitCode::SUCCESS;
    }
    // Mounts of scratch nodes are seen by this process and its children only: whatever happens, none stays.
    if dranic_testbed::fabric::root()
        && let Err(error) = dranic_testbed::fabric::private_mounts()
    {
        eprintln!("dranic-nri-reference: {error:#}");
        return ExitCode::FAILURE;
    }
    let result = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(anyhow::Error::from)
        .and_then(|runtime| runtime.block_on(runner::run(&args)));
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("dranic-nri-reference: {error:#}");
            ExitCode::FAILURE
        }
    }
}
