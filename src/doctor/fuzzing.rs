//! Target `doctor`: any text as the configuration of a container runtime.

use super::{Level, Options, agent, containerd, crio, runtime, text};

/// The first byte chooses the runtime, and what else is known.
pub(crate) fn doctor(data: &[u8]) {
    let Some((&mode, rest)) = data.split_first() else { return };
    let Ok(config) = std::str::from_utf8(rest) else { return };
    let options = Options {
        containerd_config: "/etc/containerd/config.toml".into(),
        crio_config: "/etc/crio/crio.conf".into(),
        driver_name: "dranic.dev".to_owned(),
        nri_index: "10".to_owned(),
        uses_nri: mode & 2 == 0,
        nri_socket: "/var/run/nri/nri.sock".into(),
        cdi_dir: "/var/run/cdi".into(),
        state_dir: "/var/lib/dranic".into(),
        guard_dir: None,
    };
    let (_, mut findings) = agent::look(&Ok(config.to_owned()), &options);
    let known = (mode & 4 != 0).then_some("containerd 1.7.24");
    match text::parse(config) {
        Ok(table) => {
            let mut twice = table.clone();
            text::merge(&mut twice, table.clone());
            assert_eq!(twice, table, "a file over itself is the file");
            let format = i64::from(mode >> 3);
            let settings =
                if mode & 1 == 0 { containerd::settings(&table, format, known) } else { crio::settings(&table, known) };
            findings.extend(runtime::judge(&settings, &options, known.is_some()));
        }
        Err(why) => assert!(why.starts_with("line ") && why.chars().count() < 300, "{why}"),
    }
    for finding in findings {
        assert!(
            !finding.subject.is_empty() && !finding.found.is_empty() && (finding.level == Level::Ok || finding.todo.is_some())
        );
        assert!(!finding.found.contains('\n') && !finding.subject.contains('\n'), "{finding:?}");
    }
}
