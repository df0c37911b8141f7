//! `dranic agent`: flags, environment, and checking all of it before anything is bound.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::{EXIT_USAGE, Failure};
use crate::agent::{AgentConfig, Hold, NeedsGuard, OnMissedSandbox, OnOverrun};
use crate::dra::publisher::Shares;
use crate::dra::{api, grpc};
use crate::inventory::{Ipoib, ScanOptions};
use crate::names::DNS_LABEL_MAX;
use crate::nri::session::Margin;

/// End of `dranic agent --help`.
pub(super) const AFTER_HELP: &str = "\
Examples:
  dranic agent                                        in a pod of the DaemonSet: everything has a default
  dranic agent --kubeconfig admin.conf --log-level debug
  dranic agent --driver-name dra.net                  with manifests that were written for DRANET
  dranic agent --on-overrun fail                      no pod has a sandbox before its NICs are in it
  dranic agent --hold budget                          the same, unless they take longer than the runtime's 2 s
  DRANIC_OFFER_VETH=true dranic agent --node-name n1  on a machine without NICs

Each flag can be given by its variable instead. A bad value exits 64 before anything is bound.";

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// On.
    On,
    /// Off.
    Off,
}

/// Flags of `dranic agent`.
#[derive(Debug, Args)]
pub struct AgentArgs {
    /// Name of this node in the API; the host name where absent.
    #[arg(long, env = "NODE_NAME", value_name = "NAME")]
    pub node_name: Option<String>,

    /// Driver name: what DeviceClasses select and opaque parameters name. `dra.net` takes over DRANET's manifests.
    #[arg(long, env = "DRANIC_DRIVER_NAME", default_value = "dranic.dev", value_name = "NAME")]
    pub driver_name: String,

    /// Kubeconfig file; the pod's service account where absent.
    #[arg(long, env = "KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Root folder of the kubelet.
    #[arg(long, env = "DRANIC_KUBELET_ROOT", default_value = "/var/lib/kubelet", value_name = "DIR")]
    pub kubelet_root: PathBuf,

    /// UID of this agent's pod: makes its sockets' names its own, so that two agents can overlap in a rolling update.
    #[arg(long, env = "POD_UID", value_name = "UID")]
    pub instance: Option<String>,

    /// NRI socket of the container runtime.
    #[arg(long, env = "DRANIC_NRI_SOCKET", default_value = "/var/run/nri/nri.sock", value_name = "SOCKET")]
    pub nri_socket: PathBuf,

    /// Whether to use the runtime's NRI. Without it the guard alone has NICs attached, when a container starts, and they are given back
    /// when the claim is unprepared: for runtimes without NRI, which must have CDI.
    #[arg(long, env = "DRANIC_NRI", value_enum, default_value = "on", value_name = "WHETHER")]
    pub nri: Switch,

    /// NRI plugin index: two digits, lower ones are asked first.
    #[arg(long, env = "DRANIC_NRI_INDEX", default_value = "10", value_name = "NN")]
    pub nri_index: String,

    /// Folder of the ledger: what was prepared and attached, and what each NIC was on the host.
    #[arg(long, env = "DRANIC_STATE_DIR", default_value = "/var/lib/dranic", value_name = "DIR")]
    pub state_dir: PathBuf,

    /// Folder of CDI specs.
    #[arg(long, env = "DRANIC_CDI_DIR", default_value = "/var/run/cdi", value_name = "DIR")]
    pub cdi_dir: PathBuf,

    /// Socket that `dranic status` asks; root only.
    #[arg(long, env = "DRANIC_STATUS_SOCKET", default_value = "/run/dranic/dranic.sock", value_name = "SOCKET")]
    pub status_socket: PathBuf,

    /// Socket that guards ask; root only. `gate.sock` beside the status socket where absent. Its path must be the same on the host.
    #[arg(long, env = "DRANIC_GATE_SOCKET", value_name = "SOCKET")]
    pub gate_socket: Option<PathBuf>,

    /// Where to put the guard on the host: the program that the OCI runtime runs for each container with a claim, to hold it back until
    /// its NICs are there. On a file system that is not noexec, and the same path on the host. Empty: no guard.
    #[arg(long, env = "DRANIC_GUARD_DIR", default_value = "/var/lib/dranic/bin", value_name = "DIR")]
    pub guard_dir: String,

