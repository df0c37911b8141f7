//! What goes between a runtime and a plugin, read on the way: mux frames, the ttrpc messages in them, and the few fields of NRI's
//! requests that tell which pod is meant. With a decoder of its own, since the agent's is what is measured.

use std::collections::HashMap;

/// Connection id and length before each frame's payload.
pub(super) const FRAME_HEADER: usize = 8;
/// Length, stream, type and flags before each message's data.
const MESSAGE_HEADER: usize = 10;
/// Longest payload of a frame that NRI's library accepts (4 MiB and a message's header).
pub(super) const FRAME_MAX: usize = (4 << 20) + MESSAGE_HEADER;

/// Connection id and length of payload.
pub(super) fn frame(header: [u8; FRAME_HEADER]) -> (u32, usize) {
    let [a, b, c, d, e, f, g, h] = header;
    (u32::from_be_bytes([a, b, c, d]), u32::from_be_bytes([e, f, g, h]) as usize)
}

/// What belongs together: a request and its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct CallId {
    /// 1: the runtime asks, 2: the plugin does.
    pub(super) connection: u32,
    stream: u32,
}

/// One ttrpc message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Message {
    Request(CallId, Request),
    /// With the error that it carries.
    Answer(CallId, Option<String>),
}

/// Of a request, what scenarios ask for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Request {
    /// Runtimes of before NRI 0.12 send pods' events as `StateChange`; here they have the names of the events.
    pub(super) method: String,
    /// `namespace/name`.
    pub(super) pod: String,
    pub(super) sandbox: String,
    /// Name of the container, or of the plugin that registers.
    pub(super) name: String,
}

/// The messages of one direction, put together from frames.
#[derive(Debug, Default)]
pub(super) struct Messages(HashMap<u32, Vec<u8>>);

impl Messages {
    /// Messages that the frame completes.
    pub(super) fn add(&mut self, connection: u32, payload: &[u8]) -> Vec<Message> {
        let rest = self.0.entry(connection).or_default();
        rest.extend_from_slice(payload);
        let mut found = Vec::new();
        while let Some((message, length)) = first(connection, rest) {
            rest.drain(..length);
            found.extend(message);
        }
        found
    }
}

/// The first message of `bytes` and its length with header. A message of another kind than request and answer is stepped over.
fn first(connection: u32, bytes: &[u8]) -> Option<(Option<Message>, usize)> {
    let (header, rest) = bytes.split_first_chunk::<MESSAGE_HEADER>()?;
    let [a, b, c, d, e, f, g, h, kind, _flags] = *header;
    let length = u32::from_be_bytes([a, b, c, d]) as usize;
    let data = rest.get(..length)?;
    let id = CallId { connection, stream: u32::from_be_bytes([e, f, g, h]) };
    let message = match kind {
        1 => Some(Message::Request(id, request(data))),
        2 => Some(Message::Answer(id, error(data))),
        _ => None,
    };
    Some((message, MESSAGE_HEADER + length))
}

fn request(data: &[u8]) -> Request {
    let mut request = Request { method: text(data, 2), ..Request::default() };
    let payload = bytes(data, 3).unwrap_or_default();
    let [pod, container] = match request.method.as_str() {
        "RegisterPlugin" => {
            request.name = format!("{}-{}", text(payload, 2), text(payload, 1));
            return request;
        }
        "Configure" | "Synchronize" | "UpdateContainers" => return request,
        "StateChange" => {
            let event = Fields(payload).find_map(|(field, value)| value.number().filter(|_| field == 1));
            if let Some(event) = event.and_then(event_name) {
                event.clone_into(&mut request.method);
            }
            [2, 3]
        }
        _ => [1, 2],
    };
    let pod = bytes(payload, pod).unwrap_or_default();
    request.sandbox = text(pod, 1);
    request.pod = format!("{}/{}", text(pod, 4), text(pod, 2));
    request.name = bytes(payload, container).map(|container| text(container, 3)).unwrap_or_default();
    request
}

/// The method that newer runtimes have for the event.
fn event_name(number: u64) -> Option<&'static str> {
    match number {
        1 => Some("RunPodSandbox"),
        2 => Some("StopPodSandbox"),
        3 => Some("RemovePodSandbox"),
        _ => None,
    }
}

/// An answer's status, unless it is that all went well.
fn error(data: &[u8]) -> Option<String> {
    let status = bytes(data, 1)?;
    let code = Fields(status).find_map(|(field, value)| value.number().filter(|_| field == 1)).unwrap_or(0);
    (code != 0).then(|| format!("code {code}: {}", text(status, 2)))
}

