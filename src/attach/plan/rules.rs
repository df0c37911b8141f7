//! The policy rules that the pod gets for the link.

use std::collections::HashSet;

use ipnet::IpNet;

use super::LeftOut;
use crate::config::{NetworkConfig, RuleConfig};
use crate::names::PodLinkName;
use crate::netdev::route::{PROTO_KERNEL, PROTO_STATIC, TABLE_MAIN};
use crate::netdev::{Address, HostState, Route, Rule, rule};

/// `FR_ACT_TO_TBL`, `linux/fib_rules.h`.
const TO_TABLE: u8 = 1;
/// `FR_ACT_BLACKHOLE`, `FR_ACT_UNREACHABLE`, `FR_ACT_PROHIBIT`, `linux/fib_rules.h`: they need no table.
const REFUSE: [u8; 3] = [6, 7, 8];
/// Tables that every namespace has and in which a link need not have a route: `RT_TABLE_DEFAULT`, `MAIN`, `LOCAL`.
const KERNEL_TABLES: [u32; 3] = [253, TABLE_MAIN, 255];
/// Most rules that are copied from the host.
const COPIED_MAX: usize = 1024;

/// The configured rules, then those of the host's that the pod can use.
pub(super) fn of_pod(
    config: &NetworkConfig,
    host: &HostState,
    pod_link: &PodLinkName,
    addresses: &[Address],
    routes: &[Route],
    left_out: &mut LeftOut,
) -> Vec<Rule> {
    let pod = Pod { host, addresses, tables: routes.iter().map(|r| (r.destination.addr().is_ipv6(), r.table)).collect() };
    let mut all: Vec<Rule> = config.rules.iter().flatten().map(configured).collect();
    if !config.host_state().rules {
        return all;
    }
    let mut taken: HashSet<Rule> = all.iter().cloned().map(selectors).collect();
    let mut copied = Vec::new();
    for rule in host.rules.iter().filter(|r| r.protocol != PROTO_KERNEL) {
        if let Some(why) = pod.refuses(rule) {
            left_out.add(format!("{}: {why}", describe(rule)));
            continue;
        }
        let rule = renamed(rule.clone(), &host.name, pod_link);
        if taken.insert(selectors(rule.clone())) {
            copied.push(rule);
        }
    }
    left_out.cut(&mut copied, COPIED_MAX, "rules");
    all.extend(copied);
    all
}

fn configured(rule: &RuleConfig) -> Rule {
    // A prefix of length 0 is "any" and tells the family only.
    let selector = |net: Option<IpNet>| net.map(|n| n.trunc()).filter(|n| n.prefix_len() > 0);
    Rule {
        ipv6: rule.source.or(rule.destination).is_some_and(|n| n.addr().is_ipv6()),
        priority: rule.priority,
        source: selector(rule.source),
        destination: selector(rule.destination),
        table: rule.table.filter(|t| *t != 0).unwrap_or(TABLE_MAIN),
        action: TO_TABLE,
        invert: rule.invert == Some(true),
        tos: 0,
        protocol: PROTO_STATIC,
        input_link: rule.iif.clone(),
        output_link: rule.oif.clone(),
        other: rule::selectors(rule.fwmark.map(|mark| (mark, rule.fwmask.unwrap_or(u32::MAX))), rule.suppress_prefix_length),
    }
}

/// What the kernel compares to see whether it has a rule already: all but who made it.
fn selectors(mut rule: Rule) -> Rule {
    rule.protocol = 0;
    rule
}

fn renamed(mut rule: Rule, from: &str, to: &PodLinkName) -> Rule {
    for link in [&mut rule.input_link, &mut rule.output_link].into_iter().flatten() {
        if link == from {
            to.as_str().clone_into(link);
        }
    }
    rule
}

/// What decides whether a rule of the host's makes sense in the pod.
struct Pod<'a> {
    host: &'a HostState,
    addresses: &'a [Address],
    /// Tables in which the pod has a route by this link; true for IPv6.
    tables: HashSet<(bool, u32)>,
}

impl Pod<'_> {
    fn refuses(&self, rule: &Rule) -> Option<String> {
        let links = [&rule.input_link, &rule.output_link].into_iter().flatten();
        if let Some(other) = links.clone().find(|link| **link != self.host.name && *link != "lo") {
            return Some(format!("it is for link {other}, which does not come along"));
        }
        let names_link = links.into_iter().any(|link| *link == self.host.name);
        if rule.action == TO_TABLE {
            let has_route = self.tables.contains(&(rule.ipv6, rule.table));
            let everywhere = names_link && KERNEL_TABLES.contains(&rule.table);
            if !has_route && !everywhere {
                return Some(format!("no route of table {} comes along", rule.table));
            }
        } else if !REFUSE.contains(&rule.action) || !names_link {
            return Some("it leads to another rule, or is not about this link".into());
        }
        self.refuses_source(rule)
    }

    /// A rule for packets from an address of this link on the host that the pod does not have never matches there.
    fn refuses_source(&self, rule: &Rule) -> Option<String> {
        let source = rule.source.filter(|_| !rule.invert)?;
        let stays = self.host.addresses.iter().find(|a| source.contains(&a.ip))?;
        let comes = self.addresses.iter().any(|a| source.contains(&a.ip));
        (!comes).then(|| format!("its source is the host's address {}, which is not among the pod's", stays.ip))
    }
}

pub(super) fn describe(rule: &Rule) -> String {
    let priority = rule.priority.map(|p| format!(" {p}")).unwrap_or_default();
    let source = rule.source.map(|s| format!(" from {s}")).unwrap_or_default();
    let destination = rule.destination.map(|d| format!(" to {d}")).unwrap_or_default();
    format!("rule{priority}{source}{destination} to table {}", rule.table)
}
