//! The message format: BOOTP's fixed part (RFC 951), and options (RFC 2132). Pure.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

/// First bytes of the options (RFC 2131, section 3).
const MAGIC: [u8; 4] = [99, 130, 83, 99];
/// Bytes before the options: the fixed part and the magic.
const HEAD: usize = 240;
/// Fewest bytes of a message: what BOOTP had. Some servers and relays drop shorter ones.
const SIZE_MIN: usize = 300;
/// Longest answer that we ask for, bytes with IP and UDP (option 57): what fits an Ethernet frame.
const SIZE_MAX: u16 = 1500;
/// Longest host name that is sent, bytes: a DNS label.
const HOST_NAME_MAX: usize = 63;

/// `op` of a client, and of a server.
const REQUEST: u8 = 1;
const REPLY: u8 = 2;
/// `htype` of Ethernet (`ARPHRD_ETHER`).
const ETHERNET: u8 = 1;

/// Option codes (RFC 2132; RFC 3442 for the last but one).
pub(super) mod option {
    pub(crate) const PAD: u8 = 0;
    pub(crate) const MASK: u8 = 1;
    pub(crate) const ROUTER: u8 = 3;
    pub(crate) const HOST_NAME: u8 = 12;
    pub(crate) const MTU: u8 = 26;
    pub(crate) const STATIC_ROUTES: u8 = 33;
    pub(crate) const WANTED: u8 = 50;
    pub(crate) const TIME: u8 = 51;
    pub(crate) const OVERLOAD: u8 = 52;
    pub(crate) const KIND: u8 = 53;
    pub(crate) const SERVER: u8 = 54;
    pub(crate) const ASKED: u8 = 55;
    pub(crate) const TEXT: u8 = 56;
    pub(crate) const SIZE: u8 = 57;
    pub(crate) const RENEW: u8 = 58;
    pub(crate) const REBIND: u8 = 59;
    pub(crate) const CLIENT: u8 = 61;
    pub(crate) const CLASSLESS_ROUTES: u8 = 121;
    pub(crate) const END: u8 = 255;
}

/// What we ask for. Classless routes come first (RFC 3442).
const ASKED: [u8; 9] = [
    option::CLASSLESS_ROUTES,
    option::MASK,
    option::ROUTER,
    option::MTU,
    option::STATIC_ROUTES,
    option::TIME,
    option::SERVER,
    option::RENEW,
    option::REBIND,
];

/// What a message is (option 53).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Discover = 1,
    Offer = 2,
    Request = 3,
    Ack = 5,
    Nak = 6,
    Release = 7,
}

/// A message of ours.
#[derive(Debug, Clone)]
pub(super) struct Query<'a> {
    pub(super) kind: Kind,
    pub(super) xid: u32,
    /// Since the exchange began.
    pub(super) seconds: u16,
    /// The address that the link has; unspecified before it has one.
    pub(super) own: Ipv4Addr,
    pub(super) mac: [u8; 6],
    pub(super) client_id: &'a [u8],
    pub(super) host_name: &'a str,
    /// Option 50.
    pub(super) wanted: Option<Ipv4Addr>,
    /// Option 54.
    pub(super) server: Option<Ipv4Addr>,
}

impl Query<'_> {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; HEAD];
        out[..4].copy_from_slice(&[REQUEST, ETHERNET, 6, 0]);
        out[4..8].copy_from_slice(&self.xid.to_be_bytes());
        out[8..10].copy_from_slice(&self.seconds.to_be_bytes());
        out[12..16].copy_from_slice(&self.own.octets());
        out[28..34].copy_from_slice(&self.mac);
        out[236..HEAD].copy_from_slice(&MAGIC);
        let mut add = |code: u8, value: &[u8]| {
            let value = &value[..value.len().min(255)];
            out.extend([code, value.len() as u8]);
            out.extend(value);
        };
        add(option::KIND, &[self.kind as u8]);
        add(option::CLIENT, self.client_id);
        if let Some(address) = self.wanted {
            add(option::WANTED, &address.octets());
        }
        if let Some(server) = self.server {
            add(option::SERVER, &server.octets());
        }
        if self.kind != Kind::Release {
            let name = host_name(self.host_name);
            if !name.is_empty() {
                add(option::HOST_NAME, name.as_bytes());
            }
            add(option::SIZE, &SIZE_MAX.to_be_bytes());
            add(option::ASKED, &ASKED);
        }
        out.push(option::END);
        out.resize(out.len().max(SIZE_MIN), option::PAD);
        out
    }
}