    /// The guard to put there; `dranic-guard` beside this program where absent.
    #[arg(long, env = "DRANIC_GUARD_PROGRAM", value_name = "FILE", hide = true)]
    pub guard_program: Option<PathBuf>,

    /// Seconds that the guard holds a container back before it fails. (The kubelet gives up after 120.)
    #[arg(long, env = "DRANIC_GUARD_WAIT", default_value_t = 60, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=110))]
    pub guard_wait: u64,

    /// Address of /healthz, /readyz and /metrics.
    #[arg(long, env = "DRANIC_HTTP_ADDRESS", default_value = "127.0.0.1:9177", value_name = "IP:PORT")]
    pub http_address: SocketAddr,

    /// What to do when an attach outlasts --hold (defer) or the runtime's budget (fail): let it go on while no container of the pod
    /// is let through, or fail the sandbox and take everything back. Where absent: defer if the guard can be used, else fail.
    #[arg(long, env = "DRANIC_ON_OVERRUN", value_enum, value_name = "WHAT")]
    pub on_overrun: Option<OnOverrun>,

    /// When an attach may go on (--on-overrun): milliseconds that the runtime, and every pod of the node with it, waits for the NICs of a sandbox before
    /// the attach goes on behind the gate; 0 never, or `budget`: as long as the runtime's deadline allows.
    #[arg(long, env = "DRANIC_HOLD", default_value = "200", value_name = "MS", value_parser = hold)]
    pub hold: Hold,

    /// What to do about a pod whose containers were started without its NICs, since no agent was connected to the runtime: attach them
    /// late, evict the pod, or only say so by an event. The claim's status says it in each case.
    #[arg(long, env = "DRANIC_ON_MISSED_SANDBOX", value_enum, default_value = "attach", value_name = "WHAT")]
    pub on_missed_sandbox: OnMissedSandbox,

    /// Least time left for the answer before the runtime's deadline, in milliseconds (never more than half of the budget).
    #[arg(long, env = "DRANIC_NRI_MARGIN", default_value_t = 150, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub nri_margin: u64,

    /// The same as a share of the time that the runtime gives, in percent: the larger of the two counts.
    #[arg(long, env = "DRANIC_NRI_MARGIN_PERCENT", default_value_t = 10, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(0..=50))]
    pub nri_margin_percent: u32,

    /// Offer veth links too. They are the host's ends of pods on a real node: for tests and for trying things out.
    #[arg(long, env = "DRANIC_OFFER_VETH")]
    pub offer_veth: bool,

    /// Offer nothing while the host has no default route: before it has one, its uplink can't be told from its other NICs.
    #[arg(long, env = "DRANIC_NEED_DEFAULT_ROUTE")]
    pub need_default_route: bool,

    /// What becomes of IPoIB links: offered, with their RDMA devices (attach), or left alone, and RDMA devices offered without (ignore).
    #[arg(long, env = "DRANIC_IPOIB", value_enum, default_value = "attach", value_name = "WHAT")]
    pub ipoib: Ipoib,

    /// How many claims may have a NIC at the same time, each with a macvlan, ipvlan or vlan link on top of it; 0: none is shared. Needs
    /// Kubernetes 1.36, or the features DRAConsumableCapacity and DRAPartitionableDevices.
    #[arg(long, env = "DRANIC_SHARE_SLOTS", default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1024))]
    pub share_slots: u32,

    /// With --share-slots: which NICs, by names of devices or of links on the host; `*` and `?` are patterns. Several flags, or a comma.
    #[arg(long, env = "DRANIC_SHARE", default_value = "*", value_delimiter = ',', value_name = "PATTERN")]
    pub share: Vec<String>,

    /// Seconds between full rescans of the host, beside those that events start.
    #[arg(long, env = "DRANIC_RESCAN", default_value_t = 60, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub rescan: u64,

    /// Seconds that prepare waits for a device that another pod is about to give back. (A kubelet tries a refused prepare again only
    /// after 60 to 90 s, and gives up waiting for an answer after 45.)
    #[arg(long, env = "DRANIC_WAIT_FOR_DEVICE", default_value_t = 20, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(0..=40))]
    pub wait_for_device: u64,

