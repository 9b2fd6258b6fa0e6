//! Steps that a person can follow: what runs, for how long already, and how it ended.

use std::io::Write;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval at which a running step reports that it still runs.
const REMIND: Duration = Duration::from_secs(10);

/// One step: announced when it starts, reminded of while it runs, timed when it ends.
#[derive(Debug)]
pub struct Step {
    what: String,
    started: Instant,
    stop: Option<Sender<()>>,
    reminder: Option<JoinHandle<()>>,
}

impl Step {
    /// Announces a step.
    pub fn start(what: impl Into<String>) -> Self {
        let what = what.into();
        say(&format!("==> {what}"));
        let started = Instant::now();
        let (stop, stopped) = mpsc::channel();
        let name = what.clone();
        let reminder = std::thread::spawn(move || {
            while stopped.recv_timeout(REMIND) == Err(RecvTimeoutError::Timeout) {
                say(&format!("    … {name}: {}", seconds(started.elapsed())));
            }
        });
        Self {
            what,
            started,
            stop: Some(stop),
            reminder: Some(reminder),
        }
    }

    /// Ends the step well, and prints its result, `detail`.
    pub fn done(mut self, detail: impl AsRef<str>) {
        self.silence();
        let detail = detail.as_ref();
        let separator = if detail.is_empty() { "" } else { ": " };
        say(&format!(
            "    done in {}{separator}{detail}",
            seconds(self.started.elapsed())
        ));
    }

    fn silence(&mut self) {
        self.stop.take();
        if let Some(reminder) = self.reminder.take() {
            // The reminder only prints; if it panicked there is nothing to save.
            let _ = reminder.join();
        }
    }
}

impl Drop for Step {
    /// A step that is dropped without [`Step::done`] has failed.
    fn drop(&mut self) {
        if self.stop.is_some() {
            self.silence();
            say(&format!(
                "    failed after {}: {}",
                seconds(self.started.elapsed()),
                self.what
            ));
        }
    }
}

/// A duration as people read it.
pub fn seconds(duration: Duration) -> String {
    let total = duration.as_secs_f64();
    if total < 100.0 {
        format!("{total:.1} s")
    } else {
        format!(
            "{} min {:02} s",
            duration.as_secs() / 60,
            duration.as_secs() % 60
        )
    }
}

/// Prints a line at once, also into a pipe.
pub fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // A reader that went away must not turn into a panic in the middle of a test.
    let _ = writeln!(out, "{line}");
    let _ = out.flush();
}
