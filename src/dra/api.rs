//! The API server as this driver uses it.
