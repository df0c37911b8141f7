//! One program for all targets: `DRANIC_FUZZ=mux dranic-fuzz [libFuzzer's arguments]`. `hack/fuzz.sh` runs them.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;

static TARGET: LazyLock<fn(&[u8])> = LazyLock::new(|| {
    let wanted = std::env::var("DRANIC_FUZZ").unwrap_or_default();
    match dranic::fuzzing::TARGETS.iter().find(|(name, _)| *name == wanted) {
        Some((_, target)) => *target,
        None => {
            let names: Vec<_> = dranic::fuzzing::TARGETS.iter().map(|(name, _)| *name).collect();
            eprintln!("DRANIC_FUZZ={wanted:?} is none of {}", names.join(", "));
            std::process::exit(64);
        }
    }
});

fuzz_target!(|data: &[u8]| TARGET(data));
