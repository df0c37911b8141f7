//! The RDMA device of a device: what of it the pod gets, and why it can't. Pure.

use super::{Plan, Step};
use crate::config::{NetworkConfig, RdmaConfig, VfConfig};
use crate::inventory::RdmaPart;
use crate::ledger::RdmaRecord;
use crate::names::{LINK_NAME_MAX, PodLinkName, RdmaDeviceName};
use crate::netdev::Child;
use crate::rdma::{CharDeviceKind, Device, NetnsMode, Port, Protocol};

/// How the node's mode is changed: never by us, and not while there are pods.
const SET_EXCLUSIVE: &str =
    "set it at boot with \"options ib_core netns_mode=0\" in a file of /etc/modprobe.d (dranic doctor says more)";
const SET_SHARED: &str = "remove \"options ib_core netns_mode=0\" from /etc/modprobe.d and reboot (dranic doctor says more)";

/// Whether the pod gets the RDMA device, where there is one.
pub(crate) fn is_wanted(config: &NetworkConfig) -> bool {
    config.rdma.as_ref().is_none_or(|rdma| rdma.enabled != Some(false))
}

/// Whether nothing but a device with RDMA will do.
pub(crate) fn is_required(config: &NetworkConfig) -> bool {
    config.rdma.as_ref().is_some_and(|rdma| rdma.enabled == Some(true))
}

/// What is recorded of the RDMA device `now` (with its `ports`, in the node's `mode`), which the inventory saw as `part`. `link`: index
/// of the device's link; none where it has none. `child`: what is made on top of that.
///
/// # Errors
/// Why the pod can't have it, with the path of the field.
pub(crate) fn record(
    config: &NetworkConfig,
    part: &RdmaPart,
    (mode, now, ports): (NetnsMode, &Device, &[Port]),
    link: Option<u32>,
    child: Option<&Child>,
) -> Result<RdmaRecord, String> {
    let none = RdmaConfig::default();
    let config = config.rdma.as_ref().unwrap_or(&none);
    check_mode(config, mode)?;
    if let Some(child) = child.filter(|_| mode == NetnsMode::Exclusive) {
        return Err(format!(
            "rdma.enabled: the node's RDMA mode is exclusive, and RDMA device {} can't be in the pod while the link below the {} link stays \
             on the host; set rdma.enabled to false, or interface.type to passthrough",
            now.name,
            child.kind()
        ));
    }
    check_port(part, now, ports, link)?;
    let wanted = config.char_devices.iter().flatten().map(|kind| CharDeviceKind::from(*kind));
    let mut char_devices: Vec<_> = [CharDeviceKind::Uverbs, CharDeviceKind::RdmaCm].into_iter().chain(wanted).collect();
    char_devices.sort_unstable();
    char_devices.dedup();
    Ok(RdmaRecord {
        name: RdmaDeviceName::new(now.name.clone()).map_err(|error| error.to_string())?,
        index: now.index,
        node_guid: now.node_guid,
        port: part.port,
        protocol: now.protocol,
        mode,
        char_devices,
        companions: part.companions.clone(),
        limits: config.limits.clone(),
        wait_for_port: config.wait_for_port.unwrap_or(true),
        usable: None,
        problem: None,
    })
}

fn check_mode(config: &RdmaConfig, mode: NetnsMode) -> Result<(), String> {
    let Some(wanted) = config.netns_mode.map(NetnsMode::from).filter(|wanted| *wanted != mode) else { return Ok(()) };
    let how = if wanted == NetnsMode::Exclusive { SET_EXCLUSIVE } else { SET_SHARED };
    Err(format!("rdma.netnsMode: {wanted} is asked for, and the node's RDMA mode is {mode}; {how}, or ask for {mode}"))
}

/// Whether the port is still the link's.
fn check_port(part: &RdmaPart, now: &Device, ports: &[Port], link: Option<u32>) -> Result<(), String> {
    let Some(port) = ports.iter().find(|port| port.port == part.port) else {
        return Err(format!("rdma: RDMA device {} has no port {} by now; the kubelet will ask again", now.name, part.port));
    };
    match (&port.link, link) {
        (Some((is, name)), Some(link)) if *is != link => Err(format!(
            "rdma: port {} of RDMA device {} belongs to link {name} by now; the kubelet will ask again",
            part.port, now.name
        )),
        _ => Ok(()),
    }
}