    /// Seconds that prepare waits for a DHCP server, for devices with `interface.dhcp: true`. (A kubelet gives up waiting after 45.)
    #[arg(long, env = "DRANIC_DHCP_TIMEOUT", default_value_t = 10, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=40))]
    pub dhcp_timeout: u64,

    /// Where the runtime mounts network namespaces of pods: to find one again that the runtime itself has lost.
    #[arg(long, env = "DRANIC_NETNS_DIR", default_value = "/var/run/netns", value_name = "DIR")]
    pub netns_dir: PathBuf,

    /// Where /proc/sys/net can be written: in a container a mount of the host's, as its own is read-only.
    #[arg(long, env = "DRANIC_SYSCTL_DIR", default_value = crate::netdev::sysctl::ROOT, value_name = "DIR")]
    pub sysctl_dir: PathBuf,

    /// Where the host's bpffs is mounted: eBPF programs of NICs in pods are kept there, so that they outlive the agent.
    #[arg(long, env = "DRANIC_BPFFS", default_value = crate::netdev::bpf::pins::BPFFS, value_name = "DIR")]
    pub bpffs: PathBuf,

    /// Root of sysfs.
    #[arg(long, env = "DRANIC_SYSFS", default_value = "/sys", value_name = "DIR", hide = true)]
    pub sysfs: PathBuf,

    /// Format of log lines.
    #[arg(long, env = "DRANIC_LOG_FORMAT", value_enum, default_value = "text", value_name = "FORMAT")]
    pub log_format: LogFormat,

    /// Level of log lines: error, warn, info, debug, trace, or a filter such as `info,dranic::nri=debug`.
    #[arg(long, env = "DRANIC_LOG", default_value = "info", value_name = "LEVEL")]
    pub log_level: String,
}

impl AgentArgs {
    /// Checks everything that was given.
    ///
    /// # Errors
    /// The first flag with a bad value, by name; exit code 64.
    pub fn check(self) -> Result<(AgentConfig, LogFormat, tracing_subscriber::EnvFilter), Failure> {
        let node_name = match self.node_name {
            Some(name) => name,
            None => host_name().map_err(|why| Failure::usage("--node-name", why))?,
        };
        subdomain(&node_name, 253).map_err(|why| Failure::usage("--node-name", format!("{node_name:?} {why}")))?;
        subdomain(&self.driver_name, DNS_LABEL_MAX)
            .map_err(|why| Failure::usage("--driver-name", format!("{:?} {why}", self.driver_name)))?;
        if self.nri_index.len() != 2 || !self.nri_index.bytes().all(|b| b.is_ascii_digit()) {
            return Err(Failure::usage("--nri-index", format!("{:?} is not two digits, 00 to 99", self.nri_index)));
        }
        let gate_socket = self.gate_socket.unwrap_or_else(|| self.status_socket.with_file_name("gate.sock"));
        let guard_dir = Some(PathBuf::from(self.guard_dir)).filter(|dir| !dir.as_os_str().is_empty());
        if let Some(dir) = &guard_dir {
            absolute(dir).map_err(|why| Failure::usage("--guard-dir", why))?;
        }
        if gate_socket == self.status_socket {
            return Err(Failure::usage("--gate-socket", "it is the same as --status-socket"));
        }
        for (flag, path) in [
            ("--kubelet-root", &self.kubelet_root),
            ("--nri-socket", &self.nri_socket),
            ("--state-dir", &self.state_dir),
            ("--cdi-dir", &self.cdi_dir),
            ("--netns-dir", &self.netns_dir),
            ("--sysctl-dir", &self.sysctl_dir),
            ("--bpffs", &self.bpffs),
            ("--status-socket", &self.status_socket),
            ("--gate-socket", &gate_socket),
        ] {
            absolute(path).map_err(|why| Failure::usage(flag, why))?;
        }
        for (flag, path) in
            [("--nri-socket", &self.nri_socket), ("--status-socket", &self.status_socket), ("--gate-socket", &gate_socket)]
        {
            socket_path(path).map_err(|why| Failure::usage(flag, why))?;
        }
        if let Some(file) = &self.kubeconfig {
            kubeconfig(file).map_err(|why| Failure::usage("--kubeconfig", why))?;
        }
        if let Some(uid) = &self.instance {
            crate::names::PodUid::new(uid.as_str()).map_err(|why| Failure::usage("--instance", why))?;
        }
        for pattern in &self.share {
            share_pattern(pattern).map_err(|why| Failure::usage("--share", why))?;
        }
        let filter = tracing_subscriber::EnvFilter::try_new(&self.log_level)
            .map_err(|why| Failure::usage("--log-level", format!("{:?}: {why}", self.log_level)))?;
        let config = AgentConfig {
            node_name,
            shares: Shares { slots: self.share_slots, patterns: self.share },
            driver_name: self.driver_name,
            kubeconfig: self.kubeconfig,
            kubelet_root: self.kubelet_root,
            instance: self.instance,
            nri_socket: self.nri_socket,
            nri: self.nri == Switch::On,
            nri_index: self.nri_index,
            nri_margin: Margin { least: Duration::from_millis(self.nri_margin), percent: self.nri_margin_percent },
            state_dir: self.state_dir,
            cdi_dir: self.cdi_dir,
            status_socket: self.status_socket,
            gate_socket,
            guard_dir,
            guard_program: self.guard_program,
            guard_wait: Duration::from_secs(self.guard_wait),
            http_address: self.http_address,
            on_overrun: self.on_overrun,
            hold: self.hold,
            on_missed_sandbox: self.on_missed_sandbox,
            offer: ScanOptions { offer_veth: self.offer_veth, need_default_route: self.need_default_route, ipoib: self.ipoib },
            rescan: Duration::from_secs(self.rescan),
            wait_for_device: Duration::from_secs(self.wait_for_device),
            dhcp_timeout: Duration::from_secs(self.dhcp_timeout),
            netns_dir: self.netns_dir,
            sysctl_dir: self.sysctl_dir,
            bpffs: self.bpffs,
            sysfs: self.sysfs,
        };
        grpc::check(&config.kubelet_sockets()).map_err(|why| Failure::usage("--kubelet-root", why))?;
        Ok((config, self.log_format, filter))
    }
}

