//! Keeps this node's ResourceSlices as they should be.