fn bytes(message: &[u8], wanted: u64) -> Option<&[u8]> {
    Fields(message).find_map(|(field, value)| value.bytes().filter(|_| field == wanted))
}

fn text(message: &[u8], wanted: u64) -> String {
    bytes(message, wanted).map(|text| String::from_utf8_lossy(text).into_owned()).unwrap_or_default()
}

#[derive(Debug, Clone, Copy)]
enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

impl<'a> Value<'a> {
    fn number(self) -> Option<u64> {
        match self {
            Self::Number(number) => Some(number),
            Self::Bytes(_) => None,
        }
    }

    fn bytes(self) -> Option<&'a [u8]> {
        match self {
            Self::Bytes(bytes) => Some(bytes),
            Self::Number(_) => None,
        }
    }
}

/// Fields of a protobuf message, up to the first that makes no sense: a ruler does not judge.
#[derive(Debug, Clone, Copy)]
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn take(&mut self, length: u64) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(usize::try_from(length).ok()?)?;
        self.0 = rest;
        Some(taken)
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = (u64, Value<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        let key = self.varint()?;
        let value = match key & 7 {
            0 => Value::Number(self.varint()?),
            1 => Value::Bytes(self.take(8)?),
            2 => {
                let length = self.varint()?;
                Value::Bytes(self.take(length)?)
            }
            5 => Value::Bytes(self.take(4)?),
            _ => return None,
        };
        Some((key >> 3, value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A field of bytes, or of a message.
    fn field(number: u8, value: &[u8]) -> Vec<u8> {
        [&[number << 3 | 2, u8::try_from(value.len()).unwrap()], value].concat()
    }

    fn message(stream: u8, kind: u8, data: &[u8]) -> Vec<u8> {
        [&[0, 0, 0, u8::try_from(data.len()).unwrap(), 0, 0, 0, stream, kind, 0], data].concat()
    }

    fn call(stream: u32) -> CallId {
        CallId { connection: 1, stream }
    }

    fn pod() -> Vec<u8> {
        [field(1, b"sandbox"), field(2, b"name"), field(3, b"uid"), field(4, b"space")].concat()
    }

    #[test]
    fn a_request_is_read_however_it_is_cut() {
        let payload = [field(1, &pod()), field(2, &field(3, b"main"))].concat();
        let data = [field(1, b"service"), field(2, b"CreateContainer"), field(3, &payload), vec![4 << 3, 0x80, 1]].concat();
        let bytes = [message(1, 1, &data), message(3, 1, &data)].concat();
        let request = Request {
            method: "CreateContainer".to_owned(),
            pod: "space/name".to_owned(),
            sandbox: "sandbox".to_owned(),
            name: "main".to_owned(),
        };
        let both = [Message::Request(call(1), request.clone()), Message::Request(call(3), request)];
        for cut in 1..=bytes.len() {
            let mut messages = Messages::default();
            let found: Vec<_> = bytes.chunks(cut).flat_map(|part| messages.add(1, part)).collect();
            assert_eq!(found, both, "cut every {cut} bytes");
        }
    }

    #[test]
    fn connections_are_kept_apart() {
        let bytes = message(1, 2, &[]);
        let mut messages = Messages::default();
        assert!(messages.add(1, &bytes[..5]).is_empty());
        assert_eq!(messages.add(2, &bytes), [Message::Answer(CallId { connection: 2, stream: 1 }, None)]);
        assert_eq!(messages.add(1, &bytes[5..]), [Message::Answer(call(1), None)]);
    }

    #[test]
    fn an_event_of_an_old_runtime_has_the_name_of_the_request() {
        let payload = [vec![1 << 3, 1], field(2, &pod())].concat();
        let read = request(&[field(2, b"StateChange"), field(3, &payload)].concat());
        assert_eq!((read.method.as_str(), read.pod.as_str()), ("RunPodSandbox", "space/name"));
    }

    #[test]
    fn a_plugin_is_called_by_index_and_name() {
        let payload = [field(1, b"dranic"), field(2, b"10")].concat();
        assert_eq!(request(&[field(2, b"RegisterPlugin"), field(3, &payload)].concat()).name, "10-dranic");
    }

    #[test]
    fn only_a_code_is_an_error() {
        assert_eq!(error(&field(1, &[1 << 3, 0])), None);
        let status = [vec![1 << 3, 13], field(2, b"boom")].concat();
        assert_eq!(error(&field(1, &status)).as_deref(), Some("code 13: boom"));
    }

    #[test]
    fn nonsense_ends_quietly() {
        for bytes in [&[0xff_u8; 20][..], &[0x0a, 0x7f], &[0x0b], &[]] {
            assert_eq!(request(bytes), Request { pod: "/".to_owned(), ..Request::default() });
        }
    }
}
