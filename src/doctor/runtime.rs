//! What a runtime's settings mean for us.

use std::path::Path;
use std::time::Duration;

use super::{Finding, Level, Options, duration, text};

/// Where a runtime makes its NRI socket if it is not told otherwise (both do; `/var/run` is `/run`).
const DEFAULT_SOCKET: &str = "/var/run/nri/nri.sock";
/// Request timeout of every runtime by default.
const DEFAULT_REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// The same for registration.
const DEFAULT_REGISTRATION_TIMEOUT: Duration = Duration::from_secs(5);

/// Whether something is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// The configuration says so.
    Set(bool),
    /// It does not, and this version does so by default.
    Default(bool),
    /// It does not, and the version is not known: what versions do.
    Either(&'static str),
}

/// How things are called in the runtime's configuration.
#[derive(Debug, Clone)]
pub(super) struct Names {
    pub(super) runtime: &'static str,
    /// Header of NRI's table.
    pub(super) nri: String,
    /// The line that turns NRI on.
    pub(super) turn_on: &'static str,
    pub(super) request_timeout: &'static str,
    /// Header of the table with CDI's settings.
    pub(super) cdi: String,
    /// Header of the default validator's table.
    pub(super) validator: String,
}

/// The built-in validator of NRI 0.10 and newer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Validator {
    pub(super) is_on: bool,
    pub(super) rejects_hooks: bool,
    /// Plugins without which no container is made.
    pub(super) required: Vec<String>,
    /// Key of the annotation with which a pod does without them; empty for none.
    pub(super) toleration: String,
}

/// What a runtime is told, as far as it matters to us.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) names: Names,
    pub(super) nri: Answer,
    /// Whether plugins can connect to the socket, beside those that the runtime starts.
    pub(super) takes_connections: bool,
    pub(super) socket: Option<String>,
    pub(super) request_timeout: Option<String>,
    pub(super) registration_timeout: Option<String>,
    /// Keys that have no effect where they stand.
    pub(super) misplaced: Vec<String>,
    pub(super) cdi: Answer,
    pub(super) cdi_dirs: Vec<String>,
    pub(super) validator: Validator,
}

/// `connected`: the agent says that NRI works.
pub(super) fn judge(settings: &Settings, options: &Options, connected: bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    if options.uses_nri {
        findings.push(nri(settings, connected));
        findings.extend(socket(settings, options));
        findings.extend(timeouts(settings));
    }
    findings.extend(settings.misplaced.iter().map(|key| {
        let subject = format!("{}: keys without effect", settings.names.runtime);
        let todo = format!("NRI's settings belong into {}, CDI's into {}", settings.names.nri, settings.names.cdi);
        Finding::new(Level::Warning, subject, format!("{key} is read by nobody there"), todo)
    }));
    findings.push(cdi(settings, options));
    findings.extend(validator(settings, options));
    findings
}

fn nri(settings: &Settings, connected: bool) -> Finding {
    let names = &settings.names;
    let subject = format!("{}: NRI", names.runtime);
    let todo = format!("{} in {}, restart {}", names.turn_on, names.nri, names.runtime);
    match settings.nri {
        Answer::Set(true) => Finding::ok(subject, "on"),
        Answer::Default(true) => Finding::ok(subject, "on, by default"),
        Answer::Either(_) if connected => Finding::ok(subject, "on: the agent is connected"),
        Answer::Set(false) => Finding::new(Level::Error, subject, "off", todo),
        Answer::Default(false) => Finding::new(Level::Error, subject, "off, by default", todo),
        Answer::Either(versions) => Finding::new(Level::Warning, subject, format!("not set: {versions}"), todo),
    }
}

fn socket(settings: &Settings, options: &Options) -> Option<Finding> {
    let subject = format!("{}: NRI socket", settings.names.runtime);
    if !settings.takes_connections {
        let todo = format!("take that out of {}", settings.names.nri);
        return Some(Finding::new(Level::Error, subject, "connections of plugins are disabled", todo));
    }
    let theirs = settings.socket.as_deref().filter(|path| !path.is_empty()).unwrap_or(DEFAULT_SOCKET);
    if same_path(Path::new(theirs), &options.nri_socket) {
        return None;
    }
    let found = format!("it is {}, the agent's is {}", text::short(theirs), options.nri_socket.display());
    Some(Finding::new(Level::Error, subject, found, "give the agent the same one (--nri-socket; chart: agent.nriSocket)"))
}

