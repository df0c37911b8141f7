//! The list of what does not come along, kept short whatever the host has.

/// Most lines of the list.
const LINES_MAX: usize = 100;

/// What of the host's is not copied into the pod, and why.
#[derive(Debug, Default)]
pub(super) struct LeftOut {
    lines: Vec<String>,
    more: usize,
}

impl LeftOut {
    /// Adds a line.
    pub(super) fn add(&mut self, line: String) {
        if self.lines.len() < LINES_MAX {
            self.lines.push(line);
        } else {
            self.more += 1;
        }
    }

    /// Cuts `list` to `max` elements and says so.
    pub(super) fn cut<T>(&mut self, list: &mut Vec<T>, max: usize, what: &str) {
        if list.len() > max {
            self.add(format!("{} more {what}: the first {max} are copied", list.len() - max));
            list.truncate(max);
        }
    }

    /// The list.
    pub(super) fn into_lines(mut self) -> Vec<String> {
        if self.more > 0 {
            self.lines.push(format!("and {} more", self.more));
        }
        self.lines
    }
}
