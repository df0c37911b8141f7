//! Connect, register, serve, and again when the connection ends.
