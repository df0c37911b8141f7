//! Puts `dranic-guard` onto the host and sees whether it runs there.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::AgentConfig;
use crate::gate::hook::PROGRAM;
use crate::gate::{self, GuardUse};

/// How long the guard may take to say its version; it takes some milliseconds.
const VERSION_LIMIT: Duration = Duration::from_secs(5);

/// Begin of the name of a guard that is being written.
const PART_PREFIX: &str = ".dranic-guard.part-";
/// Nobody writes that long.
const PART_AGE: Duration = Duration::from_secs(600);

/// The guard, for hooks; or why there is none, in words.
pub(super) fn install(config: &AgentConfig) -> Result<GuardUse, String> {
    let Some(dir) = &config.guard_dir else { return Err("off (--guard-dir is empty)".to_owned()) };
    let source = match &config.guard_program {
        Some(program) => program.clone(),
        None => beside_us().map_err(|e| format!("where this program is can't be read: {e}"))?,
    };
    let program = dir.join(PROGRAM);
    put(&source, &program)?;
    runs(&program, VERSION_LIMIT)?;
    Ok(GuardUse {
        program,
        driver: config.driver_name.clone(),
        state_dir: config.state_dir.clone(),
        socket: config.gate_socket.clone(),
        wait: config.guard_wait,
    })
}

fn beside_us() -> io::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(PROGRAM))
}

/// Makes `target` the same as `source`. Containers may start with the one that is there meanwhile.
fn put(source: &Path, target: &Path) -> Result<(), String> {
    let mut from = File::open(source).map_err(|e| format!("{} can't be read: {e}", source.display()))?;
    if is_same(&mut from, target).unwrap_or(false) {
        return Ok(());
    }
    // Agents of two drivers may have one folder.
    let unique = std::fs::read_to_string("/proc/sys/kernel/random/uuid").map_err(|e| e.to_string())?;
    let part = target.with_file_name(format!("{PART_PREFIX}{}", unique.trim()));
    let written = io::Seek::rewind(&mut from).and_then(|()| replace(&mut from, &part, target));
    written.map_err(|e| {
        // On a full disk the half-written file is what keeps it full.
        let _ = std::fs::remove_file(&part);
        format!("{} can't be written: {e} (--guard-dir)", target.display())
    })
}

fn replace(from: &mut File, part: &Path, target: &Path) -> io::Result<()> {
    let folder = target.parent().unwrap_or(Path::new("/"));
    std::fs::create_dir_all(folder)?;
    remove_old_parts(folder);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o755).open(part)?;
    io::copy(from, &mut file)?;
    // Whatever the umask.
    file.set_permissions(Permissions::from_mode(0o755))?;
    file.sync_all()?;
    drop(file);
    std::fs::rename(part, target)?;
    File::open(folder)?.sync_all()
}

/// What agents left behind that were killed while they wrote.
fn remove_old_parts(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let age = entry.metadata().and_then(|meta| meta.modified()).map(|time| time.elapsed().unwrap_or_default());
        if entry.file_name().to_string_lossy().starts_with(PART_PREFIX) && age.is_ok_and(|age| age > PART_AGE) {
            // The next start tries again.
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

fn is_same(source: &mut File, target: &Path) -> io::Result<bool> {
    let mut there = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(target)?;
    let (meta, wanted) = (there.metadata()?, source.metadata()?);
    if !meta.is_file() || meta.len() != wanted.len() || meta.permissions().mode() & 0o7777 != 0o755 {
        return Ok(false);
    }
    let (mut one, mut other) = (vec![0; 1 << 16], vec![0; 1 << 16]);
    loop {
        let count = source.read(&mut one)?;
        if count == 0 {
            return Ok(true);
        }
        there.read_exact(&mut other[..count])?;
        if one[..count] != other[..count] {
            return Ok(false);
        }
    }
}

/// Runs it, as the OCI runtime will.
fn runs(program: &Path, limit: Duration) -> Result<(), String> {
    let shown = program.display();
    let end = Instant::now() + limit;
    let mut child = spawn(program, end).map_err(|e| {
        let hint = if e.kind() == ErrorKind::PermissionDenied {
            "; is its file system mounted noexec? Name a folder on another one with --guard-dir (chart: agent.guardDir)"
        } else {
            ""
        };
        format!("{shown} can't be run: {e}{hint}")
    })?;
    let status = wait(&mut child, end).ok_or_else(|| format!("{shown} --version does not end"))?;
    let mut said = String::new();
    // It has ended, so what it said is there.
    if let Some(out) = child.stdout.take() {
        let _ = out.take(1024).read_to_string(&mut said);
    }
    if !status.success() || said.trim() != gate::version() {
        return Err(format!("{shown} --version ends with {status} and says {:?}, not {:?}", said.trim(), gate::version()));
    }
    Ok(())
}

fn spawn(program: &Path, end: Instant) -> io::Result<Child> {
    loop {
        let arguments: [&OsStr; 1] = ["--version".as_ref()];
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).current_dir("/");
        match command.spawn() {
            // Another thread was making a process while we wrote the file, and that one has it open for a moment more.
            Err(e) if e.kind() == ErrorKind::ExecutableFileBusy && Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(10));
            }
            other => return other,
        }
    }
}

