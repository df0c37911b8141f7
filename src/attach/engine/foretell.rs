//! Whether an attach fits into the time there is, before a device is touched; and learning from it afterwards.

use std::time::Duration;

use super::Engine;
use super::attach::{AttachError, AttachTimes, Target};
use super::jobs::Job;
use crate::attach::forecast::{Done, Forecast, Kind};
use crate::ledger::{DeviceRecord, Phase, Share};
use crate::names::PodUid;

impl Engine {
    /// How long attaching what this pod lacks will take, by what such attaches took; none where that is not known. Looks at the ledger
    /// only.
    #[must_use]
    pub fn forecast(&self, pod: &PodUid) -> Option<Duration> {
        let records = self.ledger.by_pod(pod);
        let lacking = records.iter().flat_map(|r| &r.devices).filter(|d| d.phase != Phase::Attached && d.has_link());
        let kinds: Vec<Kind> = lacking.map(kind).collect();
        self.forecasts().predict(&kinds)
    }

    /// The forecast for these devices.
    ///
    /// # Errors
    /// When everything has to be done while the runtime waits, and it is longer than that.
    pub(super) fn foretell(&self, jobs: &[Job], target: &Target<'_>) -> Result<Option<Duration>, AttachError> {
        let kinds: Vec<Kind> = jobs.iter().map(Job::device).filter(|d| d.has_link()).map(kind).collect();
        let mut forecasts = self.forecasts();
        let forecast = forecasts.predict(&kinds);
        match (forecast, target.budget()) {
            (Some(needs), Some(left)) if needs > left => {
                forecasts.doubt(&kinds);
                Err(AttachError::NoTime { devices: jobs.len(), needs, left })
            }
            (forecast, _) => Ok(forecast),
        }
    }

    /// Remembers what an attach took; of one that failed the moves, or an attach that never fits would be tried for ever.
    pub(super) fn learn(&self, pod: &PodUid, times: &AttachTimes, is_done: bool) {
        let records = self.ledger.by_pod(pod);
        let device = |share: &Share| records.iter().flat_map(|r| &r.devices).find(|d| d.share() == *share);
        let moves: Vec<_> = times.moves.iter().filter_map(|(share, time)| Some((kind(device(share)?), *time))).collect();
        // Pauses, and waiting for others' moves, are not this attach's own.
        let rest = times.open + times.look + times.intent + times.verify + times.record;
        self.forecasts().learn(&Done { moves, inside: is_done.then_some((times.configure, rest)) });
    }

    fn forecasts(&self) -> std::sync::MutexGuard<'_, Forecast> {
        self.forecast.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

fn kind(device: &DeviceRecord) -> Kind {
    let kind = Kind::of(&device.attributes);
    match device.child() {
        None => kind,
        Some(child) => kind.below(child.kind()),
    }
}