/// As much of a pod's name as a host name can have.
fn host_name(name: &str) -> &str {
    let cut = name.get(..name.len().min(HOST_NAME_MAX)).unwrap_or_default();
    cut.trim_end_matches(['-', '.'])
}

/// A message of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) xid: u32,
    pub(super) mac: [u8; 6],
    /// `yiaddr`.
    pub(super) address: Ipv4Addr,
    options: BTreeMap<u8, Vec<u8>>,
}

impl Reply {
    /// Reads a message.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, &'static str> {
        let head = bytes.get(..HEAD).ok_or("it is shorter than a DHCP message")?;
        if head[0] != REPLY || head[1] != ETHERNET || head[2] != 6 {
            return Err("it is not an answer to an Ethernet client");
        }
        if head[236..] != MAGIC {
            return Err("it is BOOTP, not DHCP");
        }
        let mut options = BTreeMap::new();
        read_options(&bytes[HEAD..], &mut options)?;
        // RFC 3396: the options go on in `file`, and then in `sname`.
        let overload = one(options.get(&option::OVERLOAD)).unwrap_or(0);
        if overload & 1 != 0 {
            read_options(&head[108..236], &mut options)?;
        }
        if overload & 2 != 0 {
            read_options(&head[44..108], &mut options)?;
        }
        let mut mac = [0; 6];
        mac.copy_from_slice(&head[28..34]);
        let xid = u32::from_be_bytes([head[4], head[5], head[6], head[7]]);
        Ok(Self { xid, mac, address: Ipv4Addr::new(head[16], head[17], head[18], head[19]), options })
    }

    /// What it is, if that is something a server says.
    pub(super) fn kind(&self) -> Option<Kind> {
        [Kind::Offer, Kind::Ack, Kind::Nak].into_iter().find(|kind| one(self.options.get(&option::KIND)) == Some(*kind as u8))
    }

    /// An option's value.
    pub(super) fn option(&self, code: u8) -> Option<&[u8]> {
        self.options.get(&code).map(Vec::as_slice)
    }

    /// What the server says to people (option 56), without what a terminal would obey.
    pub(super) fn text(&self) -> Option<String> {
        let text = String::from_utf8_lossy(self.option(option::TEXT)?).chars().filter(|c| !c.is_control()).take(120).collect();
        Some(text).filter(|text: &String| !text.is_empty())
    }
}

fn one(value: Option<&Vec<u8>>) -> Option<u8> {
    value.and_then(|bytes| <[u8; 1]>::try_from(bytes.as_slice()).ok()).map(|[byte]| byte)
}

