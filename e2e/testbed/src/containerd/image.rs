//! An image without a registry: an OCI layout as one tar file, its only layer a static busybox.

use std::path::Path;

use anyhow::Context;
use serde_json::json;
use sha2::{Digest, Sha256};

/// The applets that are commands of their own in the image; every other one is `busybox NAME`.
const APPLETS: &[&str] = &[
    "arping",
    "cat",
    "cp",
    "cut",
    "date",
    "dd",
    "echo",
    "env",
    "expr",
    "false",
    "find",
    "free",
    "grep",
    "head",
    "hostname",
    "id",
    "ifconfig",
    "ip",
    "kill",
    "ln",
    "ls",
    "md5sum",
    "mkdir",
    "mount",
    "mv",
    "nc",
    "netstat",
    "ping",
    "ping6",
    "ps",
    "readlink",
    "rm",
    "route",
    "sed",
    "seq",
    "sh",
    "sleep",
    "sort",
    "stat",
    "sync",
    "tail",
    "tee",
    "test",
    "top",
    "touch",
    "tr",
    "traceroute",
    "true",
    "umount",
    "uname",
    "vi",
    "wc",
    "wget",
    "xargs",
    "yes",
];

/// The architecture's name in OCI terms.
const ARCHITECTURE: &str = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };

/// Writes an OCI archive to `out` that holds `busybox` under each of `names`; a container of it sleeps by default.
///
/// # Errors
/// When the program can't be read or the archive can't be written.
pub(super) fn write(busybox: &Path, out: &Path, names: &[&str]) -> anyhow::Result<()> {
    let program = std::fs::read(busybox).with_context(|| format!("read {}", busybox.display()))?;
    let layer = layer(&program);
    let config = serde_json::to_vec(&json!({
        "architecture": ARCHITECTURE,
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [digest(&layer)]},
        "config": {"Cmd": ["/bin/sleep", "2147483647"], "Env": ["PATH=/bin"]},
    }))?;
    let manifest = serde_json::to_vec(&json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": descriptor(&config, "application/vnd.oci.image.config.v1+json"),
        "layers": [descriptor(&layer, "application/vnd.oci.image.layer.v1.tar")],
    }))?;
    let manifests: Vec<_> = names
        .iter()
        .map(|name| {
            let mut entry = descriptor(&manifest, "application/vnd.oci.image.manifest.v1+json");
            entry["annotations"] = json!({"io.containerd.image.name": name});
            entry
        })
        .collect();

    let mut tar = Tar::default();
    tar.file("oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#);
    tar.file("index.json", 0o644, &serde_json::to_vec(&json!({"schemaVersion": 2, "manifests": manifests}))?);
    for blob in [&layer, &config, &manifest] {
        tar.file(&digest(blob).replacen("sha256:", "blobs/sha256/", 1), 0o644, blob);
    }
    std::fs::write(out, tar.finish()).with_context(|| format!("write {}", out.display()))
}

fn layer(program: &[u8]) -> Vec<u8> {
    let mut tar = Tar::default();
    for folder in ["bin", "dev", "etc", "proc", "sys", "tmp"] {
        tar.folder(folder);
    }
    tar.file("bin/busybox", 0o755, program);
    for applet in APPLETS {
        tar.symlink(&format!("bin/{applet}"), "busybox");
    }
    tar.finish()
}

fn digest(blob: &[u8]) -> String {
    use std::fmt::Write as _;
    Sha256::digest(blob).iter().fold("sha256:".to_owned(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}"); // writing to a String can't fail
        text
    })
}

fn descriptor(blob: &[u8], media_type: &str) -> serde_json::Value {
    json!({"mediaType": media_type, "digest": digest(blob), "size": blob.len()})
}

/// A tar file (POSIX ustar), as much of it as an image needs. All belongs to root, and time is 0, so equal input gives equal bytes.
#[derive(Default)]
struct Tar(Vec<u8>);

impl Tar {
    const BLOCK: usize = 512;

    fn file(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.header(name, mode, content.len(), b'0', "");
        self.0.extend_from_slice(content);
        self.pad();
    }

    fn symlink(&mut self, name: &str, target: &str) {
        self.header(name, 0o777, 0, b'2', target);
    }

    fn folder(&mut self, name: &str) {
        self.header(name, 0o755, 0, b'5', "");
    }

    /// The end of a tar file: two empty blocks.
    fn finish(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 2 * Self::BLOCK, 0);
        self.0
    }

    /// `name` and `link` must fit their fields of 100 bytes; all our names do.
    fn header(&mut self, name: &str, mode: u32, size: usize, kind: u8, link: &str) {
        let mut block = [0_u8; Self::BLOCK];
        let mut put = |at: usize, text: &str| block[at..at + text.len()].copy_from_slice(text.as_bytes());
        put(0, name);
        put(100, &format!("{mode:07o}"));
        put(108, "0000000"); // user
        put(116, "0000000"); // group
        put(124, &format!("{size:011o}"));
        put(136, "00000000000"); // time
        put(148, "        "); // the checksum counts itself as eight spaces
        put(157, link);
        put(257, "ustar\0");
        put(263, "00");
        block[156] = kind;
        let sum: u32 = block.iter().copied().map(u32::from).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.0.extend_from_slice(&block);
    }

    fn pad(&mut self) {
        self.0.resize(self.0.len().next_multiple_of(Self::BLOCK), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// The `tar` program is the judge of our headers.
    #[test]
    fn tar_reads_what_we_write() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let mut tar = Tar::default();
        tar.folder("bin");
        tar.file("bin/one", 0o755, b"x");
        tar.file("bin/block", 0o644, &[7; 512]);
        tar.symlink("bin/link", "one");
        let archive = dir.path().join("a.tar");
        std::fs::write(&archive, tar.finish())?;
        let status = Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(dir.path()).status()?;
        assert!(status.success());
        assert_eq!(std::fs::read(dir.path().join("bin/one"))?, b"x");
        assert_eq!(std::fs::read(dir.path().join("bin/block"))?, [7; 512]);
        assert_eq!(std::fs::read_link(dir.path().join("bin/link"))?, Path::new("one"));
        Ok(())
    }
}