/// The step that gives the pod the RDMA device, right after the link's way in; but before it where the RDMA device takes its IPoIB link
/// with it.
pub(crate) fn add_step(plan: &mut Plan, record: &RdmaRecord) {
    let is_first = record.mode == NetnsMode::Exclusive && record.protocol == Protocol::InfiniBand;
    let is_way_in = |step: &Step| matches!(step, Step::Move { .. } | Step::Create { .. });
    let at = plan.steps.iter().position(is_way_in).map_or(0, |position| position + usize::from(!is_first));
    let (device, mode, char_devices) = (record.name.clone(), record.mode, record.char_devices.clone());
    plan.steps.insert(at, Step::Rdma { device, mode, char_devices });
}

/// The plan of an RDMA device without a link, but for [`add_step`].
///
/// # Errors
/// Names the field that needs a link.
pub(crate) fn without_link(config: &NetworkConfig, rdma: &RdmaDeviceName) -> Result<Plan, String> {
    let fields = [
        ("interface", config.interface.is_some()),
        ("routes", config.routes.is_some()),
        ("rules", config.rules.is_some()),
        ("neighbors", config.neighbors.is_some()),
        ("ethtool", config.ethtool.is_some()),
        ("vf", config.vf.as_ref().is_some_and(|vf| *vf != only_guids(vf))),
    ];
    if let Some((field, _)) = fields.iter().find(|(_, is_set)| *is_set) {
        return Err(format!("{field}: the device is an RDMA device without a link; remove {field}"));
    }
    if !is_wanted(config) {
        return Err("rdma.enabled: the device is an RDMA device without a link, and false leaves nothing of it".to_owned());
    }
    Ok(Plan {
        pod_link: for_people(rdma.as_str()),
        steps: Vec::new(),
        left_out: Vec::new(),
        restore: config.restore.unwrap_or_default(),
    })
}

/// What of `vf` is of RDMA devices without a link, too.
fn only_guids(vf: &VfConfig) -> VfConfig {
    VfConfig { node_guid: vf.node_guid, port_guid: vf.port_guid, ..VfConfig::default() }
}

