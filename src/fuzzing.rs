//! What the fuzzer runs: one function a parser of hostile bytes, which panics when something does not hold. `make fuzz` feeds them
//! (`fuzz/README.md`); the tests here feed them the seeds and mutations of those, so that they stay true with every `make test`.

use crate::config;

/// A target's name, which is that of its seeds' folder, and the function.
pub type Target = (&'static str, fn(&[u8]));

/// All of them.
pub const TARGETS: &[Target] = &[
    ("dhcp", crate::dhcp::fuzzing::dhcp),
    ("doctor", crate::doctor::fuzzing::doctor),
    ("guard", crate::gate::fuzzing::guard),
    ("headers", crate::dra::authority::fuzzing::headers),
    ("mux", crate::nri::mux::fuzzing::mux),
    ("nri", crate::nri::fuzzing::nri),
    ("parameters", parameters),
    ("rdma", crate::rdma::fuzzing::rdma),
    ("record", crate::ledger::fuzzing::record),
    ("ttrpc", crate::nri::fuzzing::ttrpc),
];

/// Bytes that choose what happens.
pub(crate) struct Input<'a>(pub(crate) &'a [u8]);

impl<'a> Input<'a> {
    /// The next byte; none at the end.
    pub(crate) fn byte(&mut self) -> Option<u8> {
        let (&first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first)
    }

    /// The bytes up to `separator`, which is stepped over, or all.
    pub(crate) fn until(&mut self, separator: &[u8]) -> &'a [u8] {
        let at = self.0.windows(separator.len()).position(|window| window == separator);
        let (found, rest) = self.0.split_at(at.unwrap_or(self.0.len()));
        self.0 = rest.get(separator.len()..).unwrap_or_default();
        found
    }

    /// The next `count` bytes, fewer at the end.
    pub(crate) fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }
}

/// Any text as the opaque parameters of a claim.
fn parameters(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match config::parse(text) {
        Ok(parsed) => {
            let _ = parsed.validate();
            let written = serde_json::to_string(&parsed).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(config::parse(&written).as_ref(), Ok(&parsed), "{written}");
        }
        Err(error) => assert!(!error.path.is_empty() && !error.message.is_empty()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// All seeds of a target.
    fn seeds(target: &str) -> Vec<Vec<u8>> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds").join(target);
        let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        entries.map(|entry| std::fs::read(entry.unwrap().path()).unwrap()).collect()
    }

    #[test]
    fn every_target_holds_for_its_seeds_and_what_is_near_them() {
        // A generator of its own (xorshift), so that a failure can be seen again.
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        let mut next = |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state % below.max(1) as u64) as usize
        };
        for (name, target) in TARGETS {
            let seeds = seeds(name);
            assert!(!seeds.is_empty(), "{name}");
            target(&[]);
            for seed in &seeds {
                target(seed);
                for _ in 0..20 {
                    let mut near = seed[..seed.len() - next(seed.len() / 2)].to_vec();
                    for _ in 0..next(4) {
                        let at = next(near.len());
                        if let Some(byte) = near.get_mut(at) {
                            *byte ^= 1 << next(8);
                        }
                    }
                    target(&near);
                }
            }
        }
    }
}
