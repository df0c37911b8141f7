//! Two logical connections over one socket (`docs/architecture.md`; NRI package `net/multiplex`).