/// Runs the agent until SIGTERM or SIGINT.
///
/// # Errors
/// When a value is bad (exit 64) or the agent can't start or stop in order (exit 1).
pub(super) fn run(args: AgentArgs) -> Result<(), Failure> {
    let (config, format, filter) = args.check()?;
    let _logs = crate::telemetry::start_logs(format == LogFormat::Json, filter);
    crate::agent::run_blocking(config).map_err(|error| {
        let failure = Failure::failed(&error);
        if error.is::<NeedsGuard>() { Failure { code: EXIT_USAGE, ..failure } } else { failure }
    })
}

/// `200`, or `budget`.
fn hold(text: &str) -> Result<Hold, String> {
    if text == "budget" {
        return Ok(Hold::Budget);
    }
    match text.parse() {
        Ok(milliseconds @ 0..=60_000) => Ok(Hold::For(Duration::from_millis(milliseconds))),
        _ => Err("give milliseconds, 0 to 60000, or: budget".to_owned()),
    }
}

/// Longest pattern, bytes: device names have at most 63. The time to compare grows with each star.
const PATTERN_MAX: usize = 64;
const STARS_MAX: usize = 4;

fn share_pattern(pattern: &str) -> Result<(), String> {
    if pattern.is_empty() || pattern.len() > PATTERN_MAX {
        return Err(format!("a pattern has 1 to {PATTERN_MAX} bytes"));
    }
    if pattern.matches('*').count() > STARS_MAX {
        return Err(format!("a pattern has at most {STARS_MAX} stars"));
    }
    Ok(())
}

fn host_name() -> Result<String, String> {
    let name = nix::unistd::gethostname().map_err(|e| format!("not given, and the host name can't be read: {e}"))?;
    Ok(name.to_string_lossy().trim().to_ascii_lowercase())
}

/// DNS subdomain (RFC 1123): labels of a-z, 0-9 and '-', joined by dots.
pub(super) fn subdomain(name: &str, max: usize) -> Result<(), String> {
    let label = |l: &str| {
        !l.is_empty()
            && l.len() <= DNS_LABEL_MAX
            && l.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
            && !l.starts_with('-')
            && !l.ends_with('-')
    };
    if name.len() > max || !name.split('.').all(label) {
        return Err(format!("is not a DNS subdomain of at most {max} characters (a-z, 0-9, '-' and '.')"));
    }
    Ok(())
}

