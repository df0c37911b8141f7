//! Names and ids as types, so that two kinds can never be mixed up.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Longest link name the kernel takes, in bytes: `IFNAMSIZ` (16) less the final NUL, `linux/if.h`.
pub const LINK_NAME_MAX: usize = 15;
/// Longest DNS label, in bytes: RFC 1123 and `ResourceSlice.spec.devices[].name`.
pub const DNS_LABEL_MAX: usize = 63;
/// Longest id we take from a runtime or the API server, in bytes. UIDs have 36, sandbox ids 64; the rest is head room.
pub const ID_MAX: usize = 128;

/// Why a string is not a name of the wanted kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind} {value:?}: {reason}")]
pub struct NameError {
    /// What kind of name was wanted.
    pub kind: &'static str,
    /// The refused string, shortened to 64 characters.
    pub value: String,
    /// What is wrong with it and what is allowed.
    pub reason: &'static str,
}

fn refuse(kind: &'static str, value: &str, reason: &'static str) -> NameError {
    NameError { kind, value: value.chars().take(64).collect(), reason }
}

macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $check:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// Checks `value` and takes it.
            ///
            /// # Errors
            /// When `value` breaks the rules of this kind of name; the error says which.
            pub fn new(value: impl Into<String>) -> Result<Self, NameError> {
                let value = value.into();
                match $check(&value) {
                    Ok(()) => Ok(Self(value)),
                    Err(reason) => Err(refuse($kind, &value, reason)),
                }
            }

            /// The name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        // For look-ups by text without an allocation; `Hash`, `Eq` and `Ord` above are those of the text.
        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = NameError;
            fn try_from(value: String) -> Result<Self, NameError> {
                Self::new(value)
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0
            }
        }
    };
}

fn dns_label(s: &str) -> Result<(), &'static str> {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    if s.is_empty() || s.len() > DNS_LABEL_MAX {
        return Err("must have 1 to 63 characters");
    }
    if !s.bytes().all(inner) || s.starts_with('-') || s.ends_with('-') {
        return Err("must consist of a-z, 0-9 and '-', and begin and end with a letter or digit");
    }
    Ok(())
}

fn link_name(s: &str) -> Result<(), &'static str> {
    if s.is_empty() || s.len() > LINK_NAME_MAX {
        return Err("must have 1 to 15 bytes");
    }
    if s == "." || s == ".." || s.contains(['/', ':']) || s.chars().any(|c| c.is_whitespace() || c == '\0') {
        return Err("must not be \".\" or \"..\" and must not contain '/', ':' or white space");
    }
    Ok(())
}

fn kernel_name(s: &str) -> Result<(), &'static str> {
    if s.is_empty() || s.len() > 64 || s.contains(['/', '\0']) { Err("must have 1 to 64 bytes and no '/'") } else { Ok(()) }
}

fn id(s: &str) -> Result<(), &'static str> {
    if s.is_empty() || s.len() > ID_MAX {
        return Err("must have 1 to 128 characters");
    }
    if !s.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_' || b == b'.') || s.starts_with('.') {
        return Err("must consist of letters, digits, '-', '_' and '.', and not begin with '.'");
    }
    Ok(())
}

name_type!(
    /// The name of a device in a ResourceSlice: a DNS label made from a stable hardware id.
    DeviceName, "device name", dns_label
);
name_type!(
    /// The name a link has on the host.
    HostLinkName, "host link name", kernel_name
);
name_type!(
    /// The name a link has, or shall have, in a pod.
    PodLinkName, "pod link name", link_name
);
name_type!(
    /// The name of an RDMA device (`mlx5_0`).
    RdmaDeviceName, "RDMA device name", kernel_name
);
name_type!(
    /// The UID of a ResourceClaim. Safe as a file name.
    ClaimUid, "claim UID", id
);
name_type!(
    /// The UID of a Pod. Safe as a file name.
    PodUid, "pod UID", id
);
name_type!(
    /// The scheduler's id of a share of a device: a UID.
    ShareId, "share id", id
);
name_type!(
    /// The runtime's id of a pod sandbox.
    SandboxId, "sandbox id", id
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_refuses_what_it_must() {
        assert!(DeviceName::new("pci-0000-8a-00-0").is_ok());
        for bad in ["", "-a", "a-", "A", "a_b", &"a".repeat(64)] {
            assert!(DeviceName::new(bad).is_err(), "{bad:?}");
        }
        assert!(PodLinkName::new("rail0").is_ok());
        for bad in ["", ".", "..", "a b", "a/b", "a:b", "sixteen-bytes-xx"] {
            assert!(PodLinkName::new(bad).is_err(), "{bad:?}");
        }
        for bad in ["", "../x", ".hidden", "a/b", "a\0b", &"a".repeat(129)] {
            assert!(ClaimUid::new(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn an_error_shortens_a_huge_value() {
        let err = PodUid::new("x".repeat(1_000_000)).unwrap_err();
        assert!(err.to_string().len() < 200);
    }
}
