//! The cases: what each is called, what it shows, and where it runs.

mod agent;
mod chain;
mod connection;
mod deadline;
mod frames;
mod handshake;
mod hooks;
mod matrix;

use anyhow::Result;
use futures_util::future::BoxFuture;

use crate::lab::Lab;
use crate::side::Side;

/// What a case does; gives a figure or remark for its line, or an empty text.
pub(crate) type Body = Box<dyn for<'a> Fn(&'a mut Lab) -> BoxFuture<'a, Result<String>> + Send + Sync>;

/// What a case costs, and with that when it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Cost {
    /// Little: beside cases of other sides.
    Little,
    /// The whole machine: alone.
    Heavy,
    /// Much time, of which it sleeps most: on all sides at once.
    Long,
    /// A node with an agent: beside its like of other sides.
    Node,
}

/// A case.
pub(crate) struct Case {
    pub(crate) name: String,
    /// What it shows, in a few words.
    pub(crate) shows: String,
    pub(crate) cost: Cost,
    /// On which sides there is something to show.
    pub(crate) on: fn(&Side) -> bool,
    pub(crate) body: Body,
}

impl Case {
    fn new<F>(name: &str, shows: &str, body: F) -> Self
    where
        F: for<'a> Fn(&'a mut Lab) -> BoxFuture<'a, Result<String>> + Send + Sync + 'static,
    {
        let (name, shows) = (name.to_owned(), shows.to_owned());
        Self { name, shows, cost: Cost::Little, on: |_| true, body: Box::new(body) }
    }

    fn cost(self, cost: Cost) -> Self {
        Self { cost, ..self }
    }

    fn only(self, on: fn(&Side) -> bool) -> Self {
        Self { on, ..self }
    }
}

/// All cases, in the order in which they run.
pub(crate) fn all() -> Vec<Case> {
    let rooms = [
        matrix::cases(),
        handshake::cases(),
        hooks::cases(),
        frames::cases(),
        connection::cases(),
        chain::cases(),
        deadline::cases(),
        agent::cases(),
    ];
    rooms.into_iter().flatten().collect()
}