fn absolute(path: &Path) -> Result<(), String> {
    if path.is_absolute() { Ok(()) } else { Err(format!("{} must be an absolute path", path.display())) }
}

/// Whether a client can be made from the file; nothing is sent.
fn kubeconfig(file: &Path) -> Result<(), String> {
    if !file.is_file() {
        return Err(format!("{} is not a file", file.display()));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| e.to_string())?;
    runtime.block_on(api::client(Some(file))).map(drop).map_err(|e| e.to_string())
}

/// `sun_path` has 108 bytes with the final NUL (`linux/un.h`).
fn socket_path(path: &Path) -> Result<(), String> {
    let len = path.as_os_str().len();
    if len > 107 { Err(format!("{} has {len} bytes, a socket's path may have 107", path.display())) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        args: AgentArgs,
    }

    fn check(args: &[&str]) -> Result<AgentConfig, Failure> {
        let all = ["dranic", "--node-name", "node-1"].iter().chain(args).copied();
        Only::try_parse_from(all).map_err(|e| Failure { code: 64, message: e.to_string() })?.args.check().map(|(c, _, _)| c)
    }

    #[test]
    fn defaults_are_fine_and_dra_net_is_a_driver_name() {
        let config = check(&["--driver-name", "dra.net"]).unwrap_or_else(|f| panic!("{}", f.message));
        assert_eq!(config.driver_name, "dra.net");
        assert!(config.http_address.ip().is_loopback());
    }

    #[test]
    fn a_hold_is_milliseconds_or_the_budget() {
        let hold = |value: &str| check(&["--hold", value]).unwrap_or_else(|f| panic!("{}", f.message)).hold;
        assert_eq!((hold("0"), hold("250")), (Hold::For(Duration::ZERO), Hold::For(Duration::from_millis(250))));
        assert_eq!(hold("budget"), Hold::Budget);
    }

    #[test]
    fn a_bad_value_exits_64_and_names_the_flag() {
        for (flag, value) in [
            ("--node-name", "Node_1"),
            ("--driver-name", "a/b"),
            ("--driver-name", ""),
            ("--nri-index", "5"),
            ("--nri-index", "ab"),
            ("--kubelet-root", "relative"),
            ("--nri-socket", "nri.sock"),
            ("--state-dir", "x"),
            ("--cdi-dir", "x"),
            ("--netns-dir", "x"),
            ("--sysctl-dir", "x"),
            ("--bpffs", "x"),
            ("--status-socket", &format!("/{}", "x".repeat(200))),
            ("--kubeconfig", "/does/not/exist"),
            ("--http-address", "nonsense"),
            ("--on-overrun", "maybe"),
            ("--hold", "60001"),
            ("--hold", "long"),
            ("--on-missed-sandbox", "ignore"),
            ("--nri-margin-percent", "51"),
            ("--log-format", "xml"),
            ("--log-level", "dranic=loud"),
            ("--nri-margin", "0"),
            ("--rescan", "0"),
            ("--wait-for-device", "41"),
            ("--dhcp-timeout", "0"),
            ("--dhcp-timeout", "41"),
            ("--instance", "../x"),
            ("--nri", "perhaps"),
            ("--gate-socket", "x"),
            ("--gate-socket", "/run/dranic/dranic.sock"),
            ("--guard-dir", "x"),
            ("--guard-wait", "0"),
            ("--guard-wait", "111"),
        ] {
            let args: Vec<&str> = if flag == "--node-name" { vec![] } else { vec!["--node-name", "n"] };
            let all = ["dranic"].into_iter().chain(args).chain([flag, value]);
            let failure = match Only::try_parse_from(all) {
                Err(e) => Failure { code: 64, message: e.to_string() },
                Ok(only) => only.args.check().err().unwrap_or_else(|| panic!("{flag} {value} was taken")),
            };
            assert_eq!(failure.code, 64, "{flag}");
            assert!(failure.message.contains(flag), "{flag}: {}", failure.message);
        }
    }
}
