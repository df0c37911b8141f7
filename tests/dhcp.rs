//! Addresses by DHCP against the real kernel and real servers: an engine over a scratch node, whose NICs' rails have a server.

#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/engine.rs"]
mod common;
#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/node.rs"]
mod node;

#[path = "dhcp/agent.rs"]
mod agent;
#[path = "dhcp/server.rs"]
mod server;

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use common::{World, claim, pod_ref, sandbox};
use dranic::attach::engine::{Observed, Tended};
use dranic::attach::{Engine, PrepareReason};
use dranic::dra::resolve::ResolvedClaim;
use dranic::ledger::{ClaimRecord, Durability};
use dranic::netdev::{Address, Route, link};
use dranic_testbed::fabric::PodNetns;
use server::{DISCOVER, Dnsmasq, Does, Double, RELEASE, REQUEST, wait};

const DHCP: &str = r#"{"interface": {"dhcp": true}}"#;
const LENT: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 50);
/// Routes by option 121: 10.77.0.0/16 by 10.9.0.7.
const ROUTE: &str = "10.77.0.0/16 via 10.9.0.7 metric 1024 proto 16 scope 0";
const ROUTES: [u8; 7] = [16, 10, 77, 10, 9, 0, 7];

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

/// A server that lends [`LENT`] for so long.
fn lend(seconds: u32) -> Does {
    Does::Lend(LENT, seconds, vec![(121, ROUTES.to_vec())])
}

/// T1 is over as soon as the lease is there.
fn lend_due(address: Ipv4Addr) -> Does {
    let second = 1u32.to_be_bytes().to_vec();
    Does::Lend(address, 600, vec![(121, ROUTES.to_vec()), (58, second), (59, 590u32.to_be_bytes().to_vec())])
}

struct Rig {
    world: World,
    engine: Engine,
    claim: ResolvedClaim,
    pod: PodNetns,
    told: std::sync::Arc<std::sync::Mutex<Vec<Observed>>>,
}

impl Rig {
    fn new(nics: u32) -> Option<Self> {
        let world = World::new(nics)?;
        let claim = claim("a", &world.device_names(), DHCP);
        let pod = world.pod("a");
        let engine = world.engine();
        Some(Self { world, engine, claim, pod, told: std::sync::Arc::default() }.observed())
    }

    fn observed(mut self) -> Self {
        let told = self.told.clone();
        self.engine = self.engine.with_observer(std::sync::Arc::new(move |o| told.lock().unwrap().push(o.what)));
        self.engine = self.engine.with_dhcp_timeout(Duration::from_secs(3));
        self
    }

    /// What was told of the lease since the last call.
    fn news(&self) -> Vec<String> {
        let all = std::mem::take(&mut *self.told.lock().unwrap());
        all.iter().filter(|o| matches!(o, Observed::Lease(..))).map(|o| format!("{o:?}")).collect()
    }

    fn prepare(&self) -> std::sync::Arc<ClaimRecord> {
        self.engine.prepare(&self.claim, &pod_ref("a")).unwrap_or_else(|error| panic!("{error}"))
    }

    fn attach(&self) {
        self.engine.attach(&pod_ref("a").uid, &sandbox("a"), self.pod.path(), soon()).unwrap_or_else(|error| panic!("{error}"));
    }

    fn tend(&self) -> Tended {
        self.engine.tend_lease(&self.claim.claim.uid, &self.claim.devices[0].device)
    }

    /// The IPv4 addresses of a NIC in the pod.
    fn addresses(&self, name: &str) -> Vec<Address> {
        let seen = self.world.pod_snapshot(&self.pod);
        let index = seen.links.iter().find(|l| l.name == name).unwrap().index;
        seen.addresses.into_iter().filter(|(i, a)| *i == index && a.ip.is_ipv4()).map(|(_, a)| a).collect()
    }

    /// The routes by DHCP in the pod.
    fn routes(&self) -> Vec<String> {
        let seen = self.world.pod_snapshot(&self.pod);
        let shown = |r: &Route| format!("{r}");
        let mut all: Vec<String> = seen.routes.iter().map(|(_, r)| r).filter(|r| r.protocol == 16).map(shown).collect();
        all.sort();
        all
    }

