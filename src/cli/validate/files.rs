//! The files that were named.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::cli::{EXIT_NO_INPUT, Failure};
use crate::manifests::Position;
use crate::manifests::yaml::{SyntaxError, TEXT_MAX};

/// Most files that are read in one call.
const FILES_MAX: usize = 10_000;

/// The name of a file, and its text, or what is wrong with that.
pub(in crate::cli) type Text = (String, Result<String, SyntaxError>);

/// The texts of all files, folders and standard input that `named` names.
///
/// # Errors
/// When one can't be read; exit code 66. A file that is not UTF-8 is none of these: that is a fault of its text.
pub(super) fn texts(named: &[PathBuf]) -> Result<Vec<Text>, Failure> {
    let mut paths = Vec::new();
    for name in named {
        if name.is_dir() { paths.extend(of_folder(name)?) } else { paths.push(name.clone()) }
    }
    if paths.len() > FILES_MAX {
        let message = format!("there are {} files; at most {FILES_MAX} are read in one call", paths.len());
        return Err(Failure { code: EXIT_NO_INPUT, message });
    }
    paths.into_iter().map(|path| read(&path)).collect()
}

fn of_folder(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let entries =
        std::fs::read_dir(folder).and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(|e| unreadable(folder, &e))?;
    let is_manifest =
        |path: &PathBuf| path.extension().is_some_and(|e| e == "yaml" || e == "yml" || e == "json") && path.is_file();
    let mut paths: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).filter(is_manifest).collect();
    paths.sort();
    if paths.is_empty() {
        let message = format!("{}: no *.yaml, *.yml or *.json in this folder", folder.display());
        return Err(Failure { code: EXIT_NO_INPUT, message });
    }
    Ok(paths)
}

/// The text of a file, or of standard input for `-`, with a name for it.
///
/// # Errors
/// As [`texts`].
pub(in crate::cli) fn read(path: &Path) -> Result<Text, Failure> {
    // One byte more than is taken, so that what is too long is seen to be.
    let limit = TEXT_MAX as u64 + 1;
    let mut bytes = Vec::new();
    let (name, outcome) = if path == Path::new("-") {
        ("<stdin>".to_owned(), std::io::stdin().lock().take(limit).read_to_end(&mut bytes))
    } else {
        (path.display().to_string(), File::open(path).and_then(|file| file.take(limit).read_to_end(&mut bytes)))
    };
    outcome.map_err(|e| unreadable(path, &e))?;
    if bytes.len() > TEXT_MAX {
        // Its end may be cut in the middle of a character; it is refused for its length.
        return Ok((name, Ok(String::from_utf8_lossy(&bytes).into_owned())));
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        let good = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = 1 + good.iter().filter(|b| **b == b'\n').count();
        SyntaxError { at: Position { line, column: 1 }, why: "is not UTF-8".to_owned() }
    });
    Ok((name, text))
}

fn unreadable(path: &Path, error: &std::io::Error) -> Failure {
    Failure { code: EXIT_NO_INPUT, message: format!("{}: {error}", path.display()) }
}
