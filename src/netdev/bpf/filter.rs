//! Filters with programs (`cls_bpf`) on the ingress or clsact discipline of a link.

use std::collections::BTreeSet;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Instant;

use netlink_packet_core::{DefaultNla, NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::tc::{TcAttribute, TcHandle, TcMessage};
use serde::{Deserialize, Serialize};

use super::super::raw;
use super::Program;
use crate::netlink::decode::{attributes, find, read_u32, text};
use crate::netlink::{NetlinkError, Request, RouteSocket};

/// `TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_INGRESS)`, `linux/pkt_sched.h`. Also what an ingress discipline takes.
pub(super) const INGRESS: u32 = 0xffff_fff2;
/// `TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_EGRESS)`, `linux/pkt_sched.h`.
pub(super) const EGRESS: u32 = 0xffff_fff3;
/// `struct tcmsg`, `linux/rtnetlink.h`, bytes.
const HEADER: usize = 20;
// TCA_*, linux/rtnetlink.h.
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_CHAIN: u16 = 11;
// TCA_BPF_*, linux/pkt_cls.h.
const TCA_BPF_ACT: u16 = 1;
const TCA_BPF_POLICE: u16 = 2;
const TCA_BPF_CLASSID: u16 = 3;
const TCA_BPF_OPS_LEN: u16 = 4;
const TCA_BPF_OPS: u16 = 5;
const TCA_BPF_FD: u16 = 6;
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_FLAGS: u16 = 8;
const TCA_BPF_FLAGS_GEN: u16 = 9;
const TCA_BPF_ID: u16 = 11;
/// `NLA_F_NESTED`, `linux/netlink.h`.
const NESTED: u16 = 1 << 15;
/// `TCA_CLS_FLAGS_SKIP_HW | TCA_CLS_FLAGS_SKIP_SW`, `linux/pkt_cls.h`: the others say how it is, not how it was wished.
const WISHES: u32 = 3;
/// Longest name of a filter that is kept (`CLS_BPF_NAME_LEN`, `net/sched/cls_bpf.c`), bytes.
const NAME: usize = 256;

/// A filter. Its program is an eBPF program by number, or classic BPF by its instructions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filter {
    /// Where: `0xfffffff2` what comes in, `0xfffffff3` what goes out.
    pub parent: u32,
    /// Lower ones come first.
    pub priority: u16,
    /// `ETH_P_*`, `linux/if_ether.h`: 3 for all.
    pub protocol: u16,
    /// Its number within the priority.
    pub handle: u32,
    /// Chain.
    #[serde(default)]
    pub chain: u32,
    /// Name.
    #[serde(default)]
    pub name: String,
    /// `TCA_BPF_FLAG_ACT_DIRECT`: what the program returns is what is done.
    #[serde(default)]
    pub direct: bool,
    /// Class that matching packets are put into.
    #[serde(default)]
    pub class_id: Option<u32>,
    /// `TCA_CLS_FLAGS_SKIP_HW` and `TCA_CLS_FLAGS_SKIP_SW`.
    #[serde(default)]
    pub hardware: u32,
    /// The program, unless it is classic.
    #[serde(default)]
    pub program: Option<Program>,
    /// Hex of the attributes with the instructions, when it is classic.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub classic: String,
}

impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = side(self.parent);
        write!(f, "filter {} {side} pref {} handle {:x} protocol {:x}", self.name, self.priority, self.handle, self.protocol)?;
        if self.chain != 0 {
            write!(f, " chain {}", self.chain)?;
        }
        if let Some(class) = self.class_id {
            write!(f, " class {class:x}")?;
        }
        match &self.program {
            Some(program) => write!(f, " program {}", program.id)?,
            None => f.write_str(" classic")?,
        }
        f.write_str(if self.direct { " direct-action" } else { "" })?;
        if self.hardware == 0 { Ok(()) } else { write!(f, " hardware flags {}", self.hardware) }
    }
}

fn side(parent: u32) -> &'static str {
    if parent == EGRESS { "egress" } else { "ingress" }
}

impl Filter {
    /// What tells filters of a link apart.
    pub(super) fn key(&self) -> (u32, u32, u16, u32) {
        (self.parent, self.chain, self.priority, self.handle)
    }

