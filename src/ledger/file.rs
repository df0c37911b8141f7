//! The file format: an envelope with version and checksum around the record. Pure.
