//! `dranic-guard`: the OCI hook that holds a container back until its NICs are there. See [`dranic::gate`].

use std::process::ExitCode;

fn main() -> ExitCode {
    dranic::gate::main()
}
