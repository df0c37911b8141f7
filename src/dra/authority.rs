//! The filter in front of the registration socket.
//!
//! The kubelet sends `:authority: %2Fvar%2Flib%2F…` there, which the `http` crate refuses; it is replaced by `localhost`.
