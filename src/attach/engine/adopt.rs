//! IPoIB links of RDMA devices that move. The kernel ends such a link when its RDMA device leaves a namespace, and makes another one as
//! soon as that has come to the next: in the machine's first namespace, wherever the RDMA device is (Linux 6.12), or where the RDMA
//! device is (newer kernels). So the RDMA device goes first. The new link is known by what does not change (PCI function, port's GUID in its
//! address), gets what the old one had by itself, and is then moved as any other link, unless it is in the pod already.

use std::collections::BTreeSet;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::attach::{AttachError, AttachTimes, Target, kernel};
use super::home::{POLL, free_name};
use super::jobs::Job;
use super::{Engine, KernelError, locate, look_deadline};
use crate::attach::Step;
use crate::crash;
use crate::ledger::DeviceRecord;
use crate::netdev::{HostState, Link, host_state, link};
use crate::netlink::RouteSocket;

/// How long the new link is waited for. The kernel makes it within the request that moves the RDMA device.
const MADE: Duration = Duration::from_secs(2);

/// Where the kernel made the link anew.
enum Made {
    OnHost(Link),
    InPod(Link),
}

impl Engine {
    /// Moves the RDMA devices whose links are made anew, and finds the new links. Gives whether one is in the pod already, where its
    /// index is another than was recorded.
    pub(super) fn remake_all(
        &self,
        target: &Target<'_>,
        (host, inside): (&mut RouteSocket, &mut RouteSocket),
        jobs: &mut [Job],
        times: &mut AttachTimes,
    ) -> Result<bool, AttachError> {
        let mut any_inside = false;
        for position in (0..jobs.len()).filter(|position| locate::is_remade(jobs[*position].device())).collect::<Vec<_>>() {
            if let Some(why) = target.why_stop() {
                return Err(AttachError::Stopped { done: position, all: jobs.len(), why });
            }
            self.move_rdma_first(target, jobs, position, times)?;
            let job = &mut jobs[position];
            match find_new(job, host, inside)? {
                Made::OnHost(link) => {
                    be_like_old(job, host, &link, &job.device().host.of_link_only(), link.name.clone())?;
                    job.host_index = link.index;
                }
                Made::InPod(link) => {
                    let name = job.device().plan.pod_link.as_str().to_owned();
                    be_like_old(job, inside, &link, &in_pod_state(job.device()), name)?;
                    (job.index, job.inside, any_inside) = (link.index, true, true);
                }
            }
            crash::point("attach: link made anew");
        }
        Ok(any_inside)
    }

    /// Moves the RDMA device of the job at `position`, unless it is in the pod: another port's job may have moved it.
    fn move_rdma_first(
        &self,
        target: &Target<'_>,
        jobs: &mut [Job],
        position: usize,
        times: &mut AttachTimes,
    ) -> Result<(), AttachError> {
        let job = &jobs[position];
        let Some(index) = job.rdma.filter(|_| !job.rdma_inside) else { return Ok(()) };
        let lock = self.cards.of(&self.card(job.device()));
        let _one_at_a_time = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let start = Instant::now();
        let moved = self.move_rdma_in(target, &mut None, index);
        crash::point("attach: rdma moved");
        times.rdma.push((job.device().share(), start.elapsed()));
        moved.map_err(|error| job.failed(format!("moving RDMA device {} into the pod", job.rdma_name()), error.to_string()))?;
        jobs.iter_mut().filter(|job| job.rdma == Some(index)).for_each(|job| job.rdma_inside = true);
        Ok(())
    }

    /// Gives links that the kernel made anew on the host what the old ones had by themselves, their names first: it gives out `ib0`, `ib1`,
    /// … as they are free, so one may have another one's.
    pub(super) fn adopt_at_home(&self, devices: &[&DeviceRecord], there: &[Link]) {
        let found = new_at_home(devices, there);
        if found.is_empty() {
            return;
        }
        let adopted = self.host_socket().map(|mut host| {
            for (index, name) in aside(&found, there) {
                if let Err(error) = host.request(link::name_request(index, &name), look_deadline()) {
                    tracing::warn!(index, %error, "an IPoIB link that was made anew keeps its name");
                }
            }
            crash::point("release: links aside");
            for (device, link) in found {
                let report = host_state::restore_identity(&mut host, link.index, &device.host, look_deadline());
                for (what, why) in &report.failed {
                    tracing::warn!(device = %device.device, link = %device.host.name, what, why, "not restored of the new IPoIB link");
                }
            }
        });
        if let Err(error) = adopted {
            tracing::warn!(%error, "new IPoIB links could not be given their names");
        }
    }
}

/// Devices whose links were made anew on the host, each with its new link.
fn new_at_home<'a>(devices: &[&'a DeviceRecord], there: &'a [Link]) -> Vec<(&'a DeviceRecord, &'a Link)> {
    let remade = devices.iter().copied().filter(|device| locate::is_remade(device));
    remade.filter_map(|device| Some((device, locate::find(device, 0, there)?))).collect()
}

/// What has another name than it should, and the name that it gets for the moment.
fn aside(found: &[(&DeviceRecord, &Link)], there: &[Link]) -> Vec<(u32, String)> {
    let mut names: BTreeSet<String> = there.iter().flat_map(|link| link.alt_names.iter().chain([&link.name])).cloned().collect();
    let wrong = found.iter().filter(|(device, link)| link.name != device.host.name);
    wrong
        .map(|(_, link)| {
            let name = free_name(&names);
            names.insert(name.clone());
            (link.index, name)
        })
        .collect()
}

