//! Doubles of runtime, kubelet and API server, and scratch nodes, shared by the tests, the demo and the benchmark.
//!
//! Real parts stand beside each double (`docs/contributing.md`): a double is for what the real part can't be made to do, and for
//! machines without one.

pub mod apiserver;
pub mod bench;
pub mod cluster;
pub mod containerd;
pub mod fabric;
pub mod kubelet;
pub mod runtime;
