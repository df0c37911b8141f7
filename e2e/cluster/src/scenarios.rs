//! All scenarios, in the order they run.

mod absent;
mod admission;
mod basic;
mod blocked;
mod configure;
mod disturb;
mod gate;
mod kills;
mod lifecycle;
mod peer;
mod placement;
mod rdma;
mod reboot;
mod report;
mod rolling;
mod share;
mod stream;
mod trouble;
mod watched;
mod webhook;

use std::time::Duration;

use anyhow::Result;
use futures_util::future::BoxFuture;

use crate::context::Context;

/// What a scenario does.
pub(crate) type Body = fn(Context) -> BoxFuture<'static, Result<()>>;

/// One scenario.
#[derive(Debug)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    /// With clean-up.
    pub(crate) limit: Duration,
    /// Belongs to the few that `--smoke` runs.
    pub(crate) smoke: bool,
    pub(crate) run: Run,
}

/// Whether a scenario can pass.
#[derive(Debug)]
pub(crate) enum Run {
    Now(Body),
    /// Its feature belongs to the issue of this title. It runs with `--pending` only, so that whoever builds the feature has the test.
    Later(&'static str, Option<Body>),
}

macro_rules! scenario {
    ($name:literal, $seconds:literal, $body:path, $about:literal) => {
        scenario!(@ $name, $seconds, false, Run::Now(|context| Box::pin($body(context))), $about)
    };
    ($name:literal, smoke $seconds:literal, $body:path, $about:literal) => {
        scenario!(@ $name, $seconds, true, Run::Now(|context| Box::pin($body(context))), $about)
    };
    ($name:literal, later $issue:expr, $seconds:literal, $body:path, $about:literal) => {
        scenario!(@ $name, $seconds, false, Run::Later($issue, Some(|context| Box::pin($body(context)))), $about)
    };
    ($name:literal, later $issue:expr, $about:literal) => {
        scenario!(@ $name, 0, false, Run::Later($issue, None), $about)
    };
    (@ $name:literal, $seconds:literal, $smoke:literal, $run:expr, $about:literal) => {
        Scenario { name: $name, about: $about, limit: Duration::from_secs($seconds), smoke: $smoke, run: $run }
    };
}

const CONFIGURE: &str = "Every way to configure a NIC, and everything given back";

/// In the order they run: what others build upon first.
pub(crate) const ALL: &[Scenario] = &[
    scenario!("one-nic", smoke 60, basic::one_nic, "a pod with one NIC, as it is on the host, and back"),
    scenario!("eight-nics", smoke 60, basic::eight_nics, "one claim with eight devices"),
    scenario!("two-claims", smoke 60, basic::two_claims, "two claims in a pod"),
    scenario!("class-and-claim-config", smoke 60, basic::class_and_claim, "configuration of DeviceClass and claim combined"),
    scenario!("both-nodes", smoke 60, basic::both_nodes, "pods on both nodes talk over their NICs"),
    scenario!("first-available", 60, basic::first_available, "prioritized list; configuration of the parent request"),
    scenario!("admin-access", 90, basic::admin_access, "a claim with admin access"),
    scenario!("match-attribute", 240, placement::match_attribute, "matchAttribute on pcieRoot and numaNode with a second driver"),
    scenario!("shared-claim", smoke 120, lifecycle::shared_claim, "two pods share a claim: the second is refused"),
    scenario!("host-network", 60, lifecycle::host_network, "hostNetwork and a claim: a clear event"),
    scenario!("init-and-sidecar", smoke 90, lifecycle::init_and_sidecar, "init container, sidecar, one container starts again"),
    scenario!("force-delete", 90, lifecycle::force_delete, "a pod deleted with grace period 0"),
    scenario!("namespace-delete", 120, lifecycle::namespace_delete, "a namespace deleted with running pods"),
    scenario!("churn", 900, lifecycle::churn, "50 pods made and deleted again and again: nothing leaks"),
    scenario!("shared-nic", 180, share::shared_nic, "two pods on one NIC, a third and the NIC as a whole wait"),
    scenario!("kubelet-restart", 120, disturb::kubelet_restart, "the kubelet starts again: pods keep their NICs, slices return"),
    scenario!("kill-agent", 1500, kills::agent, "kill -9 of the agent while pods start"),
    scenario!("kill-kubelet", 1500, kills::kubelet, "kill -9 of the kubelet while pods start"),
    scenario!("kill-containerd", 1500, kills::containerd, "kill -9 of containerd while pods start"),
    scenario!("reboot", 300, reboot::reboot, "the node starts again: state kept, /run wiped, new boot id, links made anew"),
    scenario!("rolling-update", 280, rolling::update, "rolling updates of the DaemonSet with maxSurge 1 while pods come and go"),
    scenario!("claim-status", smoke 90, report::claim_status, "per device Ready, networkData, data; cleared on release"),
    scenario!("health", 180, report::link_health, "a link that goes down and up, in the pod's allocatedResourcesStatus"),
    scenario!("peer-01-address", smoke 60, peer::address, "link renamed with an address of the configuration"),
    scenario!("peer-02-odd-name", 60, peer::odd_name, "host link mlx5_6, whose name is no DNS label"),
    scenario!("peer-03-arp", 90, configure::arp, "arpIgnore and arpAnnounce"),
    scenario!(
        "peer-04-deployment",
        90,
        peer::deployment,
        "Deployment and template without configuration: the /32 of a link that is down"
    ),
    scenario!("peer-05-route-order", 60, peer::route_order, "a gateway's route before the link-scope route that it needs"),
    scenario!("peer-06-metrics", 60, peer::metrics, "metrics on localhost:9177, seen from the host's network"),
    scenario!("peer-07-mtu-mac", 60, peer::mtu_mac, "name, address, MTU and link-layer address"),
    scenario!("peer-07-ethtool", 90, configure::ethtool, "ethtool features by their long names"),
    scenario!("peer-08-big-tcp", 90, configure::big_tcp, "GSO and GRO sizes"),
    scenario!("peer-09-tc-filter", 90, configure::tc_filter, "attributes ebpf and tcFilterNames"),
    scenario!("peer-10-tcx", 90, configure::tcx, "attribute tcxProgramNames"),
    scenario!("peer-11-no-ebpf", 90, configure::no_ebpf, "disableEbpfPrograms"),
    scenario!("peer-12-count", smoke 60, peer::count, "one request with count 2"),
    scenario!("peer-13-reuse", 120, peer::reuse, "the same NIC again after a Deployment is gone, its address restored by us"),
    scenario!("peer-14-evicted", 120, peer::evicted, "DaemonSet evicted from one node: its sockets go there, stay on the other"),
    scenario!(
        "peer-15-forgotten-pod",
        120,
        peer::forgotten_pod,
        "pod deleted by force while the agent is away: forgotten when it is back"
    ),
    scenario!("peer-16-neighbours", 60, peer::neighbours, "permanent neighbours of the host's link"),
    scenario!("peer-17-routes-rules", 60, peer::routes_and_rules, "a host's route in table 100 and its rule"),
    scenario!("peer-18-ipv6-route", 60, peer::ipv6_route, "exactly the kernel's connected IPv6 route"),
    scenario!(
        "peer-19-policy-routing",
        120,
        peer::policy_routing,
        "two clients reach each other through a router pod by rules and tables"
    ),
    scenario!("peer-20-vrf", 120, configure::vrf, "the same with a VRF"),
    scenario!(
        "peer-21-attributes",
        120,
        peer::attributes_stay,
        "attributes in the slice stay while the device is lent and after a restart"
    ),
    scenario!("peer-22-whereabouts", later CONFIGURE, 240, webhook::whereabouts, "a profile whose address comes from a webhook"),
    scenario!("peer-23-webhook", later CONFIGURE, 240, webhook::provider, "attributes and device configuration from a webhook"),
    scenario!(
        "config-policy",
        120,
        admission::config_policy,
        "claims, templates and classes of a wrong form are refused when made"
    ),
    scenario!("rdma", 90, rdma::moves, "an RDMA device moves with its NIC"),
    scenario!("node-not-blocked", 240, blocked::node_not_blocked, "32 NICs: the runtime's time, and a pod beside it"),
    scenario!("pod-128-nics", 240, blocked::pod_128_nics, "four claims of 32 in one pod, three times in a row"),
    scenario!("slow-handler", 240, blocked::slow_handler, "8, 16 and 64 NICs whose attach takes longer than the runtime waits"),
    scenario!("agent-stopped-in-run", smoke 180, trouble::stopped_in_run, "SIGSTOP of the agent for 5 s when the runtime asks"),
    scenario!("agent-killed-in-run", 180, trouble::killed_in_run, "kill -9 of the agent when the runtime asks, back 10 s later"),
    scenario!(
        "agent-killed-before-run",
        180,
        trouble::killed_before_run,
        "kill -9 of the agent between prepare and sandbox, back 10 s later"
    ),
    scenario!("plugin-absent", smoke 180, trouble::absent, "no agent when the container is being made"),
    scenario!("plugin-restarted-between", 180, trouble::restarted_between, "another agent between prepare and sandbox"),
    scenario!(
        "runtime-restarted-between",
        240,
        trouble::runtime_restarted,
        "containerd killed between prepare and sandbox, and between sandbox and container"
    ),
    scenario!("not-named", 180, trouble::not_named, "a container that does not name its pod's claim"),
    scenario!("own-pods", 300, absent::own_pods, "nodes that start with nothing of ours: our own pods are not held up"),
    scenario!("nri-off", 240, absent::nri_off, "NICs by CDI and the guard alone"),
    scenario!("rolling-overlap", 240, rolling::overlap, "two instances during an update: no gap, nothing twice"),
    scenario!(
        "missed-sandbox",
        300,
        absent::missed_sandbox,
        "containers that run without NICs already: late attach, or eviction"
    ),
    scenario!(
        "gate-agent-dead",
        600,
        gate::agent_dead,
        "no container runs before its NICs are there, also while the agent is dead"
    ),
    scenario!("gate", 240, gate::late, "an attach that outlasts the runtime's time lets no container through"),
    // Last: the controllers' watches, which make each namespace's service account, come back up to a minute later.
    scenario!("kill-apiserver", 3000, kills::apiserver, "kill -9 of the API server while pods start"),
];

/// Prints all.
pub(crate) fn list() {
    for scenario in ALL {
        match scenario.run {
            Run::Now(_) => {
                let smoke = if scenario.smoke { "smoke" } else { "" };
                println!("{:28} {:4} s  {smoke:5}  {}", scenario.name, scenario.limit.as_secs(), scenario.about);
            }
            Run::Later(issue, _) => println!("pending: {} ({issue}): {}", scenario.name, scenario.about),
        }
    }
}
