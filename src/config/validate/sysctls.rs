//! Rules over `interface.sysctls`.

use super::Faults;
use crate::config::{InterfaceConfig, sysctls};

/// Most elements of `interface.sysctls`.
const SYSCTLS_MAX: usize = 128;
/// Longest part of a foreign key in a path, characters.
const KEY_SHOWN: usize = 64;

pub(super) fn check(interface: &InterfaceConfig, faults: &mut Faults) {
    let Some(wanted) = &interface.sysctls else { return };
    if !faults.length("interface.sysctls", wanted.len(), SYSCTLS_MAX) {
        return;
    }
    for (key, value) in wanted {
        let shown: String = key.chars().take(KEY_SHOWN).collect();
        faults.check(format!("interface.sysctls.{shown}"), sysctls::refuses(key, value));
    }
    for set in interface.field_sysctls() {
        if let Some(value) = wanted.get(set.key).filter(|value| **value != set.value) {
            let path = format!("interface.sysctls.{}", set.key);
            faults.add(path, format!("is {value}, and {} makes it {}; remove one of them", set.field, set.value));
        }
    }
}
