//! The end of a sandbox comes while RDMA devices and links are on their way into it, at many moments.

use std::thread;
use std::time::Duration;

use dranic::attach::AttachError;
use dranic::netdev::link;
use dranic::netlink::RouteSocket;

use super::common::{claim, pod_ref, sandbox};
use super::machine;
use super::pci::soon;
use super::rig::{self, names, published};

/// Cuts, and how far they are apart: together longer than the moves of two links and two RDMA devices. Setting the links up follows.
const CUTS: u32 = 20;
const STEP: Duration = Duration::from_millis(7);

#[test]
fn an_attach_that_is_cut_short_leaves_nothing_in_the_pod() {
    let Some((guest, nics, before)) = machine::<2>() else { return };
    let engine = rig::engine(&guest);
    let one = claim("a", &[published("rx0"), published("rx1")], "");
    engine.prepare(&one, &pod_ref("a")).unwrap();
    let uid = pod_ref("a").uid;
    let (mut cut_short, mut on_the_way) = (0, 0);
    for after in (0..CUTS).map(|cut| STEP * cut) {
        let name = format!("cut{}", after.as_millis());
        let (pod, id) = (guest.pod(&name), sandbox(&name));
        let attached = thread::scope(|scope| {
            let work = scope.spawn(|| engine.attach(&uid, &id, pod.path(), soon()));
            thread::sleep(after);
            let _ = engine.release(&uid, &id);
            work.join().unwrap()
        });
        println!("cut after {} ms: {attached:?}", after.as_millis());
        cut_short += u32::from(attached.is_err());
        on_the_way += u32::from(matches!(attached, Err(AttachError::Stopped { done: 1.., .. })));
        let netns = pod.netns().unwrap();
        assert_eq!((names(&guest.host), names(&netns)), (vec!["rx0".to_owned(), "rx1".to_owned()], vec![]));
        assert_eq!(link::list(&mut RouteSocket::open_in(&netns).unwrap(), soon()).unwrap().len(), 1, "only lo");
    }
    assert!(cut_short >= CUTS / 2 && on_the_way > 0, "{cut_short} were cut short, {on_the_way} with something in the pod");
    engine.unprepare(&one.claim).unwrap();
    nics.iter().zip(&before).for_each(|(nic, before)| guest.assert_same(before, nic));
}
