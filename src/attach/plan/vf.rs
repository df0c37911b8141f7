//! What is to be set of a virtual function, and what is to be set when it is given back. Pure.

use crate::config::{LinkState, VfConfig, VlanProtocol};
use crate::netdev::vf::{ETH_P_8021Q, VfRate, VfSetting, VfSettings, VfVlan};

/// `ETH_P_8021AD`, `linux/if_ether.h`.
const ETH_P_8021AD: u16 = 0x88a8;

/// What has to be set, and what each of that is now, when `config` is wanted and the function is `now`. A part that `config` does not
/// name (`qos` of a tag, one of the two rates) stays as it is.
///
/// # Errors
/// The name of a setting that the driver does not tell: it could not be given back.
pub(in crate::attach) fn wanted(config: &VfConfig, now: &VfSettings) -> Result<(VfSettings, VfSettings), &'static str> {
    let all = asked(config, now);
    let (mut wanted, mut before) = (VfSettings::default(), VfSettings::default());
    for setting in all.all() {
        let is = now.like(&setting).ok_or_else(|| setting.name())?;
        if is != setting {
            put(&mut wanted, setting);
            put(&mut before, is);
        }
    }
    Ok((wanted, before))
}

/// Everything that `config` asks for.
fn asked(config: &VfConfig, now: &VfSettings) -> VfSettings {
    let vlan = now.vlan.unwrap_or(VfVlan { id: 0, qos: 0, protocol: ETH_P_8021Q });
    let rate = now.rate.unwrap_or(VfRate { min: 0, max: 0 });
    let protocol = config.proto.map(|proto| match proto {
        VlanProtocol::Dot1q => ETH_P_8021Q,
        VlanProtocol::Dot1ad => ETH_P_8021AD,
    });
    let names_vlan = config.vlan.is_some() || config.qos.is_some() || protocol.is_some();
    let names_rate = config.min_tx_rate.is_some() || config.max_tx_rate.is_some();
    // A function without a tag has neither priority nor protocol.
    let untagged = config.vlan == Some(0) && config.qos.is_none() && protocol.is_none();
    VfSettings {
        mac: config.mac.clone(),
        vlan: names_vlan.then(|| VfVlan {
            id: config.vlan.unwrap_or(vlan.id),
            qos: if untagged { 0 } else { config.qos.unwrap_or(vlan.qos) },
            protocol: if untagged { ETH_P_8021Q } else { protocol.unwrap_or(vlan.protocol) },
        }),
        rate: names_rate
            .then(|| VfRate { min: config.min_tx_rate.unwrap_or(rate.min), max: config.max_tx_rate.unwrap_or(rate.max) }),
        spoof_check: config.spoof_check,
        link_state: config.link_state.map(|state| match state {
            LinkState::Auto => 0,
            LinkState::Enable => 1,
            LinkState::Disable => 2,
        }),
        trust: config.trust,
        node_guid: config.node_guid,
        port_guid: config.port_guid,
    }
}

fn put(settings: &mut VfSettings, setting: VfSetting) {
    match setting {
        VfSetting::Mac(mac) => settings.mac = Some(mac),
        VfSetting::Vlan(vlan) => settings.vlan = Some(vlan),
        VfSetting::Rate(rate) => settings.rate = Some(rate),
        VfSetting::SpoofCheck(on) => settings.spoof_check = Some(on),
        VfSetting::LinkState(state) => settings.link_state = Some(state),
        VfSetting::Trust(on) => settings.trust = Some(on),
        VfSetting::NodeGuid(guid) => settings.node_guid = Some(guid),
        VfSetting::PortGuid(guid) => settings.port_guid = Some(guid),
    }
}

/// Of `wanted`, what is not so `now`.
pub(in crate::attach) fn missing(wanted: &VfSettings, now: &VfSettings) -> Vec<VfSetting> {
    wanted.all().into_iter().filter(|setting| now.like(setting).as_ref() != Some(setting)).collect()
}

