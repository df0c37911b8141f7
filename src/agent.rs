//! Starts the legs in order, stops them in order; nothing else.
