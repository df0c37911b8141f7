//! Target `guard`: what the OCI runtime tells the guard, and what guard and agent tell each other.

use super::{oci, protocol};

/// Any bytes as the OCI state, as a `config.json`, as a guard's request and as the agent's answer.
pub(crate) fn guard(data: &[u8]) {
    if let Ok(state) = oci::parse(data) {
        assert!((1..=i32::MAX.cast_unsigned()).contains(&state.pid));
        assert!(state.bundle.is_none_or(|bundle| bundle.is_absolute()));
        // They end up in one line for the pod's event.
        let shown = state.pod_name.into_iter().chain(state.container);
        assert!(shown.into_iter().all(|name| !name.contains(char::is_control)));
    }
    assert!(oci::netns_path(data).is_none_or(|path| path.is_absolute()));
    if let Ok(request) = protocol::parse_request(data) {
        assert!(request.netns_path.is_absolute() && request.claims.len() <= protocol::CLAIMS_MAX);
        let line = protocol::line(&request);
        let (last, rest) = line.split_last().unwrap_or((&0, &[]));
        assert!(*last == b'\n' && !rest.contains(&b'\n'), "it is not one line");
        assert_eq!(protocol::parse_request(&line), Ok(request));
    }
    if let Ok(answer) = serde_json::from_slice::<protocol::Answer>(data) {
        assert_eq!(serde_json::from_slice::<protocol::Answer>(&protocol::line(&answer)).ok(), Some(answer));
    }
}
