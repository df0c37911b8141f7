//! A real containerd from Debian's packages, driven over CRI.
