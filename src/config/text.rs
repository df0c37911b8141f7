//! Addresses and prefixes as text, with faults that show how to write them.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, de::Error};

/// What texts look like, for the schema: whatever the decoders below take fits, and not all that fits is taken.
pub(super) const IP: &str = "^[0-9a-fA-F:.]+$";
/// As [`IP`], with the length of the prefix.
pub(super) const PREFIX: &str = "^[0-9a-fA-F:.]+/[0-9]{1,3}$";
/// Six to 32 bytes.
pub(super) const LINK_ADDRESS: &str = "^[0-9a-fA-F]{2}([:-][0-9a-fA-F]{2}){5,31}$";

/// 16 hex digits, in one piece, in four or in eight.
pub(super) const GUID: &str = "^([0-9a-fA-F]{16}|[0-9a-fA-F]{4}(:[0-9a-fA-F]{4}){3}|[0-9a-fA-F]{2}(:[0-9a-fA-F]{2}){7})$";

fn read<'de, D: Deserializer<'de>, T: FromStr>(decoder: D, wanted: impl Display) -> Result<T, D::Error> {
    let text = String::deserialize(decoder)?;
    text.parse().map_err(|_| {
        let short: String = text.chars().take(64).collect();
        D::Error::custom(format!("{short:?} is not {wanted}"))
    })
}

#[derive(Deserialize)]
struct Prefix(#[serde(deserialize_with = "read_prefix")] IpNet);

#[derive(Deserialize)]
struct Interface(#[serde(deserialize_with = "read_interface")] IpNet);

#[derive(Deserialize)]
struct Ip(#[serde(deserialize_with = "read_ip")] IpAddr);

fn read_prefix<'de, D: Deserializer<'de>>(decoder: D) -> Result<IpNet, D::Error> {
    read(decoder, "a prefix (write 10.0.0.0/8, fd00::/64, or 0.0.0.0/0 for a default route)")
}

fn read_interface<'de, D: Deserializer<'de>>(decoder: D) -> Result<IpNet, D::Error> {
    read(decoder, "an address with its prefix length (write 10.0.0.5/24 or fd00::5/64)")
}

fn read_ip<'de, D: Deserializer<'de>>(decoder: D) -> Result<IpAddr, D::Error> {
    read(decoder, "an IP address (write 10.0.0.1 or fd00::1)")
}

pub(super) fn prefix<'de, D: Deserializer<'de>>(decoder: D) -> Result<Option<IpNet>, D::Error> {
    Ok(Option::<Prefix>::deserialize(decoder)?.map(|p| p.0))
}

pub(super) fn ip<'de, D: Deserializer<'de>>(decoder: D) -> Result<Option<IpAddr>, D::Error> {
    Ok(Option::<Ip>::deserialize(decoder)?.map(|ip| ip.0))
}

pub(super) fn interfaces<'de, D: Deserializer<'de>>(decoder: D) -> Result<Option<Vec<IpNet>>, D::Error> {
    Ok(Option::<Vec<Interface>>::deserialize(decoder)?.map(|list| list.into_iter().map(|i| i.0).collect()))
}

/// A sysctl's value: text, or a number as people write it.
#[derive(Deserialize, JsonSchema)]
#[serde(untagged, expecting = "must be text or a whole number")]
pub(super) enum Value {
    Text(String),
    Number(i64),
}

pub(super) fn values<'de, D: Deserializer<'de>>(decoder: D) -> Result<Option<BTreeMap<String, String>>, D::Error> {
    let text = |value| match value {
        Value::Text(text) => text,
        Value::Number(number) => number.to_string(),
    };
    let map = Option::<BTreeMap<String, Value>>::deserialize(decoder)?;
    Ok(map.map(|map| map.into_iter().map(|(key, value)| (key, text(value))).collect()))
}