/// The link that the kernel made when the RDMA device came into the pod.
fn find_new(job: &Job, host: &mut RouteSocket, inside: &mut RouteSocket) -> Result<Made, AttachError> {
    let give_up = Instant::now() + MADE;
    let look = |socket: &mut RouteSocket| -> Result<Option<Link>, KernelError> {
        Ok(locate::find(job.device(), 0, &link::list(socket, look_deadline())?).cloned())
    };
    let looking = |error| kernel("looking for the IPoIB link that the kernel makes anew", error);
    loop {
        if let Some(link) = look(inside).map_err(looking)? {
            return Ok(Made::InPod(link));
        }
        if let Some(link) = look(host).map_err(looking)? {
            return Ok(Made::OnHost(link));
        }
        if Instant::now() >= give_up {
            let step = format!("looking for the IPoIB link of RDMA device {} after its move", job.rdma_name());
            return Err(job.failed(step, "the kernel made none; is ib_ipoib loaded?".to_owned()));
        }
        std::thread::sleep(POLL);
    }
}

/// What a link that is in the pod already shall be by itself: what it was on the host, but for what its move would have set.
fn in_pod_state(device: &DeviceRecord) -> HostState {
    let mut state = device.host.of_link_only();
    for step in &device.plan.steps {
        if let Step::Move { mtu, address, .. } = step {
            state.mtu = mtu.unwrap_or(state.mtu);
            state.address = address.clone().or(state.address);
        }
    }
    state
}

/// Gives the new link what the old one was by itself, and `name`.
fn be_like_old(job: &Job, socket: &mut RouteSocket, link: &Link, old: &HostState, name: String) -> Result<(), AttachError> {
    let state = HostState { name, ..old.clone() };
    let report = host_state::restore_identity(socket, link.index, &state, look_deadline());
    match report.failed.first() {
        None => Ok(()),
        Some((what, why)) => Err(job.failed(format!("setting {what} of its IPoIB link, which was made anew"), why.clone())),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A port of a function, as it was recorded: link `name`, and the last byte of its port's GUID.
    fn device(name: &str, guid: u8, mode: &str) -> DeviceRecord {
        let record = json!({
            "request": "r", "pool": "p", "device": format!("pci-{guid}"), "attributes": {}, "phase": "prepared",
            "sinceUnixMs": 0,
            "hardware": {"pci": {"address": "0000:08:00.0", "port": ""}},
            "host": {"index": 7, "name": name, "mtu": 2044, "address": address(1, guid), "flags": 1, "addresses": [], "routes": [],
                "rules": [], "neighbours": [], "sysctls": {}},
            "plan": {"podLink": "net1", "steps": [{"step": "move", "name": "net1", "mtu": 1500, "address": null}]},
            "rdma": {"name": "mlx5_0", "index": 1, "port": 1, "protocol": "InfiniBand", "mode": mode, "charDevices": [],
                "waitForPort": true},
        });
        serde_json::from_value(record).unwrap()
    }

    fn address(queue_pair: u8, guid: u8) -> String {
        format!("00:00:00:{queue_pair:02x}:fe:80:00:00:00:00:00:00:0c:42:a1:03:00:65:5f:{guid:02x}")
    }

    fn link(index: u32, name: &str, address: &str) -> Link {
        let parent = crate::netdev::link::ParentDevice { bus: "pci".to_owned(), name: "0000:08:00.0".to_owned() };
        Link {
            index,
            name: name.to_owned(),
            kind: Some("ipoib".to_owned()),
            address: Some(address.parse().unwrap()),
            parent_device: Some(parent),
            ..Link::default()
        }
    }

    #[test]
    fn only_what_moves_with_an_infiniband_port_is_made_anew() {
        assert!(locate::is_remade(&device("ib0", 1, "exclusive")));
        assert!(!locate::is_remade(&device("ib0", 1, "shared")));
        let mut ethernet = device("nic0", 1, "exclusive");
        ethernet.host.address = Some("02:00:00:00:00:01".parse().unwrap());
        assert!(!locate::is_remade(&ethernet));
    }

    #[test]
    fn ports_of_one_function_are_told_apart_by_their_gids() {
        let (one, two) = (device("ib1", 1, "exclusive"), device("ib0", 2, "exclusive"));
        // Other queue pairs, other indices, and the names the other way round.
        let there = [link(20, "ib0", &address(5, 1)), link(21, "ib1", &address(6, 2)), link(22, "eth0", "02:00:00:00:00:01")];
        let found = new_at_home(&[&one, &two], &there);
        assert_eq!(found.iter().map(|(_, link)| link.index).collect::<Vec<_>>(), [20, 21]);
        assert_eq!(aside(&found, &there), [(20, "dranic0".to_owned()), (21, "dranic1".to_owned())]);
        let right = [link(20, "ib1", &address(5, 1)), link(21, "dranic0", &address(6, 2))];
        assert_eq!(aside(&new_at_home(&[&one, &two], &right), &right), [(21, "dranic1".to_owned())]);
        assert_eq!(new_at_home(&[&device("ib0", 1, "shared")], &there), []);
        assert!(locate::find(&one, 22, &there[2..]).is_none(), "the Ethernet link of the function is another one");
    }

    #[test]
    fn in_the_pod_it_has_what_its_move_would_have_set() {
        let state = in_pod_state(&device("ib0", 1, "exclusive"));
        assert_eq!((state.mtu, state.index), (1500, 7));
    }
}
