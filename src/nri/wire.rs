//! From NRI's messages to the types of the hooks, and a look at the pod's UID that stores nothing.
//!
//! Most requests are about pods that have nothing to do with us; all other pods of the node wait meanwhile. So the UID is read
//! straight from the encoded bytes, and only requests about our pods are decoded.

use prost::Message;

use super::{Adjustment, Container, OciHook, Sandbox, proto};

/// Field number of `pod` in the requests.
pub(super) const POD_IN_REQUEST: u32 = 1;
/// Field number of `pod` in `StateChangeEvent`.
pub(super) const POD_IN_STATE_CHANGE: u32 = 2;
const EVENT_IN_STATE_CHANGE: u32 = 1;
const UID_IN_POD: u32 = 3;
const CONTAINER_IN_REQUEST: u32 = 2;
const ENV_IN_CONTAINER: u32 = 8;

/// Bytes that are no valid message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the request is no valid protobuf message")]
pub(super) struct Malformed;

/// The value of one field, not interpreted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Value<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
    Fixed,
}

/// The fields of an encoded message, in the order of the wire.
#[derive(Debug, Clone, Copy)]
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn next(&mut self) -> Result<Option<(u32, Value<'a>)>, Malformed> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let key = u32::try_from(self.varint()?).map_err(|_| Malformed)?;
        let value = match key & 7 {
            0 => Value::Varint(self.varint()?),
            1 => self.take(8).map(|_| Value::Fixed)?,
            2 => {
                let length = usize::try_from(self.varint()?).map_err(|_| Malformed)?;
                Value::Bytes(self.take(length)?)
            }
            5 => self.take(4).map(|_| Value::Fixed)?,
            // Groups: proto3 has none.
            _ => return Err(Malformed),
        };
        match key >> 3 {
            0 => Err(Malformed),
            number => Ok(Some((number, value))),
        }
    }

    fn varint(&mut self) -> Result<u64, Malformed> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.take(1)?[0];
            if shift == 63 && byte > 1 {
                return Err(Malformed);
            }
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(Malformed)
    }

    fn take(&mut self, size: usize) -> Result<&'a [u8], Malformed> {
        let (head, rest) = self.0.split_at_checked(size).ok_or(Malformed)?;
        self.0 = rest;
        Ok(head)
    }
}

/// Checks that the bytes are a sequence of fields.
pub(super) fn check(message: &[u8]) -> Result<(), Malformed> {
    let mut fields = Fields(message);
    while fields.next()?.is_some() {}
    Ok(())
}

/// The UID in the pod in field `pod` of a request; empty if there is none.
pub(super) fn pod_uid(message: &[u8], pod: u32) -> Result<&str, Malformed> {
    let (mut uid, mut fields) = ("", Fields(message));
    while let Some((number, value)) = fields.next()? {
        let Value::Bytes(bytes) = value else { continue };
        if number != pod {
            continue;
        }
        let mut inner = Fields(bytes);
        // A field that is there twice: the last one counts, as in every decoder.
        while let Some((number, value)) = inner.next()? {
            if let (UID_IN_POD, Value::Bytes(text)) = (number, value) {
                uid = std::str::from_utf8(text).map_err(|_| Malformed)?;
            }
        }
    }
    Ok(uid)
}

/// The environment variables (`NAME=value`) of the container in a `CreateContainerRequest` whose names begin with `mark`.
pub(super) fn variables<'a>(message: &'a [u8], mark: &str) -> Result<Vec<&'a str>, Malformed> {
    let (mut found, mut fields) = (Vec::new(), Fields(message));
    while let Some((number, value)) = fields.next()? {
        let (CONTAINER_IN_REQUEST, Value::Bytes(bytes)) = (number, value) else { continue };
        let mut inner = Fields(bytes);
        while let Some((number, value)) = inner.next()? {
            if let (ENV_IN_CONTAINER, Value::Bytes(text)) = (number, value)
                && text.starts_with(mark.as_bytes())
            {
                found.push(std::str::from_utf8(text).map_err(|_| Malformed)?);
            }
        }
    }
    Ok(found)
}

/// The event number of a `StateChangeEvent`.
pub(super) fn event(message: &[u8]) -> Result<i32, Malformed> {
    let (mut event, mut fields) = (0, Fields(message));
    while let Some((number, value)) = fields.next()? {
        if let (EVENT_IN_STATE_CHANGE, Value::Varint(value)) = (number, value) {
            // Enumerations are 32 bits; the upper half is sign extension.
            event = value as i32;
        }
    }
    Ok(event)
}

/// The answer to a hook, encoded. Nothing to change is the empty message, which is the answer to every other hook as well.
pub(super) fn answer(adjustment: Adjustment) -> Vec<u8> {
    let Adjustment { create_runtime, unified } = adjustment;
    if create_runtime.is_empty() && unified.is_empty() {
        return Vec::new();
    }
    let create_runtime: Vec<_> = create_runtime.into_iter().map(proto::Hook::from).collect();
    let hooks = (!create_runtime.is_empty()).then(|| proto::Hooks { create_runtime, ..proto::Hooks::default() });
    let resources = (!unified.is_empty()).then(|| proto::LinuxResources { unified: unified.into_iter().collect() });
    let linux = resources.map(|resources| proto::LinuxContainerAdjustment { devices: Vec::new(), resources: Some(resources) });
    let adjust = Some(proto::ContainerAdjustment { hooks, linux, ..proto::ContainerAdjustment::default() });
    proto::CreateContainerResponse { adjust }.encode_to_vec()
}

impl From<OciHook> for proto::Hook {
    fn from(hook: OciHook) -> Self {
        let timeout = Some(proto::OptionalInt { value: hook.timeout });
        Self { path: hook.path, args: hook.args, env: Vec::new(), timeout }
    }
}

impl From<proto::PodSandbox> for Sandbox {
    fn from(pod: proto::PodSandbox) -> Self {
        let namespaces = pod.linux.map(|linux| linux.namespaces).unwrap_or_default();
        let lost = namespaces.is_empty();
        let netns = namespaces.into_iter().find(|ns| ns.r#type == "network" && !ns.path.is_empty()).map(|ns| ns.path);
        Self { id: pod.id, name: pod.name, namespace: pod.namespace, uid: pod.uid, netns, lost, ips: pod.ips, pid: pod.pid }
    }
}

impl From<proto::Container> for Container {
    fn from(container: proto::Container) -> Self {
        Self {
            id: container.id,
            sandbox: container.pod_sandbox_id,
            name: container.name,
            env: container.env,
            cdi_devices: container.cdi_devices.into_iter().map(|device| device.name).collect(),
            create_runtime: container.hooks.into_iter().flat_map(|hooks| hooks.create_runtime).map(|hook| hook.path).collect(),
            state: container.state,
        }
    }
}

#[cfg(test)]
mod tests;
