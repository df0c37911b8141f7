//! The body of a watch.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use futures_util::stream;
use serde_json::{Value, json};
use tokio::sync::watch::Receiver;

use super::Shared;
use super::claims::to_text;
use super::store::{fits, kind_of};

/// How often a watch that asks for them gets a bookmark, where nothing else is said.
pub(super) const BOOKMARK: Duration = Duration::from_secs(5);

/// What a watch wants.
pub(super) struct Wish {
    pub(super) resource: &'static str,
    pub(super) namespace: Option<String>,
    pub(super) selector: Vec<(String, String)>,
    pub(super) from: u64,
    pub(super) bookmarks: bool,
    pub(super) lasts: Duration,
}

struct Watch {
    shared: Arc<Shared>,
    wish: Wish,
    dropped: u64,
    news: Receiver<()>,
    end: Instant,
    bookmark: Instant,
    over: bool,
}

pub(super) fn body(shared: Arc<Shared>, wish: Wish) -> Body {
    let (dropped, news) = {
        let store = shared.store();
        (store.dropped, store.news.subscribe())
    };
    let now = Instant::now();
    let bookmark = now + shared.bookmark_every();
    let end = now + wish.lasts;
    let watch = Watch { shared, wish, dropped, news, end, bookmark, over: false };
    Body::from_stream(stream::unfold(watch, |mut watch| async move {
        let line = watch.next().await?;
        Some((Ok::<Bytes, std::io::Error>(Bytes::from(line)), watch))
    }))
}

impl Watch {
    async fn next(&mut self) -> Option<String> {
        loop {
            if self.over || Instant::now() >= self.end {
                return None;
            }
            self.news.borrow_and_update();
            match self.look() {
                Look::Line(line) => return Some(line),
                Look::End => return None,
                Look::Nothing => {}
            }
            let until = if self.wish.bookmarks { self.end.min(self.bookmark) } else { self.end };
            let _ = tokio::time::timeout_at(until.into(), self.news.changed()).await;
        }
    }

    fn look(&mut self) -> Look {
        let store = self.shared.store();
        if store.dropped != self.dropped {
            return Look::End;
        }
        if self.wish.from < store.compacted {
            self.over = true;
            let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": 410,
                "reason": "Expired", "message": format!("too old resource version: {} ({})", self.wish.from, store.compacted)});
            return Look::Line(line("ERROR", &status));
        }
        let start = store.history.partition_point(|h| h.version <= self.wish.from);
        for happened in &store.history[start..] {
            self.wish.from = happened.version;
            let namespace = &happened.object["metadata"]["namespace"];
            let inside = self.wish.namespace.as_ref().is_none_or(|n| namespace == n);
            if happened.resource == self.wish.resource && inside && fits(&happened.object, &self.wish.selector) {
                return Look::Line(line(happened.what, &happened.object));
            }
        }
        if self.wish.bookmarks && Instant::now() >= self.bookmark {
            self.bookmark = Instant::now() + self.shared.bookmark_every();
            let (version, kind) = kind_of(self.wish.resource);
            let mark = json!({"apiVersion": version, "kind": kind, "metadata": {"resourceVersion": store.version.to_string()}});
            return Look::Line(line("BOOKMARK", &mark));
        }
        Look::Nothing
    }
}

enum Look {
    Line(String),
    End,
    Nothing,
}

fn line(what: &str, object: &Value) -> String {
    format!("{{\"type\":{what:?},\"object\":{}}}\n", to_text(object))
}