    /// Whether the kernel could have said so: the ledger is a file.
    pub(super) fn is_sound(&self) -> bool {
        self.name.len() < NAME && !self.name.contains('\0') && raw::is_valid(&self.classic)
    }
}

/// What one message of a dump is.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    /// One with a program. Its program has only a number yet.
    Ours(Filter),
    /// One that we can't make again; in words.
    Other(String),
    /// The head of a priority, or a filter of a block that several links share: that one does not go with the link.
    Nothing,
}

/// Reads the body of an `RTM_NEWTFILTER` that was asked of `parent`.
fn parse(bytes: &[u8], parent: u32) -> Option<Found> {
    let rest = bytes.get(HEADER..)?;
    let (index, handle, info) = (read_u32(bytes, 4)?, read_u32(bytes, 8)?, read_u32(bytes, 16)?);
    let kind = text(find(rest, TCA_KIND)?);
    let Some(options) = find(rest, TCA_OPTIONS).filter(|_| handle != 0 && index != u32::MAX) else { return Some(Found::Nothing) };
    let [priority, protocol] = [info >> 16, info & 0xffff].map(|half| u16::try_from(half).unwrap_or(0));
    let protocol = u16::from_be(protocol);
    let other = |why: &str| Some(Found::Other(format!("filter {kind} {} pref {priority}{why}", side(parent))));
    if kind != "bpf" {
        return other("");
    }
    let mut filter = Filter {
        parent,
        priority,
        protocol,
        handle,
        chain: find(rest, TCA_CHAIN).and_then(|value| read_u32(value, 0)).unwrap_or(0),
        name: String::new(),
        direct: false,
        class_id: None,
        hardware: 0,
        program: None,
        classic: String::new(),
    };
    let mut classic = Vec::new();
    for (kind, value) in attributes(options) {
        let number = || read_u32(value, 0);
        match kind {
            // An empty one is what a filter without actions has.
            TCA_BPF_ACT | TCA_BPF_POLICE if !value.is_empty() => return other(" with actions"),
            TCA_BPF_CLASSID => filter.class_id = number(),
            TCA_BPF_OPS_LEN | TCA_BPF_OPS => classic.push((kind, raw::bytes(&DefaultNla::new(kind, value.to_vec())))),
            TCA_BPF_NAME => filter.name = text(value),
            TCA_BPF_FLAGS => filter.direct = number()? & 1 != 0,
            TCA_BPF_FLAGS_GEN => filter.hardware = number()? & WISHES,
            TCA_BPF_ID => filter.program = number().map(|id| Program { id, name: String::new(), tag: String::new() }),
            _ => {}
        }
    }
    filter.classic = raw::to_hex(classic);
    Some(Found::Ours(filter))
}

/// The filters of the link with `index` on the sides that `parents` stand for: those with programs, and the others in words.
pub(super) fn list(
    socket: &mut RouteSocket,
    index: u32,
    parents: &[u32],
    deadline: Instant,
) -> Result<(Vec<Filter>, Vec<String>), NetlinkError> {
    let (mut ours, mut others) = (Vec::new(), BTreeSet::new());
    for parent in parents {
        let mut message = TcMessage::with_index(index.cast_signed());
        message.header.parent = TcHandle::from(*parent);
        for message in socket.dump_raw(RouteNetlinkMessage::GetTrafficFilter(message), deadline)? {
            match parse(&message.payload, *parent) {
                Some(Found::Ours(filter)) => ours.push(filter),
                Some(Found::Other(text)) => drop(others.insert(text)),
                Some(Found::Nothing) | None => {}
            }
        }
    }
    Ok((ours, others.into_iter().collect()))
}

