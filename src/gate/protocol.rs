//! What guard and agent say to each other: lines of JSON on a unix socket. The guard sends one request, and with its first byte a file
//! descriptor of the container's network namespace; the agent answers with one line or more, of which the last one is final.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::names::{ClaimUid, PodUid, SandboxId};

/// Version of what is said here.
pub const VERSION: u32 = 1;
/// Longest line, bytes, with its end: 1,000 claims have 37 KiB.
pub const LINE_MAX: usize = 64 << 10;
/// Most claims of a request: a pod has at most some dozens.
pub const CLAIMS_MAX: usize = 1024;
/// Longest path, bytes (`PATH_MAX`, `linux/limits.h`).
const PATH_MAX: usize = 4096;
/// Longest container name that is kept, characters: a DNS label has 63.
const NAME_MAX: usize = 128;

/// What a guard asks for: all devices of the pod in this namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Request {
    /// [`VERSION`].
    pub version: u32,
    /// Which pod.
    pub pod: PodUid,
    /// Which sandbox of it.
    pub sandbox: SandboxId,
    /// Claims that the container uses.
    #[serde(default)]
    pub claims: Vec<ClaimUid>,
    /// Name of the container, for messages.
    #[serde(default)]
    pub container: Option<String>,
    /// A path that leads to the namespace, for the record.
    pub netns_path: PathBuf,
}

/// What the agent answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "camelCase")]
pub enum Answer {
    /// Not yet; more lines follow.
    Working {
        /// What is being done or waited for.
        why: String,
    },
    /// Everything is there.
    Attached,
    /// It will not be done.
    Refused {
        /// Why.
        why: String,
        /// Whether asking again is useless.
        #[serde(rename = "final")]
        is_final: bool,
    },
}

/// A request, from the bytes of its line.
///
/// # Errors
/// What is wrong with it, for people.
pub fn parse_request(line: &[u8]) -> Result<Request, String> {
    if line.len() > LINE_MAX {
        return Err(format!("the request has more than {LINE_MAX} bytes"));
    }
    let mut request: Request = serde_json::from_slice(line).map_err(|e| format!("the request can't be read: {e}"))?;
    if request.version != VERSION {
        return Err(format!("the request is of version {}, this agent speaks {VERSION}", request.version));
    }
    if request.claims.len() > CLAIMS_MAX {
        return Err(format!("the request names more than {CLAIMS_MAX} claims"));
    }
    if !request.netns_path.is_absolute() || request.netns_path.as_os_str().len() > PATH_MAX {
        return Err("the request has no absolute path of its network namespace".to_owned());
    }
    request.container = request.container.map(|name| name.chars().filter(|c| !c.is_control()).take(NAME_MAX).collect());
    Ok(request)
}

/// A line, with its end.
#[must_use]
pub fn line(message: &impl Serialize) -> Vec<u8> {
    // These types have text keys and nothing that could fail.
    let mut line = serde_json::to_vec(message).unwrap_or_default();
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request() -> Request {
        Request {
            version: VERSION,
            pod: PodUid::new("p").unwrap(),
            sandbox: SandboxId::new("s").unwrap(),
            claims: vec![ClaimUid::new("c").unwrap()],
            container: Some("main".to_owned()),
            netns_path: "/proc/7/ns/net".into(),
        }
    }

    #[test]
    fn what_is_written_is_read() {
        assert_eq!(parse_request(&line(&request())), Ok(request()));
        for answer in
            [Answer::Working { why: "so".to_owned() }, Answer::Attached, Answer::Refused { why: "no".to_owned(), is_final: true }]
        {
            assert_eq!(serde_json::from_slice::<Answer>(&line(&answer)).unwrap(), answer);
        }
        assert_eq!(line(&Answer::Attached), b"{\"state\":\"attached\"}\n");
        let refused = line(&Answer::Refused { why: "no".to_owned(), is_final: true });
        assert_eq!(refused, b"{\"state\":\"refused\",\"why\":\"no\",\"final\":true}\n");
    }

    #[test]
    fn what_is_wrong_is_said() {
        let bad = |change: fn(&mut Request)| {
            let mut bad = request();
            change(&mut bad);
            parse_request(&line(&bad)).unwrap_err()
        };
        assert!(bad(|r| r.version = 2).contains("version 2"));
        assert!(bad(|r| r.netns_path = "x".into()).contains("path"));
        assert!(bad(|r| r.netns_path = format!("/{}", "x".repeat(4096)).into()).contains("path"));
        assert!(bad(|r| r.claims = vec![ClaimUid::new("c").unwrap(); CLAIMS_MAX + 1]).contains("claims"));
        assert!(parse_request(&vec![b' '; LINE_MAX + 1]).unwrap_err().contains("bytes"));
        assert!(parse_request(b"{\"version\":1,\"pod\":\"../x\",\"sandbox\":\"s\",\"netnsPath\":\"/x\"}").is_err());
        assert!(parse_request(b"").is_err());
        let mut long = request();
        long.container = Some("a\n".repeat(1000));
        assert_eq!(parse_request(&line(&long)).unwrap().container.unwrap(), "a".repeat(NAME_MAX));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            let _ = parse_request(&bytes);
        }
    }
}
