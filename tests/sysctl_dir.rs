//! Sysctls by way of a mount, as in a container, whose own `/proc/sys` is read-only. A program of its own: the folder counts for the
//! whole process.

use std::path::Path;
use std::process::Command;

use dranic::netdev::sysctl;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

fn bind(from: &Path, to: &Path, read_only: bool) {
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
    if read_only {
        let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        mount(None::<&str>, to, None::<&str>, flags, None::<&str>).unwrap();
    }
}

/// Runs `test` in a thread with mounts and links of its own, which go with it.
fn apart(test: impl FnOnce() + Send + 'static) {
    if !nix::unistd::geteuid().is_root() {
        return println!("skipped: mounts need root");
    }
    let thread = std::thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET).unwrap();
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_PRIVATE | MsFlags::MS_REC, None::<&str>).unwrap();
        test();
    });
    thread.join().unwrap();
}

#[test]
fn a_mount_of_them_is_written_where_their_own_place_is_read_only() {
    apart(|| {
        let own = Path::new(sysctl::ROOT);
        let scratch = tempfile::tempdir().unwrap();
        let other = scratch.path().join("net");
        std::fs::create_dir(&other).unwrap();
        bind(own, &other, false);
        bind(Path::new("/proc/sys"), Path::new("/proc/sys"), true);

        let error = sysctl::write("lo", "ipv4/conf/arp_ignore", "1").unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
        let error = sysctl::use_root(own).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);

        let before = sysctl::read("lo", "ipv4/conf/arp_ignore").unwrap();
        let new = if before == "1" { "2" } else { "1" };
        sysctl::use_root(&other).unwrap();
        sysctl::write("lo", "ipv4/conf/arp_ignore", new).unwrap();
        assert_eq!(std::fs::read_to_string(own.join("ipv4/conf/lo/arp_ignore")).unwrap().trim(), new);

        // The mount shows the namespace of whoever looks, not of whoever mounted.
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        assert_eq!(sysctl::read("lo", "ipv4/conf/arp_ignore").unwrap(), before);

        nix::mount::umount(&other).unwrap();
    });
}

#[test]
fn the_agent_refuses_a_read_only_one_before_it_binds_anything() {
    apart(|| {
        let scratch = tempfile::tempdir().unwrap();
        let sysctls = scratch.path().join("net");
        std::fs::create_dir(&sysctls).unwrap();
        bind(&sysctls, &sysctls, true);
        let state = scratch.path().join("state");
        let mut command = Command::new(env!("CARGO_BIN_EXE_dranic"));
        command.args(["agent", "--node-name=n", "--sysctl-dir"]).arg(&sysctls).arg("--state-dir").arg(&state).env_clear();
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(&format!("--sysctl-dir {}", sysctls.display())) && said.contains("read-only"), "{said}");
        assert!(!state.exists());
        nix::mount::umount(&sysctls).unwrap();
    });
}