fn timeouts(settings: &Settings) -> Vec<Finding> {
    let names = &settings.names;
    let given = |value: &Option<String>, default| match value.as_deref() {
        None => Some((default, "by default")),
        Some(text) => match duration::parse(text)? {
            Duration::ZERO => Some((default, "by default")),
            set => Some((set, "set")),
        },
    };
    let mut findings = Vec::new();
    let subject = format!("{}: time for a request", names.runtime);
    findings.push(match given(&settings.request_timeout, DEFAULT_REQUEST_TIMEOUT) {
        None => broken(&subject, settings.request_timeout.as_deref()),
        Some((time, _)) if time < DEFAULT_REQUEST_TIMEOUT => {
            let todo = format!("moving a NIC takes 20 ms and more: {} = \"2s\" or more in {}", names.request_timeout, names.nri);
            Finding::new(Level::Warning, subject, format!("{} ms", time.as_millis()), todo)
        }
        Some((time, how)) => Finding::ok(subject, format!("{} ms, {how}", time.as_millis())),
    });
    let subject = format!("{}: time to register", names.runtime);
    match given(&settings.registration_timeout, DEFAULT_REGISTRATION_TIMEOUT) {
        None => findings.push(broken(&subject, settings.registration_timeout.as_deref())),
        Some((time, _)) if time < Duration::from_secs(1) => {
            let todo = "another plugin that is slow would keep ours out: leave it at 5s";
            findings.push(Finding::new(Level::Warning, subject, format!("{} ms", time.as_millis()), todo));
        }
        Some(_) => {}
    }
    findings
}

fn broken(subject: &str, value: Option<&str>) -> Finding {
    let found = format!("{:?} is no duration", text::short(value.unwrap_or_default()));
    Finding::new(Level::Error, subject, found, "write it like \"2s\" or \"500ms\"")
}

fn cdi(settings: &Settings, options: &Options) -> Finding {
    let names = &settings.names;
    let subject = format!("{}: CDI", names.runtime);
    let turn_on = format!("enable_cdi = true in {}, restart {}", names.cdi, names.runtime);
    let without = "containers are then gated by NRI alone: RunPodSandbox, CreateContainer, and the guard's hook where NRI adds it; \
                   RDMA devices are not given to containers";
    let has_ours = settings.cdi_dirs.iter().any(|dir| same_path(Path::new(dir), &options.cdi_dir));
    match settings.cdi {
        Answer::Set(false) | Answer::Default(false) if !options.uses_nri => {
            Finding::new(Level::Error, subject, "off, and the agent works without NRI: nothing gates containers", turn_on)
        }
        Answer::Set(false) => Finding::new(Level::Warning, subject, format!("off: {without}"), turn_on),
        Answer::Default(false) => Finding::new(Level::Warning, subject, format!("off, by default: {without}"), turn_on),
        _ if !has_ours => {
            let dirs: Vec<_> = settings.cdi_dirs.iter().take(8).map(|dir| text::short(dir)).collect();
            let found = format!(
                "{} is not among its folders ({}): containers with claims fail",
                options.cdi_dir.display(),
                dirs.join(", ")
            );
            let todo = format!(
                "add it to cdi_spec_dirs in {}, or give the agent one of them (--cdi-dir; chart: agent.cdiDir)",
                names.cdi
            );
            Finding::new(Level::Error, subject, found, todo)
        }
        Answer::Set(true) => Finding::ok(subject, format!("on, reads {}", options.cdi_dir.display())),
        Answer::Default(true) => Finding::ok(subject, format!("on, by default; reads {}", options.cdi_dir.display())),
        Answer::Either(versions) => {
            Finding::new(Level::Note, subject, format!("not set: {versions}; where it is off, {without}"), turn_on)
        }
    }
}

fn validator(settings: &Settings, options: &Options) -> Vec<Finding> {
    let (names, validator) = (&settings.names, &settings.validator);
    let subject = format!("{}: default validator", names.runtime);
    if !validator.is_on {
        let found = "off: that a pod requires this plugin (an annotation) is not checked";
        let todo = format!("to have it checked, turn it on in {} (docs/install.md, \"Requiring the plugin\")", names.validator);
        return vec![Finding::new(Level::Note, subject, found, todo)];
    }
    let full = format!("{}-{}", options.nri_index, options.driver_name);
    let mut findings = Vec::new();
    if !validator.required.iter().any(|name| *name == options.driver_name || *name == full) {
        findings.push(Finding::ok(&subject, "on; this plugin is required by pods with the annotation, not by all"));
    } else if validator.toleration.is_empty() {
        let found =
            "this plugin is required for all containers of the node, and no pod can do without: the agent's own can't start";
        let todo = format!(
            "set tolerate_missing_plugins_annotation in {} and annotate the agent's pods and static pods, or require the plugin by \
             annotation only",
            names.validator
        );
        findings.push(Finding::new(Level::Error, &subject, found, todo));
    } else {
        let key = text::short(&validator.toleration);
        let found = "this plugin is required for all containers of the node";
        let todo = format!("the agent's pods (chart: podAnnotations) and static pods need the annotation {key}: \"true\"");
        findings.push(Finding::new(Level::Warning, &subject, found, todo));
    }
    if validator.rejects_hooks {
        let found = "it rejects OCI hooks of plugins: the guard can't be added to a container that does not name its claim";
        let todo = format!("take that out of {} (reject_oci_hook_adjustment)", names.validator);
        findings.push(Finding::new(Level::Warning, &subject, found, todo));
    }
    findings
}

/// `/var/run` is a link to `/run` on every distribution of today.
fn same_path(a: &Path, b: &Path) -> bool {
    let plain = |path: &Path| match path.strip_prefix("/var/run") {
        Ok(rest) => Path::new("/run").join(rest),
        Err(_) => path.components().collect(),
    };
    plain(a) == plain(b)
}
