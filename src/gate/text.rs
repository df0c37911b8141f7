//! The one line that a user sees when a container may not start: the OCI runtime puts it into the pod's event.

use std::time::Duration;

use super::check::Lack;
use super::oci::State;

/// Longest line, characters.
const LINE_MAX: usize = 1024;
/// Longest part of it that comes from elsewhere, characters.
const PART_MAX: usize = 300;

/// Who waits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Subject<'a> {
    /// Driver name.
    pub(super) driver: &'a str,
    /// What the OCI runtime said.
    pub(super) state: &'a State,
}

impl Subject<'_> {
    /// A container that will not get what it needs, however long one waits.
    pub(super) fn refused(&self, why: &str) -> String {
        self.line(&clean(why, LINE_MAX))
    }

    /// A container that has not got it in time.
    pub(super) fn late(&self, lack: Option<&Lack>, agent: &str, waited: Duration) -> String {
        let mut text = match lack {
            None => String::new(),
            Some(lack) => {
                let more = if lack.more == 0 { String::new() } else { format!(" (and {} more)", lack.more) };
                format!("claim {}, device {}{more}: {}; ", lack.claim, lack.device, lack.what)
            }
        };
        if let Some(error) = lack.and_then(|lack| lack.last_error.as_deref())
            // The agent mostly says just that.
            && !agent.contains(error)
        {
            text += &format!("last error: {}; ", clean(error, PART_MAX));
        }
        text += &format!(
            "{}; waited {} s, the kubelet will try again. Next: dranic status and the log of the agent on this node",
            clean(agent, PART_MAX),
            waited.as_secs()
        );
        self.line(&text)
    }

    fn line(&self, text: &str) -> String {
        let pod = self.state.pod_name.as_deref().map(|pod| format!("pod {pod}"));
        let container = self.state.container.as_deref().map(|name| format!("container {name}"));
        let who: Vec<String> = pod.into_iter().chain(container).collect();
        let who = if who.is_empty() { "a container".to_owned() } else { who.join(", ") };
        clean(&format!("{}: {who} may not start before its NICs are there: {text}", self.driver), LINE_MAX)
    }
}

/// One line of at most `max` characters.
fn clean(text: &str, max: usize) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(max).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_who_what_why_and_what_to_do_and_is_one() {
        let state = State { pod_name: Some("ml/trainer".to_owned()), container: Some("main".to_owned()), ..State::default() };
        let subject = Subject { driver: "dra.net", state: &state };
        let lack = Lack {
            claim: "ml/nics".to_owned(),
            device: "pci-0000-8a-00-0".to_owned(),
            what: "it is not in the pod yet".to_owned(),
            last_error: Some("the name rail0\nis taken".to_owned()),
            more: 7,
        };
        let line = subject.late(Some(&lack), "no agent answers at /run/gate.sock", Duration::from_secs(60));
        for part in [
            "dra.net: pod ml/trainer, container main may not start",
            "claim ml/nics, device pci-0000-8a-00-0 (and 7 more): it is not in the pod yet",
            "last error: the name rail0 is taken",
            "no agent answers at /run/gate.sock",
            "waited 60 s, the kubelet will try again",
            "dranic status",
        ] {
            assert!(line.contains(part), "{part:?} is not in {line}");
        }
        let same = subject.late(Some(&lack), "the name rail0\nis taken", Duration::ZERO);
        assert!(!same.contains("last error") && !same.contains('\n'), "{same}");
        let long = Lack { last_error: Some("e".repeat(10_000)), ..lack };
        let line = subject.late(Some(&long), &"a".repeat(10_000), Duration::from_secs(60));
        assert!(line.chars().count() <= LINE_MAX && line.contains("dranic status"), "{line}");
        let nobody = State::default();
        let line = Subject { driver: "d", state: &nobody }.refused("so\nit is");
        assert_eq!(line, "d: a container may not start before its NICs are there: so it is");
    }
}
