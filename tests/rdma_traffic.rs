//! RDMA traffic between pods that have RDMA NICs by the engine: over real links, and what becomes of it when a driver goes away. In the
//! virtual machine of `e2e/vm` (`make e2e-vm`), in whatever mode its RDMA devices are.

#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/engine.rs"]
mod common;
#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/pci.rs"]
mod pci;

use std::fs;
use std::process::{Child, Command, Stdio};

use common::{claim, pod_ref, sandbox};
use dranic::attach::Engine;
use dranic::dra::resolve::ResolvedClaim;
use dranic::netdev::HostState;
use dranic_testbed::fabric::PodNetns;
use pci::{Guest, Nic, run, wait_for, write};

/// Longest that a program may take, seconds: the guest's processor is emulated.
const LIMIT: &str = "60";

/// Whether RDMA devices move with their links.
fn is_exclusive() -> bool {
    let out = Command::new("rdma").args(["system", "show"]).output().unwrap();
    String::from_utf8_lossy(&out.stdout).contains("netns exclusive")
}

/// A pod with one or more RDMA NICs.
struct Running {
    name: &'static str,
    /// Keeps its namespace.
    _pod: PodNetns,
    claim: ResolvedClaim,
}

impl Running {
    /// Gives the pod these NICs: the links, with an address each, and what of RDMA goes with them.
    fn start(guest: &Guest, engine: &Engine, name: &'static str, nics: &[(&Nic, &str)]) -> Self {
        let mut all: Option<ResolvedClaim> = None;
        for (nic, address) in nics {
            let text = format!(r#"{{"interface": {{"addresses": ["{address}/24"]}}}}"#);
            let one = claim(name, &[guest.name(nic)], &text);
            match &mut all {
                None => all = Some(one),
                Some(all) => all.devices.extend(one.devices),
            }
        }
        let claim = all.unwrap();
        engine.prepare(&claim, &pod_ref(name)).unwrap();
        let pod = guest.pod(name);
        // So that iproute2 finds it, and gives programs a /sys that shows it.
        let _ = fs::create_dir_all("/run/netns");
        let _ = fs::remove_file(format!("/run/netns/{name}"));
        std::os::unix::fs::symlink(pod.path(), format!("/run/netns/{name}")).unwrap();
        engine.attach(&pod_ref(name).uid, &sandbox(name), pod.path(), pci::soon()).unwrap();
        Self { name, _pod: pod, claim }
    }

    fn command(&self, line: &str) -> Command {
        let mut command = Command::new("timeout");
        command.args([LIMIT, "ip", "netns", "exec", self.name]).args(line.split_whitespace());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// What it printed.
    fn run(&self, line: &str) -> String {
        let out = self.command(line).output().unwrap();
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        assert!(out.status.success(), "{} in {}: {text}{}", line, self.name, String::from_utf8_lossy(&out.stderr));
        text
    }

    fn succeeds(&self, line: &str) -> bool {
        self.command(line).output().unwrap().status.success()
    }

    /// Index of the RoCE v2 GID of `address`, once the port is active and has it.
    fn gid(&self, rdma: &str, address: &str) -> String {
        let octets: Vec<u8> = address.split('.').map(|part| part.parse().unwrap()).collect();
        let wanted = format!("ffff:{:02x}{:02x}:{:02x}{:02x}", octets[0], octets[1], octets[2], octets[3]);
        let port = format!("/sys/class/infiniband/{rdma}/ports/1");
        wait_for(&format!("GID of {address} on {rdma} in {}", self.name), || {
            let active = self.succeeds(&format!("grep -q ACTIVE {port}/state"));
            let found = self.command(&format!("grep -rl {wanted} {port}/gids")).output().unwrap();
            let found = String::from_utf8_lossy(&found.stdout).lines().next()?.rsplit('/').next()?.to_owned();
            let is_v2 = self.succeeds(&format!("grep -q v2 {port}/gid_attrs/types/{found}"));
            (active && is_v2).then_some(found)
        })
    }

    fn end(&self, engine: &Engine) {
        let released = engine.release(&pod_ref(self.name).uid, &sandbox(self.name));
        println!("{}: {released:?}", self.name);
        engine.unprepare(&self.claim.claim).unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = fs::remove_file(format!("/run/netns/{}", self.name));
    }
}

/// One end of a rail.
struct End<'a> {
    pod: &'a Running,
    rdma: &'a str,
    address: &'a str,
}

/// A program that serves one client, and says so if it fails.
fn served(server: Child, what: &str) {
    let out = server.wait_with_output().unwrap();
    assert!(out.status.success(), "{what}: {}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
}

/// Verbs, rdma_cm, and RDMA writes from `client` to `server`.
fn traffic(server: &End<'_>, client: &End<'_>) {
    let (there, here) = (server.pod.gid(server.rdma, server.address), client.pod.gid(client.rdma, client.address));
    let pairs = [
        (
            format!("ibv_rc_pingpong -n 100 -d {} -g {there}", server.rdma),
            format!("ibv_rc_pingpong -n 100 -d {} -g {here} {}", client.rdma, server.address),
        ),
        (
            format!("ib_write_bw -F -n 100 -t 8 -s 4096 -d {} -x {there}", server.rdma),
            format!("ib_write_bw -F -n 100 -t 8 -s 4096 -d {} -x {here} {}", client.rdma, server.address),
        ),
    ];
    for (serve, ask) in pairs {
        let running = server.pod.command(&serve).spawn().unwrap();
        wait_for(&serve, || server.pod.run("ss -Hltn").contains(":18515").then_some(()));
        client.pod.run(&ask);
        served(running, &serve);
    }
    let serve = format!("rping -s -a {} -C 5", server.address);
    let running = server.pod.command(&serve).spawn().unwrap();
    wait_for(&serve, || server.pod.run("rdma resource show cm_id").contains("LISTEN").then_some(()));
    client.pod.run(&format!("rping -c -a {} -C 5", server.address));
    served(running, &serve);
}

/// NIC `n`, up, with an RDMA device over it, as a server has it before any pod.
fn rdma_nic(guest: &Guest, n: u8) -> Nic {
    let nic = guest.fresh(n);
    run(&format!("ip link set nic{n} up"));
    run(&format!("rdma link add rx{n} type rxe netdev nic{n}"));
    nic
}

/// The machine, and NICs with RDMA devices rx0, rx1, … on it.
fn rig<const N: usize>(numbers: [u8; N]) -> Option<(Guest, [Nic; N], [HostState; N])> {
    let guest = Guest::new()?;
    let nics = numbers.map(|n| rdma_nic(&guest, n));
    let before = nics.each_ref().map(|nic| guest.state(nic));
    Some((guest, nics, before))
}

fn assert_home(guest: &Guest, nics: &[Nic], before: &[HostState], rdma: &[&str]) {
    for (nic, before) in nics.iter().zip(before) {
        guest.assert_same(before, nic);
    }
    for name in rdma {
        run(&format!("rdma dev show {name}"));
        run(&format!("rdma link delete {name}"));
    }
}

#[test]
fn two_pods_talk_on_two_rails_and_neither_opens_the_others_device() {
    let Some((guest, nics, before)) = rig([0, 1, 2, 3]) else { return };
    let engine = guest.engine();
    let a = Running::start(&guest, &engine, "a", &[(&nics[0], "10.30.0.1"), (&nics[2], "10.30.2.1")]);
    let b = Running::start(&guest, &engine, "b", &[(&nics[1], "10.30.0.2"), (&nics[3], "10.30.2.2")]);
    let end = |pod, rdma, address| End { pod, rdma, address };
    traffic(&end(&a, "rx0", "10.30.0.1"), &end(&b, "rx1", "10.30.0.2"));
    traffic(&end(&b, "rx3", "10.30.2.2"), &end(&a, "rx2", "10.30.2.1"));
    if is_exclusive() {
        assert!(opens(&a, "rx0") && !opens(&a, "rx1"), "each opens its own device only");
        assert!(opens(&b, "rx3") && !opens(&b, "rx2"), "each opens its own device only");
    }
    // The link goes down and comes up again in the pod.
    a.run("ip link set nic0 down");
    a.run("ip link set nic0 up");
    traffic(&end(&a, "rx0", "10.30.0.1"), &end(&b, "rx1", "10.30.0.2"));
    a.end(&engine);
    b.end(&engine);
    assert_home(&guest, &nics, &before, &["rx0", "rx1", "rx2", "rx3"]);
}

/// Whether a process in the pod opens the device's character device.
fn opens(pod: &Running, rdma: &str) -> bool {
    let mut all = fs::read_dir("/sys/class/infiniband_verbs").unwrap().map(|entry| entry.unwrap().path());
    let is_it = |path: &std::path::PathBuf| fs::read_to_string(path.join("ibdev")).is_ok_and(|name| name.trim() == rdma);
    let found = all.find(is_it).unwrap_or_else(|| panic!("{rdma} has no verbs device"));
    let node = format!("/dev/infiniband/{}", found.file_name().unwrap().to_str().unwrap());
    assert!(fs::metadata(&node).is_ok(), "{node} is not there");
    pod.succeeds(&format!("dd of={node} count=0 status=none conv=notrunc,nocreat"))
}

#[test]
fn virtual_functions_talk() {
    let Some((guest, nics, _)) = rig([0, 1]) else { return };
    for name in ["rx0", "rx1"] {
        run(&format!("rdma link delete {name}"));
    }
    let vfs = [0, 1].map(|n: usize| {
        write(nics[n].sysfs().join("sriov_numvfs"), "1");
        let function = fs::read_link(nics[n].sysfs().join("virtfn0")).unwrap();
        let vf = Nic { function: function.file_name().unwrap().to_str().unwrap().to_owned() };
        let link = guest.link(&vf);
        run(&format!("ip link set {} down", link.name));
        run(&format!("ip link set {} name vf{n}", link.name));
        run(&format!("ip link set vf{n} up"));
        run(&format!("rdma link add rv{n} type rxe netdev vf{n}"));
        vf
    });
    let before = vfs.each_ref().map(|vf| guest.state(vf));
    let engine = guest.engine();
    let a = Running::start(&guest, &engine, "a", &[(&vfs[0], "10.31.0.1")]);
    let b = Running::start(&guest, &engine, "b", &[(&vfs[1], "10.31.0.2")]);
    traffic(&End { pod: &a, rdma: "rv0", address: "10.31.0.1" }, &End { pod: &b, rdma: "rv1", address: "10.31.0.2" });
    a.end(&engine);
    b.end(&engine);
    assert_home(&guest, &vfs, &before, &["rv0", "rv1"]);
    nics.iter().for_each(|nic| write(nic.sysfs().join("sriov_numvfs"), "0"));
}

/// Lends NIC 0 with its RDMA device, lets `accident` happen, and looks that the NIC is as it was when the claim has ended.
fn after(accident: impl FnOnce(&Guest, &Nic)) {
    let Some((guest, [nic], [before])) = rig([0]) else { return };
    let engine = guest.engine();
    let a = Running::start(&guest, &engine, "a", &[(&nic, "10.32.0.1")]);
    accident(&guest, &nic);
    a.end(&engine);
    guest.assert_same(&before, &nic);
    assert!(engine.records().is_empty());
    let _ = Command::new("rdma").args(["link", "delete", "rx0"]).output();
}

#[test]
fn a_nic_whose_driver_was_bound_again_is_given_back() {
    after(|guest, nic| {
        nic.unplug();
        nic.plug();
        let link = guest.link(nic);
        // A driver with RDMA of its own makes its device again, under whatever name.
        run(&format!("rdma link add rxnew type rxe netdev {}", link.name));
    });
    let _ = Command::new("rdma").args(["link", "delete", "rxnew"]).output();
}

#[test]
fn a_nic_whose_rdma_module_was_loaded_again_is_given_back() {
    after(|_, _| {
        run("modprobe -r rdma_rxe");
        run("modprobe rdma_rxe");
    });
}

#[test]
fn a_nic_whose_module_was_loaded_again_is_given_back() {
    after(|_, _| {
        run("modprobe -r igb");
        run("modprobe igb");
    });
}
