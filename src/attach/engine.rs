//! Carries plans out and undoes them, and keeps the ledger true.
