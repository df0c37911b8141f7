//! A double of the container runtime's side of NRI.
