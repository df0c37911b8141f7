//! The inventory as it is now, kept up to date by a monitor and a slow full rescan.