/// What of `name` can be a link's name.
fn for_people(name: &str) -> PodLinkName {
    let fits = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let text: String = name.chars().filter(fits).take(LINK_NAME_MAX).collect();
    PodLinkName::new(text).unwrap_or_else(|_| PodLinkName::new("rdma").expect("four letters"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netdev::MacvlanMode;
    use crate::rdma::PortState;

    fn part() -> RdmaPart {
        let name = RdmaDeviceName::new("mlx5_0").unwrap();
        RdmaPart { name, port: 1, protocol: Protocol::Roce, node_guid: None, companions: Vec::new() }
    }

    fn now() -> Device {
        Device { index: 3, name: "mlx5_0".into(), ports: 1, protocol: Protocol::Roce, ..Device::default() }
    }

    fn port(link: u32) -> Port {
        let link = Some((link, format!("nic{link}")));
        Port { device: 3, port: 1, state: PortState::Active, link, subnet_prefix: None, lid: None }
    }

    fn config(text: &str) -> NetworkConfig {
        crate::config::parse(text).unwrap()
    }

    fn recorded(text: &str, mode: NetnsMode, child: Option<&Child>) -> Result<RdmaRecord, String> {
        record(&config(text), &part(), (mode, &now(), &[port(7)]), Some(7), child)
    }

    #[test]
    fn a_pod_gets_the_device_with_verbs_and_what_is_asked_for() {
        let plain = recorded("{}", NetnsMode::Shared, None).unwrap();
        assert_eq!((plain.index, plain.port, plain.wait_for_port), (3, 1, true));
        assert_eq!(plain.char_devices, [CharDeviceKind::Uverbs, CharDeviceKind::RdmaCm]);
        let text = r#"{"rdma": {"charDevices": ["issm", "umad"], "waitForPort": false, "limits": {"hcaHandles": 2}}}"#;
        let more = recorded(text, NetnsMode::Exclusive, None).unwrap();
        let all = [CharDeviceKind::Uverbs, CharDeviceKind::Umad, CharDeviceKind::Issm, CharDeviceKind::RdmaCm];
        assert_eq!(more.char_devices, all);
        assert!(!more.wait_for_port && more.limits.unwrap().hca_handles == Some(2));
    }

    #[test]
    fn what_does_not_fit_is_refused_by_its_path() {
        let wrong = recorded(r#"{"rdma": {"netnsMode": "exclusive"}}"#, NetnsMode::Shared, None).unwrap_err();
        assert!(wrong.starts_with("rdma.netnsMode: exclusive") && wrong.contains("options ib_core netns_mode=0"), "{wrong}");
        let wrong = recorded(r#"{"rdma": {"netnsMode": "shared"}}"#, NetnsMode::Exclusive, None).unwrap_err();
        assert!(wrong.starts_with("rdma.netnsMode: shared") && wrong.contains("remove"), "{wrong}");
        let child = Child::Macvlan { mode: MacvlanMode::Bridge };
        let wrong = recorded("{}", NetnsMode::Exclusive, Some(&child)).unwrap_err();
        assert!(wrong.starts_with("rdma.enabled: ") && wrong.contains("macvlan"), "{wrong}");
        assert!(recorded("{}", NetnsMode::Shared, Some(&child)).is_ok());
    }

    #[test]
    fn another_links_port_is_not_taken() {
        let found = |ports: &[Port], link| record(&config("{}"), &part(), (NetnsMode::Shared, &now(), ports), link, None);
        assert!(found(&[port(8)], Some(7)).unwrap_err().contains("belongs to link nic8"));
        assert!(found(&[], Some(7)).unwrap_err().contains("has no port 1"));
        assert!(found(&[Port { link: None, ..port(7) }], Some(7)).is_ok(), "the kernel does not tell");
    }

    #[test]
    fn the_step_stands_behind_the_move() {
        let record = recorded("{}", NetnsMode::Exclusive, None).unwrap();
        let mut plan = without_link(&config("{}"), &record.name).unwrap();
        let name = plan.pod_link.clone();
        plan.steps = vec![Step::DetachPrograms { programs: vec![] }, Step::Move { name, mtu: None, address: None }, Step::Up];
        add_step(&mut plan, &record);
        let kinds = |plan: &Plan| plan.steps.iter().map(Step::kind).collect::<Vec<_>>();
        assert_eq!(kinds(&plan), ["detachPrograms", "move", "rdma", "up"]);
        plan.steps.retain(|step| !matches!(step, Step::Rdma { .. }));
        add_step(&mut plan, &RdmaRecord { protocol: Protocol::InfiniBand, ..record });
        assert_eq!(kinds(&plan), ["detachPrograms", "rdma", "move", "up"], "it takes its link with it");
    }

    #[test]
    fn a_device_without_link_takes_no_configuration_of_links() {
        let plan = |text: &str| without_link(&config(text), &RdmaDeviceName::new("rocep138s0f0np0").unwrap());
        assert_eq!(plan("{}").unwrap().pod_link.as_str(), "rocep138s0f0np0");
        assert!(plan(r#"{"vf": {"portGuid": "0c42:a103:0065:5f96"}}"#).is_ok());
        assert_eq!(for_people("/a b%").as_str(), "ab");
        assert_eq!(for_people("%").as_str(), "rdma");
        for (field, text) in [
            ("interface", r#"{"interface": {"mtu": 4000}}"#),
            ("routes", r#"{"routes": []}"#),
            ("rules", r#"{"rules": []}"#),
            ("neighbors", r#"{"neighbors": []}"#),
            ("ethtool", r#"{"ethtool": {"rings": {"rx": 512}}}"#),
            ("vf", r#"{"vf": {"trust": true}}"#),
            ("rdma.enabled", r#"{"rdma": {"enabled": false}}"#),
        ] {
            let why = plan(text).unwrap_err();
            assert!(why.starts_with(&format!("{field}: the device is an RDMA device without a link")), "{why}");
        }
    }
}
