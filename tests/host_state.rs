//! Host state on a real kernel: what is recorded, given back and compared.

#[path = "host_state/support.rs"]
mod support;

use dranic::netdev::host_state::compare;
use dranic_testbed::fabric::{new_netns, with_scratch_netns};
use support::{Host, can_run, ip};

#[test]
fn down_and_back() {
    if !can_run() {
        return;
    }
    with_scratch_netns(|_| {
        let mut host = Host::rich();
        let before = host.state();
        println!("{}", serde_json::to_string_pretty(&before).unwrap());
        assert_eq!(compare(&before, &host.state()), [], "two looks at the same");
        ip("link set nic0.7 down");
        let differences = compare(&before, &host.state());
        assert!(differences.len() > 10, "{differences:#?}");
        let started = std::time::Instant::now();
        let report = host.restore_fully(&before);
        println!("{report:#?} in {:?}", started.elapsed());
        assert_eq!(report.respected, [""; 0]);
    });
}

#[test]
fn to_a_pod_and_back() {
    if !can_run() {
        return;
    }
    with_scratch_netns(|_| {
        let mut host = Host::rich();
        let before = host.state();
        let pod = new_netns().unwrap();
        host.lend(&pod);
        println!("{:#?}", compare(&before, &host.state()));
        let report = host.restore_fully(&before);
        println!("{report:#?}");
        assert_eq!(report.respected, [""; 0]);
    });
}