    fn unprepare(&self) {
        self.engine.unprepare(&self.claim.claim).unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn a_lease_of_dnsmasq_is_in_the_pod_renewed_and_given_back() {
    let Some(rig) = Rig::new(2) else { return };
    for rail in 0..2 {
        rig.world.fabric.add_address(rail, format!("10.9.{rail}.1/24").parse().unwrap()).unwrap();
    }
    let options = [
        "--dhcp-range=set:a,10.9.0.100,10.9.0.150,255.255.255.0,120s",
        "--dhcp-option=tag:a,121,10.20.30.0/24,10.9.0.7,10.9.50.0/24,0.0.0.0,0.0.0.0/0,10.9.0.9",
        "--dhcp-option=tag:a,option:mtu,1400",
        "--dhcp-range=set:b,10.9.1.100,10.9.1.150,255.255.255.0,120s",
        "--dhcp-option=tag:b,option:router,10.9.1.3",
        "--dhcp-option=tag:b,33,10.66.0.1,10.9.1.4",
    ];
    let Some(server) = Dnsmasq::start(&rig.world.fabric, &options) else { return };
    let before = rig.world.host_states();
    let record = rig.prepare();
    assert_eq!(server.leases().len(), 2, "{}", server.log());
    // One name for both: dnsmasq keeps it for one of them. The ids are not of hardware.
    let leases = server.leases();
    assert!(leases.iter().any(|l| l.contains(" a 00:")) && leases.iter().all(|l| l.contains(" 00:")), "{leases:?}");
    let leased: Vec<String> = record.devices.iter().map(|d| d.lease().unwrap().address.to_string()).collect();
    assert!(rig.world.links().iter().filter(|l| l.name.starts_with("nic")).all(|l| !l.is_up()));
    assert!(!rig.world.snapshot().addresses.iter().any(|(_, a)| leased.contains(&a.ip.to_string())), "not on the host");

    rig.attach();
    for (nic, mtu) in [("nic0", 1400), ("nic1", 9000)] {
        let [address] = &rig.addresses(nic)[..] else { panic!("{:?}", rig.addresses(nic)) };
        assert!(leased.contains(&address.ip.to_string()) && address.prefix_len == 24, "{address}");
        assert!(
            (100..=120).contains(&address.valid_lifetime) && address.preferred_lifetime == address.valid_lifetime,
            "{address}"
        );
        assert_eq!(rig.world.pod_links(&rig.pod).iter().find(|l| l.name == nic).unwrap().mtu, mtu);
    }
    let routes = rig.routes();
    for (start, wanted) in [
        "0.0.0.0/0 via 10.9.0.9",
        "0.0.0.0/0 via 10.9.1.3",
        "10.20.30.0/24 via 10.9.0.7",
        "10.66.0.1/32 via 10.9.1.4",
        "10.9.50.0/24 ",
    ]
    .iter()
    .enumerate()
    {
        // The two default routes have one key: the first device's is added.
        if start != 1 {
            assert!(routes.iter().any(|r| r.starts_with(wanted) && r.contains("metric 1024")), "{wanted}: {routes:?}");
        }
    }
    for device in &rig.claim.devices {
        assert_eq!(rig.engine.tend_lease(&rig.claim.claim.uid, &device.device), Tended::Renewed, "{}", server.log());
    }
    assert_eq!(rig.news(), Vec::<String>::new());

    let released = rig.engine.release(&pod_ref("a").uid, &sandbox("a"));
    assert_eq!((released.len(), server.leases().len()), (2, 2), "another sandbox of the pod has the same addresses");
    rig.unprepare();
    wait("both leases are given back", || server.leases().is_empty());
    rig.world.assert_unchanged(&before);
}

#[test]
fn a_renewal_comes_from_inside_the_pod_and_says_what_it_should() {
    let Some(rig) = Rig::new(1) else { return };
    let server = Double::start(&rig.world.fabric, lend_due(LENT));
    rig.prepare();
    rig.attach();
    let first = server.take();
    assert!(first.iter().all(|heard| heard.from.is_unspecified() && heard.own.is_unspecified()), "{first:?}");
    assert_eq!(first[0].option(12), Some(&b"a"[..]));
    std::thread::sleep(Duration::from_millis(1100));
    // At another end than the one it has by now.
    server.now_does(Does::Lend(LENT, 1200, vec![(121, ROUTES.to_vec())]));
    assert_eq!(rig.tend(), Tended::Renewed);
    let [heard] = &server.take()[..] else { panic!() };
    assert_eq!((heard.kind, heard.from, heard.own), (REQUEST, LENT, LENT), "to its server alone");
    assert_eq!((heard.option(50), heard.option(54)), (None, None));
    assert_eq!(heard.option(61), first[0].option(61));
    assert!(rig.addresses("nic0")[0].valid_lifetime > 1100, "{:?}", rig.addresses("nic0"));
    assert_eq!(rig.engine.leases()[0].lease.lease_seconds, 1200);
}

#[test]
fn when_its_server_is_silent_any_other_is_asked() {
    let Some(rig) = Rig::new(1) else { return };
    let second = 1u32.to_be_bytes().to_vec();
    let server = Double::start(&rig.world.fabric, Does::Lend(LENT, 600, vec![(58, second.clone()), (59, second)]));
    rig.prepare();
    rig.attach();
    server.take();
    std::thread::sleep(Duration::from_millis(1100));
    server.now_does(lend(600));
    assert_eq!(rig.tend(), Tended::Renewed);
    // It came from the packet socket: the double can't tell a broadcast, but the kernel would not send from a UDP socket so.
    let [heard] = &server.take()[..] else { panic!() };
    assert_eq!((heard.kind, heard.from, heard.own), (REQUEST, LENT, LENT));
}

#[test]
fn a_new_agent_goes_on_with_the_lease() {
    let Some(mut rig) = Rig::new(1) else { return };
    let server = Double::start(&rig.world.fabric, lend_due(LENT));
    let record = rig.prepare();
    rig.attach();
    drop(rig.engine);
    server.take();
    rig.engine = rig.world.engine();
    rig.engine.recover();
    assert_eq!(rig.engine.leases()[0].lease, *record.devices[0].lease().unwrap());
    assert_eq!(rig.tend(), Tended::Renewed);
    // The kubelet asks again after a restart: nobody is asked for another lease.
    rig.prepare();
    assert!(server.take().iter().all(|heard| heard.kind == REQUEST));
    rig.unprepare();
    wait("it is given back", || server.take().iter().any(|heard| heard.kind == RELEASE && heard.own == LENT));
}

#[test]
fn a_refused_lease_leaves_the_pod_and_the_next_one_takes_its_place() {
    let Some(rig) = Rig::new(1) else { return };
    let server = Double::start(&rig.world.fabric, lend_due(LENT));
    rig.prepare();
    rig.attach();
    assert_eq!(rig.routes(), [ROUTE]);
    server.now_does(Does::Refuse);
    let Tended::Failed(why) = rig.tend() else { panic!("it was refused") };
    assert!(why.contains("refused to renew 10.9.0.50") && why.contains("not here"), "{why}");
    assert_eq!(rig.addresses("nic0"), []);
    assert!(rig.engine.leases()[0].lost);
    let news = rig.news();
    assert!(news.len() == 1 && news[0].contains("Lost"), "{news:?}");

    let other = Ipv4Addr::new(10, 9, 0, 60);
    server.now_does(lend_due(other));
    assert_eq!(rig.tend(), Tended::Renewed);
    assert_eq!(rig.addresses("nic0").iter().map(|a| a.ip.to_string()).collect::<Vec<_>>(), ["10.9.0.60"]);
    assert_eq!(rig.routes(), [ROUTE]);
    let news = rig.news();
    assert!(news.len() == 1 && news[0].contains("10.9.0.60 instead of 10.9.0.50"), "{news:?}");

    // A sandbox that comes after it has the new address.
    let _ = rig.engine.release(&pod_ref("a").uid, &sandbox("a"));
    let pod = rig.world.pod("b");
    rig.engine.attach(&pod_ref("a").uid, &sandbox("b"), pod.path(), soon()).unwrap();
    let addresses = rig.world.pod_addresses(&pod);
    assert!(addresses.contains(&"10.9.0.60/24".to_owned()) && !addresses.contains(&"10.9.0.50/24".to_owned()), "{addresses:?}");
}

#[test]
fn a_lease_that_nobody_renews_ends_by_itself_and_comes_back() {
    let Some(rig) = Rig::new(1) else { return };
    let server = Double::start(&rig.world.fabric, lend(3));
    rig.prepare();
    rig.attach();
    server.now_does(Does::Nothing);
    std::thread::sleep(Duration::from_secs(2));
    let Tended::Failed(why) = rig.tend() else { panic!("nobody was there") };
    assert!(why.contains("no DHCP server answered"), "{why}");
    wait("the kernel takes the address away", || rig.addresses("nic0").is_empty());
    let Tended::Failed(why) = rig.tend() else { panic!("nobody was there") };
    assert!(why.contains("10.9.0.50 is over"), "{why}");
    let news = rig.news();
    assert!(news.len() == 1 && news[0].contains("Lost"), "{news:?}");
    server.take();
    server.now_does(lend(600));
    assert_eq!(rig.tend(), Tended::Renewed);
    let heard = server.take();
    assert_eq!(heard[0].option(50), Some(&LENT.octets()[..]), "it asks for what it had");
    assert_eq!(rig.addresses("nic0")[0].ip, LENT);
    assert_eq!(rig.routes(), [ROUTE]);
    let news = rig.news();
    assert!(news.len() == 1 && news[0].contains("Back"), "{news:?}");
}

#[test]
fn a_lease_is_kept_while_its_device_waits_on_the_host() {
    let Some(rig) = Rig::new(1) else { return };
    let server = Double::start(&rig.world.fabric, lend_due(LENT));
    rig.prepare();
    server.take();
    assert_eq!(rig.tend(), Tended::Renewed);
    assert_eq!(server.take().iter().map(|heard| heard.kind).collect::<Vec<_>>(), [REQUEST]);
    assert!(!rig.world.links().iter().find(|l| l.name == "nic0").unwrap().is_up());
    assert!(!rig.world.snapshot().addresses.iter().any(|(_, a)| a.ip == LENT));
    rig.attach();
    assert_eq!(rig.addresses("nic0")[0].ip, LENT);
}

/// Prepares, which must fail in time, and leave nothing.
fn refused(rig: &Rig, texts: &[&str]) {
    let before = rig.world.host_states();
    let begin = Instant::now();
    let error = rig.engine.prepare(&rig.claim, &pod_ref("a")).unwrap_err();
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    assert!(matches!(*error.reason, PrepareReason::NoLease { .. }), "{error}");
    let text = error.to_string();
    for wanted in texts.iter().chain(&["(nic0): ", "interface.addresses", "--dhcp-timeout"]) {
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
    assert!(rig.engine.records().is_empty());
    rig.world.assert_unchanged(&before);
}

#[test]
fn without_a_server_prepare_fails_in_time_and_leaves_nothing() {
    let Some(rig) = Rig::new(1) else { return };
    refused(&rig, &["no DHCP server answered", "(in 3 s)"]);
    // A link that was down is down again.
    let mut socket = rig.world.node.socket().unwrap();
    let nic = link::by_name(&mut socket, "nic0", soon()).unwrap().unwrap();
    link::set_up(&mut socket, nic.index, false, soon()).unwrap();
    refused(&rig, &["no DHCP server answered"]);
    // The device is free for a claim that needs no server.
    rig.engine.prepare(&claim("b", &rig.world.device_names(), ""), &pod_ref("b")).unwrap();
}

#[test]
fn a_hostile_answer_is_named_and_not_used() {
    let Some(rig) = Rig::new(1) else { return };
    let server = Double::start(&rig.world.fabric, Does::Nothing);
    let loopback = Does::Lend(Ipv4Addr::LOCALHOST, 600, vec![]);
    for (does, text) in [
        (loopback, "the offer of 127.0.0.1 is not taken: address 127.0.0.1 is a loopback address"),
        (Does::Lend(LENT, 600, vec![(26, vec![0, 20])]), "MTU 20 (option 26) is below 68"),
        (Does::Lend(LENT, 600, vec![(1, vec![128, 0, 0, 0])]), "subnet mask 128.0.0.0"),
        (Does::Garbage(vec![53, 200, 1]), "an answer is broken: an option is longer than the message"),
    ] {
        server.now_does(does);
        refused(&rig, &[text]);
    }
}

#[test]
fn when_one_of_two_gets_no_lease_the_others_is_given_back() {
    let Some(rig) = Rig::new(2) else { return };
    let server = Double::start(&rig.world.fabric, lend(600));
    let before = rig.world.host_states();
    let error = rig.engine.prepare(&rig.claim, &pod_ref("a")).unwrap_err().to_string();
    assert!(error.contains("(nic1): no DHCP server answered"), "{error}");
    wait("it is given back", || server.take().iter().any(|heard| heard.kind == RELEASE && heard.own == LENT));
    assert!(rig.engine.records().is_empty());
    rig.world.assert_unchanged(&before);
}

#[test]
fn a_route_of_the_claim_by_the_leases_subnet_is_planned_with_the_lease() {
    let Some(mut rig) = Rig::new(1) else { return };
    let before = rig.world.host_states();
    let server = Double::start(&rig.world.fabric, lend(600));
    let with_route = |gateway: &str| {
        let text = format!(
            r#"{{"interface": {{"dhcp": true}}, "routes": [{{"destination": "10.77.0.0/16", "gateway": "{gateway}", "metric": 5}}]}}"#
        );
        claim("a", &rig.world.device_names(), &text)
    };
    let (bad, good) = (with_route("10.8.0.1"), with_route("10.9.0.8"));
    let error = rig.engine.prepare(&bad, &pod_ref("a")).unwrap_err();
    assert!(matches!(*error.reason, PrepareReason::Plan { .. }) && error.to_string().contains("10.8.0.1"), "{error}");
    wait("its lease is given back", || server.take().iter().any(|heard| heard.kind == RELEASE));
    assert!(rig.engine.records().is_empty());
    rig.world.assert_unchanged(&before);

    rig.claim = good;
    rig.prepare();
    rig.attach();
    assert_eq!(rig.routes(), Vec::<String>::new(), "the claim's goes before the lease's");
    let routes = rig.world.pod_snapshot(&rig.pod).routes;
    assert!(routes.iter().any(|(_, r)| r.to_string().starts_with("10.77.0.0/16 via 10.9.0.8 metric 5")), "{routes:?}");
}

#[test]
fn a_prepare_that_was_cut_short_is_gone_on_with() {
    let Some(rig) = Rig::new(1) else { return };
    let before = rig.world.host_states();
    let server = Double::start(&rig.world.fabric, lend(600));
    rig.prepare();
    // As if the agent had been killed while it waited for the server.
    let cut = |record: &mut ClaimRecord| record.devices[0].dhcp.as_mut().unwrap().lease = None;
    rig.engine.ledger().update(&rig.claim.claim.uid, Durability::Process, cut).unwrap();
    let error = rig.engine.attach(&pod_ref("a").uid, &sandbox("a"), rig.pod.path(), soon()).unwrap_err().to_string();
    assert!(error.contains("it has no DHCP lease yet") && error.contains("nothing was moved"), "{error}");
    server.take();
    let record = rig.prepare();
    assert_eq!(record.devices[0].lease().unwrap().address, LENT);
    assert_eq!(server.take().iter().map(|heard| heard.kind).collect::<Vec<_>>(), [DISCOVER, REQUEST]);
    rig.attach();
    assert_eq!(rig.addresses("nic0")[0].ip, LENT);
    rig.unprepare();
    rig.world.assert_unchanged(&before);
}
