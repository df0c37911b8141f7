//! Points between two steps at which a test can end the process as `kill -9` does, or make it slow. Release builds have none of it.
//!
//! `DRANIC_TEST_KILL_AT=<point>:<n>` ends the process when it comes to `<point>` for the n-th time. `DRANIC_TEST_POINTS=<file>` appends
//! each point that is passed to the file, one a line: that is how `tests/kill.rs` learns which there are. `DRANIC_TEST_DELAY=<point>=<ms>`,
//! several with commas between them, makes every pass of `<point>` take so many milliseconds: steps as slow as real NICs' are.

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
    use std::time::Duration;

    struct Armed {
        kill_at: Option<(String, usize)>,
        points: Option<File>,
        delays: Vec<(String, Duration)>,
        passed: Mutex<HashMap<&'static str, usize>>,
    }

    static ARMED: LazyLock<Option<Armed>> = LazyLock::new(|| {
        let kill_at = std::env::var("DRANIC_TEST_KILL_AT").ok();
        let points = std::env::var_os("DRANIC_TEST_POINTS");
        let delays = std::env::var("DRANIC_TEST_DELAY").map(|text| delays(&text)).unwrap_or_default();
        if kill_at.is_none() && points.is_none() && delays.is_empty() {
            return None;
        }
        let kill_at = kill_at.and_then(|text| {
            let (name, n) = text.rsplit_once(':')?;
            Some((name.to_owned(), n.parse().ok()?))
        });
        let points = points.and_then(|path| File::options().create(true).append(true).open(path).ok());
        Some(Armed { kill_at, points, delays, passed: Mutex::default() })
    });

    fn delays(text: &str) -> Vec<(String, Duration)> {
        let delay = |one: &str| {
            let (name, milliseconds) = one.split_once('=')?;
            Some((name.to_owned(), Duration::from_millis(milliseconds.parse().ok()?)))
        };
        text.split(',').filter_map(delay).collect()
    }

    /// Passes `name`, or ends here.
    pub(crate) fn point(name: &'static str) {
        let Some(armed) = &*ARMED else { return };
        for (_, delay) in armed.delays.iter().filter(|(at, _)| at == name) {
            std::thread::sleep(*delay);
        }
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
