//! Dranic: a Kubernetes DRA network driver with a built-in NRI leg.
//!
//! The rooms, and who may call whom: [`dra`] and [`nri`] are the two legs and call [`attach`]; `attach` calls [`netdev`] and
//! [`ledger`]; [`inventory`] reads `netdev`; [`gate`] is the small program that holds containers back. Nothing in [`netlink`], [`netns`] or `netdev` knows Kubernetes, nothing in `nri`
//! knows netlink. `docs/architecture.md` has the data flow and the promises.

pub mod agent;
pub mod attach;
pub mod cli;
pub mod config;
mod crash;
pub mod dhcp;
pub mod doctor;
mod doubles;
pub mod dra;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod gate;
pub mod inventory;
pub mod ledger;
pub mod manifests;
pub mod manual;
pub mod names;
pub mod netdev;
pub mod netlink;
pub mod netns;
pub mod nri;
pub mod rdma;
pub mod telemetry;
