//! Points between two steps at which a test can end the process as `kill -9` does. Release builds have none of it.
//!
//! `DRANIC_TEST_KILL_AT=<point>:<n>` ends the process when it comes to `<point>` for the n-th time. `DRANIC_TEST_POINTS=<file>` appends
//! each point that is passed to the file, one a line: that is how `tests/kill.rs` learns which there are.

#[cfg(debug_assertions)]
pub(crate) use armed::point;

/// Nothing.
#[cfg(not(debug_assertions))]
#[inline]
pub(crate) fn point(_: &'static str) {}

#[cfg(debug_assertions)]
mod armed {
    use std::collections::HashMap;
    use std::fs::File;
    use std::io::Write as _;
    use std::sync::{LazyLock, Mutex, PoisonError};

    struct Armed {
        kill_at: Option<(String, usize)>,
        points: Option<File>,
        passed: Mutex<HashMap<&'static str, usize>>,
    }

    static ARMED: LazyLock<Option<Armed>> = LazyLock::new(|| {
        let kill_at = std::env::var("DRANIC_TEST_KILL_AT").ok();
        let points = std::env::var_os("DRANIC_TEST_POINTS");
        if kill_at.is_none() && points.is_none() {
            return None;
        }
        let kill_at = kill_at.and_then(|text| {
            let (name, n) = text.rsplit_once(':')?;
            Some((name.to_owned(), n.parse().ok()?))
        });
        let points = points.and_then(|path| File::options().create(true).append(true).open(path).ok());
        Some(Armed { kill_at, points, passed: Mutex::default() })
    });

    /// Passes `name`, or ends here.
    pub(crate) fn point(name: &'static str) {
        let Some(armed) = &*ARMED else { return };
        let mut passed = armed.passed.lock().unwrap_or_else(PoisonError::into_inner);
        let count = passed.entry(name).or_default();
        *count += 1;
        if let Some(mut points) = armed.points.as_ref() {
            // A test that misses a point sees that by the points that are left out.
            let _ = writeln!(points, "{name}");
        }
        if armed.kill_at.as_ref().is_some_and(|(at, n)| at == name && n == count) {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::this(), nix::sys::signal::Signal::SIGKILL);
            // Not reached: the signal takes the whole process.
            std::process::abort();
        }
    }
}
