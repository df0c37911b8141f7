//! From a ttrpc request to the handler and back, inside the deadline.