/// Adds the options in `bytes`; one that comes again goes on where it ended (RFC 3396).
fn read_options(mut bytes: &[u8], options: &mut BTreeMap<u8, Vec<u8>>) -> Result<(), &'static str> {
    loop {
        match bytes {
            [] | [option::END, ..] => return Ok(()),
            [option::PAD, rest @ ..] => bytes = rest,
            [code, length, rest @ ..] => {
                let value = rest.get(..usize::from(*length)).ok_or("an option is longer than the message")?;
                options.entry(*code).or_default().extend(value);
                bytes = &rest[value.len()..];
            }
            [_] => return Err("its last option has no length"),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// An answer with these options.
    pub(crate) fn reply(kind: Kind, address: Ipv4Addr, options: &[(u8, &[u8])]) -> Vec<u8> {
        let mut out = vec![0; HEAD];
        out[..4].copy_from_slice(&[REPLY, ETHERNET, 6, 0]);
        out[4..8].copy_from_slice(&7u32.to_be_bytes());
        out[16..20].copy_from_slice(&address.octets());
        out[28..34].copy_from_slice(&[2, 0, 0, 0, 0, 5]);
        out[236..].copy_from_slice(&MAGIC);
        for (code, value) in [(option::KIND, &[kind as u8][..])].iter().chain(options) {
            // A long one is written in pieces (RFC 3396).
            for piece in value.chunks(255) {
                out.extend([*code, u8::try_from(piece.len()).unwrap()]);
                out.extend(piece);
            }
        }
        out.push(option::END);
        out
    }

    const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 5);

    #[test]
    fn a_query_says_who_asks_for_what_and_is_as_long_as_bootp_was() {
        let query = Query {
            kind: Kind::Request,
            xid: 0x0102_0304,
            seconds: 3,
            own: Ipv4Addr::UNSPECIFIED,
            mac: [2, 0, 0, 0, 0, 5],
            client_id: &[0, 1, 2],
            host_name: "trainer-0",
            wanted: Some(ADDRESS),
            server: Some(Ipv4Addr::new(10, 9, 0, 1)),
        };
        let bytes = query.encode();
        assert_eq!(bytes.len(), SIZE_MIN);
        assert_eq!(bytes[..10], [1, 1, 6, 0, 1, 2, 3, 4, 0, 3]);
        let mut options = BTreeMap::new();
        read_options(&bytes[HEAD..], &mut options).unwrap();
        assert_eq!(options[&option::KIND], [3]);
        assert_eq!(options[&option::WANTED], [10, 9, 0, 5]);
        assert_eq!(options[&option::SERVER], [10, 9, 0, 1]);
        assert_eq!(options[&option::CLIENT], [0, 1, 2]);
        assert_eq!(options[&option::HOST_NAME], b"trainer-0");
        assert_eq!(options[&option::ASKED][0], option::CLASSLESS_ROUTES);
        // A server that gets more than it needs to know the lease by would look for another one.
        let release = Query { kind: Kind::Release, wanted: None, own: ADDRESS, ..query };
        let mut options = BTreeMap::new();
        read_options(&release.encode()[HEAD..], &mut options).unwrap();
        assert_eq!(options.keys().copied().collect::<Vec<_>>(), [option::KIND, option::SERVER, option::CLIENT]);
        assert_eq!(release.encode()[12..16], [10, 9, 0, 5]);
    }

    #[test]
    fn a_long_pod_name_is_cut_where_a_host_name_may_end() {
        assert_eq!(host_name("trainer-0"), "trainer-0");
        assert_eq!(host_name(&format!("{}-x", "a".repeat(62))), "a".repeat(62));
        assert_eq!(host_name(""), "");
    }

    #[test]
    fn options_go_on_in_the_fields_that_are_not_used() {
        let mut bytes = reply(Kind::Ack, ADDRESS, &[(option::OVERLOAD, &[3]), (option::ROUTER, &[10, 9])]);
        bytes[108..113].copy_from_slice(&[option::ROUTER, 2, 0, 1, option::END]);
        bytes[44..49].copy_from_slice(&[option::MTU, 2, 5, 220, option::END]);
        let parsed = Reply::parse(&bytes).unwrap();
        assert_eq!(parsed.option(option::ROUTER), Some(&[10, 9, 0, 1][..]));
        assert_eq!(parsed.option(option::MTU), Some(&[5, 220][..]));
        assert_eq!((parsed.xid, parsed.address, parsed.kind()), (7, ADDRESS, Some(Kind::Ack)));
    }

    #[test]
    fn what_is_no_answer_is_refused() {
        let good = reply(Kind::Offer, ADDRESS, &[]);
        assert!(Reply::parse(&good).is_ok());
        assert!(Reply::parse(&good[..HEAD - 1]).is_err());
        for (at, value) in [(0, 1), (1, 32), (2, 20), (236, 0)] {
            let mut bad = good.clone();
            bad[at] = value;
            assert!(Reply::parse(&bad).is_err(), "byte {at}");
        }
        let mut short = good[..HEAD].to_vec();
        short.extend([option::MTU, 9, 0]);
        assert_eq!(Reply::parse(&short), Err("an option is longer than the message"));
        short.truncate(HEAD + 1);
        assert_eq!(Reply::parse(&short), Err("its last option has no length"));
        // Something that clients say.
        assert_eq!(Reply::parse(&reply(Kind::Discover, ADDRESS, &[])).unwrap().kind(), None);
    }

    #[test]
    fn a_servers_text_is_short_and_tame() {
        let text = [b"no\x1b[2Jsuch lease" as &[u8], &[b'x'; 200]].concat();
        let parsed = Reply::parse(&reply(Kind::Nak, ADDRESS, &[(option::TEXT, &text)])).unwrap();
        let text = parsed.text().unwrap();
        assert!(text.starts_with("no[2Jsuch lease") && text.len() == 120, "{text}");
    }
}