/// The request that makes the filter on the link with `index`. It is an error (`EEXIST`) where one is in its place.
pub(super) fn add_request(index: u32, filter: &Filter, program: Option<&impl AsFd>) -> Request {
    let mut options: Vec<DefaultNla> = raw::from_hex(&filter.classic).unwrap_or_default();
    let mut number = |kind, value: u32| options.push(DefaultNla::new(kind, value.to_ne_bytes().to_vec()));
    if let Some(program) = program {
        number(TCA_BPF_FD, program.as_fd().as_raw_fd().cast_unsigned());
    }
    if let Some(class) = filter.class_id {
        number(TCA_BPF_CLASSID, class);
    }
    if filter.direct {
        number(TCA_BPF_FLAGS, 1);
    }
    if filter.hardware & WISHES != 0 {
        number(TCA_BPF_FLAGS_GEN, filter.hardware & WISHES);
    }
    if !filter.name.is_empty() {
        options.push(DefaultNla::new(TCA_BPF_NAME, [filter.name.as_bytes(), &[0]].concat()));
    }
    let options = options.iter().flat_map(raw::bytes).collect();
    let mut message = TcMessage::with_index(index.cast_signed());
    message.header.handle = TcHandle::from(filter.handle);
    message.header.parent = TcHandle::from(filter.parent);
    message.header.info = u32::from(filter.priority) << 16 | u32::from(filter.protocol.to_be());
    message.attributes.push(TcAttribute::Kind("bpf".to_owned()));
    message.attributes.push(TcAttribute::Chain(filter.chain));
    message.attributes.push(TcAttribute::Other(DefaultNla::new(TCA_OPTIONS | NESTED, options)));
    Request { message: RouteNetlinkMessage::NewTrafficFilter(message), flags: NLM_F_CREATE | NLM_F_EXCL }
}

#[cfg(test)]
mod tests {
    use netlink_packet_core::Emitable;
    use proptest::prelude::*;

    use super::*;

    fn body(filter: &Filter) -> Vec<u8> {
        let RouteNetlinkMessage::NewTrafficFilter(message) = add_request(7, filter, None::<&std::fs::File>).message else {
            panic!()
        };
        let mut bytes = vec![0; message.buffer_len()];
        message.emit(&mut bytes);
        bytes
    }

    fn classic(instructions: &[u8]) -> String {
        let attribute = |kind, value: &[u8]| (kind, raw::bytes(&DefaultNla::new(kind, value.to_vec())));
        raw::to_hex(vec![attribute(TCA_BPF_OPS_LEN, &1_u16.to_ne_bytes()), attribute(TCA_BPF_OPS, instructions)])
    }

    fn filter() -> impl Strategy<Value = Filter> {
        let numbers = (any::<u16>(), any::<u16>(), 1_u32.., any::<u32>(), any::<Option<u32>>(), 0..=WISHES);
        (numbers, any::<bool>(), "[a-z:/]{0,20}", any::<[u8; 8]>()).prop_map(|(numbers, direct, name, instructions)| {
            let (priority, protocol, handle, chain, class_id, hardware) = numbers;
            let classic = classic(&instructions);
            Filter {
                parent: INGRESS,
                priority,
                protocol,
                handle,
                chain,
                name,
                direct,
                class_id,
                hardware,
                program: None,
                classic,
            }
        })
    }

    proptest! {
        #[test]
        fn round_trip(filter in filter()) {
            prop_assert!(filter.is_sound());
            prop_assert_eq!(parse(&body(&filter), INGRESS), Some(Found::Ours(filter)));
        }

        #[test]
        fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..120)) {
            let _ = parse(&bytes, EGRESS);
        }
    }

    #[test]
    fn what_we_can_not_make_again_is_said_in_words() {
        let mut bytes = vec![0; HEADER];
        bytes[4] = 7;
        bytes[8] = 1;
        bytes[18] = 10;
        bytes.extend(raw::bytes(&DefaultNla::new(TCA_KIND, b"u32\0".to_vec())));
        assert_eq!(parse(&bytes, INGRESS), Some(Found::Nothing), "the head of a priority has no options");
        bytes.extend(raw::bytes(&DefaultNla::new(TCA_OPTIONS, vec![0; 4])));
        assert_eq!(parse(&bytes, EGRESS), Some(Found::Other("filter u32 egress pref 10".to_owned())));
        bytes[4..8].fill(0xff);
        assert_eq!(parse(&bytes, INGRESS), Some(Found::Nothing), "a block is not the link's");
    }

    #[test]
    fn damaged_records_are_refused() {
        let text = r#"{"parent": 4294967282, "priority": 1, "protocol": 3, "handle": 1}"#;
        let good: Filter = serde_json::from_str(text).unwrap();
        assert!(good.is_sound());
        for bad in [
            Filter { name: "x".repeat(NAME), ..good.clone() },
            Filter { name: "a\0b".to_owned(), ..good.clone() },
            Filter { classic: "0".to_owned(), ..good },
        ] {
            assert!(!bad.is_sound(), "{bad:?}");
        }
    }
}
