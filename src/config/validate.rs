//! Rules over values and across fields.

use super::{FieldError, NetworkConfig};

impl NetworkConfig {
    /// Everything that is wrong with this configuration, each fault with its path. Empty: nothing is.
    #[must_use]
    pub fn validate(&self) -> Vec<FieldError> {
        todo!()
    }

    /// The fields that are set and valid, but that this version does not carry out yet, each with its path.
    #[must_use]
    pub fn not_supported_yet(&self) -> Vec<FieldError> {
        todo!()
    }

    /// `over` on top of `self`, field by field: what `over` names wins; a list that `over` names replaces the whole list.
    #[must_use]
    pub fn merged_with(self, over: Self) -> Self {
        let _ = over;
        todo!()
    }
}