fn wait(child: &mut Child, end: Instant) -> Option<std::process::ExitStatus> {
    let mut pause = Duration::from_millis(1);
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < end => std::thread::sleep(pause),
            _ => break,
        }
        pause = (pause * 2).min(Duration::from_millis(50));
    }
    let _ = child.kill();
    let _ = child.wait();
    None
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn script(path: &Path, text: &str) {
        std::fs::write(path, format!("#!/bin/sh\n{text}\n")).unwrap();
    }

    #[test]
    fn it_is_put_there_once_and_replaced_when_it_is_another() {
        let folder = tempfile::tempdir().unwrap();
        let (source, target) = (folder.path().join("new"), folder.path().join("a/b").join(PROGRAM));
        script(&source, &format!("echo '{}'", gate::version()));
        put(&source, &target).unwrap();
        runs(&target, VERSION_LIMIT).unwrap();
        let first = std::fs::metadata(&target).unwrap().ino();
        put(&source, &target).unwrap();
        assert_eq!(std::fs::metadata(&target).unwrap().ino(), first, "the same is left alone");
        std::fs::set_permissions(&target, Permissions::from_mode(0o644)).unwrap();
        let (old, young) = (".dranic-guard.part-old", ".dranic-guard.part-young");
        let part = |name: &str| File::create(target.with_file_name(name)).unwrap();
        part(old).set_modified(std::time::SystemTime::now() - 2 * PART_AGE).unwrap();
        part(young);
        put(&source, &target).unwrap();
        runs(&target, VERSION_LIMIT).unwrap();
        script(&source, "echo 'dranic-guard 0.0.0'; exit 0 # other");
        put(&source, &target).unwrap();
        let error = runs(&target, VERSION_LIMIT).unwrap_err();
        assert!(error.contains("0.0.0") && error.contains(&gate::version()), "{error}");
        let mut names: Vec<_> = std::fs::read_dir(target.parent().unwrap()).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, [young, PROGRAM], "no part stays but one that may be being written");
    }

    #[test]
    fn what_can_not_run_is_said_with_the_next_step() {
        let folder = tempfile::tempdir().unwrap();
        let (source, target) = (folder.path().join("new"), folder.path().join(PROGRAM));
        assert!(put(&source, &target).unwrap_err().contains("can't be read"));
        script(&source, "sleep 30");
        put(&source, &target).unwrap();
        let error = runs(&target, Duration::from_millis(200)).unwrap_err();
        assert!(error.contains("does not end"), "{error}");
        std::fs::set_permissions(&target, Permissions::from_mode(0o644)).unwrap();
        let error = runs(&target, VERSION_LIMIT).unwrap_err();
        assert!(error.contains("noexec") && error.contains("--guard-dir"), "{error}");
        assert!(put(&source, Path::new("/dev/null/dranic-guard")).unwrap_err().contains("--guard-dir"));
    }
}
