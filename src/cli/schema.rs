//! `dranic schema`.

use clap::Args;

use super::Failure;
use super::output::emit;
use crate::config::schema;
use crate::manifests::policy;

/// End of `dranic schema --help`.
pub(super) const AFTER_HELP: &str = "\
Examples:
  dranic schema > network-config.schema.json        for editors and for checks of your own
  dranic schema --policy                            the same in CEL, for a ValidatingAdmissionPolicy

Both say what one field may be. What concerns several fields, dranic validate checks.";

/// Flags of `dranic schema`.
#[derive(Debug, Args)]
pub(super) struct SchemaArgs {
    /// Variables and validations of a ValidatingAdmissionPolicy instead, as YAML. (manifests/optional/config-policy.yaml is the whole
    /// policy.)
    #[arg(long)]
    policy: bool,
}

pub(super) fn run(args: &SchemaArgs) -> Result<(), Failure> {
    if args.policy { emit(&policy::policy(&schema::schema()).yaml()) } else { emit(&schema::text()) }
}
