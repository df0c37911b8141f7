//! The command line: parsing, dispatch, exit codes.

mod agent;
mod attach;
mod devices;
mod doctor;
mod output;
mod schema;
mod status;
mod validate;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

pub use agent::AgentArgs;
pub use output::Output;

/// A value on the command line or in the environment can't be used: `EX_USAGE` of `sysexits.h`.
pub const EXIT_USAGE: u8 = 64;
/// Something failed while running.
pub const EXIT_FAILURE: u8 = 1;
/// A file that was named can't be read: `EX_NOINPUT` of `sysexits.h`.
pub const EXIT_NO_INPUT: u8 = 66;
/// The agent that was asked is not there: `EX_UNAVAILABLE` of `sysexits.h`.
pub const EXIT_UNAVAILABLE: u8 = 69;

const AFTER_HELP: &str = "\
Examples:
  dranic devices                      what this node would publish, without a cluster
  dranic agent --node-name node-1     run the agent (normally the DaemonSet does)
  dranic status -o json               what the running agent has prepared and attached
  dranic doctor                       what is wrong with this node's runtime and folders
  dranic attach --device eth3 --netns /run/netns/blue --dry-run    what attaching would do, and what undoes it
  dranic validate -f manifests/       what is wrong with the configuration in DeviceClasses and claims

Exit codes: 0 done, 1 failed, 64 a flag or variable has a bad value, 66 a file can't be read, 69 no agent answers.";

/// A Kubernetes DRA network driver with a built-in NRI leg.
#[derive(Debug, Parser)]
#[command(name = "dranic", version, about, after_help = AFTER_HELP, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the node agent.
    #[command(after_help = agent::AFTER_HELP)]
    Agent(Box<AgentArgs>),
    /// List the devices this node would publish, and the links it keeps back; needs no cluster.
    #[command(after_help = devices::AFTER_HELP)]
    Devices(devices::DevicesArgs),
    /// Ask the running agent for claims, attachments, phases and step times.
    #[command(after_help = status::AFTER_HELP)]
    Status(status::StatusArgs),
    /// Check the node: the container runtime's configuration, sockets, folders, the running agent.
    #[command(after_help = doctor::AFTER_HELP)]
    Doctor(Box<doctor::DoctorArgs>),
    /// Check the configuration in DeviceClasses, ResourceClaims and ResourceClaimTemplates; needs no cluster.
    #[command(after_help = validate::AFTER_HELP)]
    Validate(validate::ValidateArgs),
    /// Put a device into a network namespace by hand, as the agent does for a pod; needs no cluster.
    #[command(after_help = attach::ATTACH_HELP)]
    Attach(Box<attach::AttachArgs>),
    /// Give back what `dranic attach` attached.
    #[command(after_help = attach::RELEASE_HELP)]
    Release(attach::ReleaseArgs),
    /// Print the JSON schema of the parameters of DeviceClasses and claims.
    #[command(after_help = schema::AFTER_HELP)]
    Schema(schema::SchemaArgs),
    /// Print a shell completion script.
    Completion {
        /// Which shell.
        shell: clap_complete::Shell,
    },
}

/// Why a command failed, with the exit code.
#[derive(Debug)]
pub struct Failure {
    /// Exit code.
    pub code: u8,
    /// One line for people.
    pub message: String,
}

impl Failure {
    /// A failure while running.
    #[must_use]
    pub fn failed(error: &anyhow::Error) -> Self {
        // Some errors say their cause themselves.
        let mut message = String::new();
        for cause in error.chain().map(ToString::to_string).filter(|text| !text.is_empty()) {
            if !message.contains(&cause) {
                message.push_str(if message.is_empty() { "" } else { ": " });
                message.push_str(&cause);
            }
        }
        Self { code: EXIT_FAILURE, message }
    }

    /// A flag or variable with a bad value.
    #[must_use]
    pub fn usage(flag: &str, why: impl std::fmt::Display) -> Self {
        Self { code: EXIT_USAGE, message: format!("{flag}: {why}\nFor more information, try 'dranic agent --help'.") }
    }
}

/// Runs the program with the process's arguments.
#[must_use]
pub fn run() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let code = if error.use_stderr() { EXIT_USAGE } else { 0 };
            // Printing fails only when the output is closed; there is nobody left to tell then.
            let _ = error.print();
            return ExitCode::from(code);
        }
    };
    let result = match cli.command {
        Command::Agent(args) => agent::run(*args),
        Command::Devices(args) => devices::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Validate(args) => validate::run(&args),
        Command::Attach(args) => attach::attach(&args),
        Command::Release(args) => attach::release(&args),
        Command::Schema(args) => schema::run(&args),
        Command::Completion { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "dranic", &mut script);
            output::emit(&String::from_utf8_lossy(&script))
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("dranic: {}", failure.message);
            ExitCode::from(failure.code)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
