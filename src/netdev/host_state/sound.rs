//! A host state comes back from a file. What in it no kernel ever said is left out and reported, before it becomes a message.

use super::super::{NextHop, Route, ethtool, raw};
use super::{HostState, RestoreReport};

/// `IFNAMSIZ` - 1, `linux/if.h`: longest name and label, bytes.
const NAME: usize = 15;
/// `ALTIFNAMSIZ` - 1, `linux/if.h`, bytes.
const ALT_NAME: usize = 127;
/// `IFALIASZ` - 1, `linux/if.h`, bytes.
const ALIAS: usize = 255;
/// An attribute is shorter than 64 KiB; next hops are together in one. Bytes, with room for the rest of a message.
const ATTRIBUTE: usize = 60_000;
/// A next hop without `other`: header, gateway of the other family, bytes.
const NEXT_HOP: usize = 32;
/// More than there are `RTAX_*` numbers.
const METRICS: usize = 64;

/// `state` without what can't be.
pub(super) fn sound(state: &HostState, report: &mut RestoreReport) -> HostState {
    let mut sound = state.clone();
    let mut keep = |what: String, good: bool| {
        if !good {
            let what = what.chars().take(ALT_NAME).collect();
            report.failed.push((what, "the record is damaged here; it was left out".into()));
        }
        good
    };
    sound.alt_names.retain(|name| keep(format!("altname {name}"), fits(name, ALT_NAME)));
    sound.alias = sound.alias.filter(|alias| keep("alias".into(), fits(alias, ALIAS)));
    sound
        .addresses
        .retain(|address| keep(format!("address {}", address.ip), address.label.as_ref().is_none_or(|label| fits(label, NAME))));
    sound.routes.retain(|route| keep(format!("route {}", route.destination), is_sound(route)));
    sound.qdiscs.retain(|q| keep(format!("qdisc {:x}", q.handle), fits(&q.kind, NAME) && raw::is_valid(&q.options)));
    let (settings, bad) = ethtool::sound(&sound.ethtool);
    sound.ethtool = settings;
    bad.into_iter().for_each(|what| {
        keep(what, false);
    });
    sound
}

fn fits(text: &str, longest: usize) -> bool {
    !text.is_empty() && text.len() <= longest && !text.contains('\0')
}

fn is_sound(route: &Route) -> bool {
    let size = |hop: &NextHop| NEXT_HOP + hop.other.len() / 2;
    raw::is_valid(&route.other)
        && route.metrics.len() <= METRICS
        && route.next_hops.iter().all(|hop| raw::is_valid(&hop.other))
        && route.next_hops.iter().map(size).sum::<usize>() <= ATTRIBUTE
}