/// What has to be set to give the function back, and, in words, what somebody else has changed since it was set to `wanted`: that stays.
pub(in crate::attach) fn back(wanted: &VfSettings, before: &VfSettings, now: &VfSettings) -> (Vec<VfSetting>, Vec<String>) {
    let (mut set, mut respected) = (Vec::new(), Vec::new());
    for old in before.all() {
        match now.like(&old) {
            Some(is) if is == old => {}
            Some(is) if wanted.like(&old).as_ref() == Some(&is) => set.push(old),
            Some(is) => respected.push(format!("vf {} was {old}, is {is} now", is.name())),
            None => respected.push(format!("vf {} was {old}, is not told any more", old.name())),
        }
    }
    (set, respected)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rdma::Guid;

    fn now() -> VfSettings {
        VfSettings {
            mac: Some("00:00:00:00:00:00".parse().unwrap()),
            vlan: Some(VfVlan { id: 7, qos: 2, protocol: ETH_P_8021Q }),
            rate: Some(VfRate { min: 5, max: 50 }),
            spoof_check: Some(true),
            link_state: Some(0),
            trust: None,
            node_guid: Some(Guid(0)),
            port_guid: None,
        }
    }

    fn config(json: &str) -> VfConfig {
        crate::config::parse(&format!(r#"{{"vf": {json}}}"#)).unwrap().vf.unwrap()
    }

    fn words(settings: &VfSettings) -> Vec<String> {
        settings.all().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn only_what_is_named_and_differs_is_set() {
        let (set, before) =
            wanted(&config(r#"{"vlan": 9, "maxTxRate": 60, "spoofCheck": true, "linkState": "disable"}"#), &now()).unwrap();
        assert_eq!(words(&set), ["vlan 9 qos 2 protocol 0x8100", "rate 5 to 60 Mbit/s", "linkState disable"]);
        assert_eq!(words(&before), ["vlan 7 qos 2 protocol 0x8100", "rate 5 to 50 Mbit/s", "linkState auto"]);
        let (set, _) = wanted(&config(r#"{"vlan": 0}"#), &now()).unwrap();
        assert_eq!(words(&set), ["vlan 0 qos 0 protocol 0x8100"]);
        let (set, _) = wanted(&config(r#"{"proto": "802.1ad"}"#), &now()).unwrap();
        assert_eq!(words(&set), ["vlan 7 qos 2 protocol 0x88a8"]);
        assert_eq!(wanted(&config("{}"), &now()).unwrap(), (VfSettings::default(), VfSettings::default()));
    }

    #[test]
    fn what_the_driver_does_not_tell_is_not_set() {
        assert_eq!(wanted(&config(r#"{"trust": true}"#), &now()).unwrap_err(), "trust");
        assert_eq!(wanted(&config(r#"{"portGuid": "0c42:a103:0065:5f96"}"#), &now()).unwrap_err(), "portGuid");
    }

    #[test]
    fn a_guid_that_was_none_is_taken_away_again() {
        let (set, before) = wanted(&config(r#"{"nodeGuid": "0c42:a103:0065:5f96"}"#), &now()).unwrap();
        assert_eq!(words(&set), ["nodeGuid 0c42:a103:0065:5f96"]);
        let later = VfSettings { node_guid: set.node_guid, ..now() };
        assert_eq!(back(&set, &before, &later), (vec![VfSetting::NodeGuid(Guid(0))], vec![]));
        let elses = VfSettings { node_guid: Some(Guid(9)), ..now() };
        assert_eq!(back(&set, &before, &elses).0, [], "somebody else's stays");
    }

    #[test]
    fn what_somebody_else_changed_stays() {
        let (set, before) = wanted(&config(r#"{"vlan": 9, "maxTxRate": 60, "spoofCheck": false}"#), &now()).unwrap();
        let mut later = VfSettings { vlan: set.vlan, rate: Some(VfRate { min: 0, max: 1 }), ..now() };
        assert_eq!(missing(&set, &later).len(), 2);
        let (undo, respected) = back(&set, &before, &later);
        assert_eq!(undo, [VfSetting::Vlan(now().vlan.unwrap())], "spoofCheck is as it was already");
        assert_eq!(respected, ["vf rate was rate 5 to 50 Mbit/s, is rate 0 to 1 Mbit/s now"]);
        later.rate = None;
        assert_eq!(back(&set, &before, &later).1.len(), 1);
    }
}
