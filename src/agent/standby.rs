//! Two agents of one node, as in a rolling update: the second one waits until the first one ends, and then takes over.

use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::board::{Board, Role};
use super::{AgentConfig, Signals};
use crate::ledger::{Ledger, Quarantined};

/// How often a place that the other agent has is tried while that one works.
const SLOW: Duration = Duration::from_secs(1);
/// How often when it has let its ledger go: its places follow within milliseconds.
const FAST: Duration = Duration::from_millis(10);
/// After so long the place counts as taken by somebody else.
const GIVEN_UP: Duration = Duration::from_secs(5);

/// Waits for the ledger; none when we were told to stop meanwhile.
pub(super) async fn wait(
    config: &AgentConfig,
    board: &Board,
    signals: &mut Signals,
) -> anyhow::Result<Option<(Ledger, Vec<Quarantined>)>> {
    // Before the log says so: whoever reads it may end the other agent at once.
    let announced = Ledger::announce(&config.state_dir);
    tracing::info!(
        state_dir = %config.state_dir.display(),
        "another agent has the state directory (--state-dir): on standby, to take over when it ends"
    );
    let begin = Instant::now();
    let (sender, opened) = oneshot::channel();
    let folder = config.state_dir.clone();
    // A thread of its own: the end of the process does not wait for it.
    std::thread::Builder::new()
        .name("dranic-standby".to_owned())
        // Nobody receives it when the agent is told to stop.
        .spawn(move || {
            drop(sender.send(Ledger::open_when_free(&folder)));
            drop(announced);
        })
        .context("can't start the thread that waits for the state directory")?;
    tokio::select! {
        opened = opened => {
            let opened = opened.context("the wait for the state directory ended badly")??;
            board.set_role(Role::Successor);
            tracing::info!(waited = ?begin.elapsed(), "the state directory is free: taking over");
            Ok(Some(opened))
        }
        signal = signals.wait() => {
            tracing::info!(signal, "stopped while on standby");
            Ok(None)
        }
    }
}

/// Binds a place. On standby and just after it, as long as the other agent may have that place; none when `stop` came first.
///
/// # Errors
/// What `bind` says, unless it is that the place is taken (`is_taken`) and may become free.
pub(super) async fn bind<T, E, F: Future<Output = Result<T, E>>>(
    board: &Board,
    stop: &CancellationToken,
    try_bind: impl Fn() -> F,
    is_taken: fn(&E) -> bool,
) -> Result<Option<T>, E> {
    let mut role = board.role.subscribe();
    let mut successor_since = None;
    loop {
        let now = *role.borrow_and_update();
        let error = match try_bind().await {
            Ok(bound) => return Ok(Some(bound)),
            Err(error) => error,
        };
        let pause = match now {
            Role::Standby => SLOW,
            Role::Successor if successor_since.get_or_insert_with(Instant::now).elapsed() < GIVEN_UP => FAST,
            Role::Alone | Role::Successor => return Err(error),
        };
        if !is_taken(&error) {
            return Err(error);
        }
        tokio::select! {
            () = stop.cancelled() => return Ok(None),
            () = tokio::time::sleep(pause) => {}
            Ok(()) = role.changed() => {}
        }
    }
}
