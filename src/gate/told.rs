//! Whether the container's metadata files say what the record says: the agent writes them a moment after it, and a job that reads them
//! first of all should find everything there.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::names::ClaimUid;

/// How long a container is held back for it. Not longer: without an agent nobody writes, and everything else is in place.
const LIMIT: Duration = Duration::from_secs(1);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(10);

/// The folder of all metadata.
#[must_use]
pub fn folder(state_dir: &Path) -> PathBuf {
    state_dir.join("metadata")
}

/// The file with the generation of the record that the claim's metadata is made from. Its name is none that a request can have.
#[must_use]
pub fn file(folder: &Path, claim: &ClaimUid) -> PathBuf {
    folder.join(claim.as_str()).join(".generation")
}

/// Waits until the metadata of these claims is at least of these generations, a moment at most. What has no metadata is not waited for.
pub(super) fn wait(state_dir: &Path, claims: &[(ClaimUid, u64)]) {
    let (end, folder) = (Instant::now() + LIMIT, folder(state_dir));
    while !claims.iter().all(|(claim, generation)| is_told(&file(&folder, claim), *generation)) && Instant::now() < end {
        std::thread::sleep(PAUSE);
    }
}

fn is_told(file: &Path, generation: u64) -> bool {
    match std::fs::read_to_string(file) {
        Ok(text) => text.parse::<u64>().is_ok_and(|told| told >= generation),
        Err(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_older_than_the_record_is_waited_for() {
        let state = tempfile::tempdir().unwrap();
        let claim = ClaimUid::new("u-1").unwrap();
        let file = file(&folder(state.path()), &claim);
        assert!(is_told(&file, 9), "there is none");
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        for (text, is) in [("8", false), ("9", true), ("10", true), ("", false), ("x", false)] {
            std::fs::write(&file, text).unwrap();
            assert_eq!(is_told(&file, 9), is, "{text:?}");
        }
        let begin = Instant::now();
        wait(state.path(), &[(claim.clone(), 9)]);
        assert!(begin.elapsed() >= LIMIT, "a moment, and no longer");
        std::fs::write(&file, "9").unwrap();
        let begin = Instant::now();
        wait(state.path(), &[(claim, 9)]);
        assert!(begin.elapsed() < LIMIT);
    }
}
