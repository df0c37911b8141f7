//! Where the two sockets are. Pure.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::{ServeError, SocketConfig};
use crate::names::PodUid;

/// Longest path of a Unix socket in bytes: `sun_path` (108) less the final NUL, unix(7).
pub(super) const SOCKET_PATH_MAX: usize = 107;
/// Longest driver name, in characters: `ResourceSlice.spec.driver`.
const DRIVER_MAX: usize = 63;

/// The two sockets of one driver instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Paths {
    /// Serves the DRA calls.
    pub(super) endpoint: PathBuf,
    /// Serves the registration; the kubelet finds it by its place.
    pub(super) registration: PathBuf,
}

impl Paths {
    /// Checks the configuration and derives the paths. Names that make a path too long are replaced by shorter ones made from
    /// hashes, by the same scheme as the drivers in Go.
    pub(super) fn new(config: &SocketConfig) -> Result<Self, ServeError> {
        let refuse = |reason: String| ServeError::Config { reason };
        if !config.kubelet_root.is_absolute() {
            return Err(refuse(format!("the kubelet's folder {} is not an absolute path", config.kubelet_root.display())));
        }
        let driver = config.driver.as_str();
        if !is_driver_name(driver) {
            let shown: String = driver.chars().take(64).collect();
            return Err(refuse(format!("driver name {shown:?} is not a DNS subdomain of at most 63 characters")));
        }
        if let Some(uid) = &config.instance {
            PodUid::new(uid.as_str()).map_err(|err| refuse(format!("instance: {err}")))?;
        }
        let uid = config.instance.as_deref();
        Ok(Self {
            endpoint: fit(&config.kubelet_root.join("plugins").join(driver), &endpoint_names(uid))?,
            registration: fit(&config.kubelet_root.join("plugins_registry"), &registration_names(driver, uid))?,
        })
    }
}

fn is_driver_name(name: &str) -> bool {
    let label = |label: &str| {
        let ends = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
        ends(label.bytes().next())
            && ends(label.bytes().next_back())
            && label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    };
    name.len() <= DRIVER_MAX && name.split('.').all(label)
}

/// Names of the DRA socket, best first.
fn endpoint_names(uid: Option<&str>) -> Vec<String> {
    match uid {
        None => vec!["dra.sock".to_owned()],
        Some(uid) => {
            let short = digest(uid.as_bytes(), 8);
            // The last one just fits the longest driver name in the usual folder.
            vec![format!("dra-{uid}.sock"), format!("dra-{short}.sock"), format!("d-{short}.sock")]
        }
    }
}

/// Names of the registration socket, best first.
fn registration_names(driver: &str, uid: Option<&str>) -> Vec<String> {
    let both = [driver.as_bytes(), uid.unwrap_or_default().as_bytes()].join(&0);
    let last = format!("dra-{}-reg.sock", digest(&both, 16));
    match uid {
        None => vec![format!("{driver}-reg.sock"), last],
        Some(uid) => vec![format!("{driver}-{uid}-reg.sock"), format!("{driver}-{}-reg.sock", digest(uid.as_bytes(), 8)), last],
    }
}

/// The first of `names` that fits into `dir`.
fn fit(dir: &Path, names: &[String]) -> Result<PathBuf, ServeError> {
    let mut paths = names.iter().map(|name| dir.join(name));
    let fits = paths.find(|path| path.as_os_str().len() <= SOCKET_PATH_MAX);
    fits.ok_or_else(|| ServeError::Config {
        reason: format!(
            "a socket in {} would have a path of more than {SOCKET_PATH_MAX} bytes; use a shorter driver name or kubelet folder",
            dir.display()
        ),
    })
}

/// The first `len` bytes of the SHA-256 of `input` in base64url without padding, RFC 4648 5.
fn digest(input: &[u8], len: usize) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let hash = Sha256::digest(input);
    let mut text = String::new();
    for chunk in hash[..len.min(hash.len())].chunks(3) {
        let bits = chunk.iter().chain(&[0; 2]).take(3).fold(0_usize, |bits, &byte| bits << 8 | usize::from(byte));
        for i in 0..=chunk.len() {
            text.push(char::from(ALPHABET[bits >> (18 - 6 * i) & 63]));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "0b1c2d3e-4f50-6172-8394-a5b6c7d8e9f0";

    fn paths(root: &str, driver: &str, instance: Option<&str>) -> Result<Paths, ServeError> {
        Paths::new(&SocketConfig { kubelet_root: root.into(), driver: driver.into(), instance: instance.map(Into::into) })
    }

    #[test]
    fn the_usual_places() {
        let plain = paths("/var/lib/kubelet", "dranic.dev", None).unwrap();
        assert_eq!(plain.endpoint, Path::new("/var/lib/kubelet/plugins/dranic.dev/dra.sock"));
        assert_eq!(plain.registration, Path::new("/var/lib/kubelet/plugins_registry/dranic.dev-reg.sock"));
        let rolling = paths("/var/lib/kubelet", "dranic.dev", Some(UID)).unwrap();
        assert_eq!(rolling.endpoint, Path::new("/var/lib/kubelet/plugins/dranic.dev").join(format!("dra-{UID}.sock")));
        assert!(rolling.registration.ends_with(format!("dranic.dev-{UID}-reg.sock")));
    }

    #[test]
    fn long_paths_are_shortened_in_steps_and_stay_distinct() {
        // 34 + driver + 1 + 36 + 9: a driver name of 27 characters still fits, one of 28 does not.
        let at = |len: usize, uid: &str| paths("/var/lib/kubelet", &"d".repeat(len), Some(uid)).unwrap();
        let name = |paths: &Paths| paths.registration.file_name().unwrap().to_str().unwrap().to_owned();
        assert_eq!(at(27, UID).registration.as_os_str().len(), 107);
        assert!(name(&at(27, UID)).contains(UID));
        let second = name(&at(28, UID));
        assert_eq!(second, format!("{}-{}-reg.sock", "d".repeat(28), digest(UID.as_bytes(), 8)));
        assert_ne!(second, name(&at(28, "another")));
        let third = name(&at(63, UID));
        assert!(third.starts_with("dra-") && third.len() == 4 + 22 + 9, "{third}");
        assert_ne!(third, name(&at(62, UID)));
        for len in 1..=63 {
            for path in [at(len, UID).registration, at(len, UID).endpoint] {
                assert!(path.as_os_str().len() <= SOCKET_PATH_MAX, "{}", path.display());
            }
        }
    }

    #[test]
    fn what_can_not_work_is_refused_by_name() {
        let reason = |result: Result<Paths, ServeError>| result.unwrap_err().to_string();
        assert!(reason(paths("var/lib", "dranic.dev", None)).contains("absolute"));
        for bad in ["", "..", "a/b", "A", "a..b", "-a", "a-", &"a".repeat(64)] {
            assert!(reason(paths("/var/lib/kubelet", bad, None)).contains("driver name"), "{bad:?}");
        }
        assert!(reason(paths("/var/lib/kubelet", "dranic.dev", Some("../x"))).contains("instance"));
        assert!(reason(paths(&format!("/{}", "r".repeat(90)), "dranic.dev", None)).contains("107 bytes"));
    }

    /// RFC 4648's alphabet and FIPS 180-2's first example: SHA-256("abc") = ba7816bf 8f01cfea ...
    #[test]
    fn the_digest_is_base64url() {
        assert_eq!(digest(b"abc", 8), "ungWv48Bz-o");
    }
}
