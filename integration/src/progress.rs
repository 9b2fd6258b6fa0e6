//! Progress messages of steps: start, running time and result.

use std::cell::RefCell;
use std::io::Write;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Running time after which a step is first reported as still running.
const FIRST_REMINDER: Duration = Duration::from_secs(10);
/// Longest time between two reports that a step is still running.
const REMINDER_MAX: Duration = Duration::from_secs(300);

thread_local! {
    /// Destination of the lines that this thread prints.
    static LINES: RefCell<ProgressOutput> = const { RefCell::new(ProgressOutput(None)) };
}

/// Returns the waits between reports that a step is still running. The running time doubles from one report to the next.
fn reminders() -> impl Iterator<Item = Duration> {
    let next = |wait: &Duration| Some((*wait * 2).min(REMINDER_MAX));
    std::iter::once(FIRST_REMINDER).chain(std::iter::successors(Some(FIRST_REMINDER), next))
}

/// A step. It is announced at its start, reported while it runs, and timed.
#[derive(Debug)]
pub struct ProgressStep {
    what: String,
    started: Instant,
    stop: Option<Sender<()>>,
    reminder: Option<JoinHandle<()>>,
}

impl ProgressStep {
    /// Announces a step. If the thread's lines are [captured](capture_lines), the step is not reported while it runs.
    pub fn start(what: impl Into<String>) -> Self {
        let what = what.into();
        print_line(&format!("==> {what}"));
        let started = Instant::now();
        let (stop, stopped) = mpsc::channel();
        let name = what.clone();
        let remind = move || {
            for wait in reminders() {
                if stopped.recv_timeout(wait) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
                print_line(&format!("    … {name}: {}", seconds(started.elapsed())));
            }
        };
        let is_recorded = ProgressOutput::current().0.is_some();
        Self {
            what,
            started,
            stop: Some(stop),
            reminder: (!is_recorded).then(|| std::thread::spawn(remind)),
        }
    }

    /// Prints an intermediate result with the time since the step's start.
    pub fn note(&self, what: impl AsRef<str>) {
        let after = seconds(self.started.elapsed());
        print_line(&format!("    {} after {after}", what.as_ref()));
    }

    /// Ends the step successfully, and prints its result `detail`.
    pub fn done(mut self, detail: impl AsRef<str>) {
        self.stop_reminder();
        let detail = detail.as_ref();
        let separator = if detail.is_empty() { "" } else { ": " };
        print_line(&format!(
            "    done in {}{separator}{detail}",
            seconds(self.started.elapsed())
        ));
    }

    fn stop_reminder(&mut self) {
        self.stop.take();
        if let Some(reminder) = self.reminder.take() {
            // The reminder thread only prints, so its panic does no harm.
            let _ = reminder.join();
        }
    }
}

impl Drop for ProgressStep {
    /// Reports a failure: the step is dropped without a call of [`ProgressStep::done`].
    fn drop(&mut self) {
        if self.stop.is_some() {
            self.stop_reminder();
            print_line(&format!(
                "    failed after {}: {}",
                seconds(self.started.elapsed()),
                self.what
            ));
        }
    }
}

/// Formats a duration for people.
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

/// Destination of a thread's lines: standard output, or a text that [`capture_lines`] returns.
#[derive(Clone, Debug)]
pub struct ProgressOutput(Option<Arc<Mutex<String>>>);

impl ProgressOutput {
    /// Returns the destination of this thread's lines.
    pub fn current() -> Self {
        LINES.with_borrow(Self::clone)
    }

    /// Runs `work` with this destination, possibly on another thread than the one that the destination comes from.
    pub fn with_lines<T>(&self, work: impl FnOnce() -> T) -> T {
        let before = LINES.replace(self.clone());
        let result = work();
        LINES.set(before);
        result
    }
}

/// Runs `work` and captures its lines instead of printing them. Returns its result and the lines. Threads that `work`
/// starts print their lines, if they do not use this thread's [`ProgressOutput`].
pub fn capture_lines<T>(work: impl FnOnce() -> T) -> (T, String) {
    let recorded = Arc::new(Mutex::new(String::new()));
    let result = ProgressOutput(Some(Arc::clone(&recorded))).with_lines(work);
    let mut recorded = recorded.lock().unwrap_or_else(PoisonError::into_inner);
    (result, std::mem::take(&mut *recorded))
}

/// Prints a line immediately, even into a pipe. If the thread's lines are [captured](capture_lines), adds the line to them
/// instead.
pub fn print_line(line: &str) {
    if let ProgressOutput(Some(recorded)) = ProgressOutput::current() {
        let mut recorded = recorded.lock().unwrap_or_else(PoisonError::into_inner);
        recorded.push_str(line);
        recorded.push('\n');
        return;
    }
    let mut out = std::io::stdout().lock();
    // If standard output is closed, a test must not panic.
    let _ = writeln!(out, "{line}");
    let _ = out.flush();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_of_a_minute_reports_three_times_that_it_runs() {
        let times: Vec<u64> = reminders()
            .scan(Duration::ZERO, |time, wait| {
                *time += wait;
                Some(time.as_secs())
            })
            .take(8)
            .collect();
        assert_eq!(times, [10, 20, 40, 80, 160, 320, 620, 920]);
    }

    #[test]
    fn progress_lines_are_recorded_on_request() {
        let ((), output) = capture_lines(|| {
            print_line("first");
            let other_thread = std::thread::spawn(|| capture_lines(|| print_line("elsewhere")).1);
            assert_eq!(other_thread.join().expect("no panic"), "elsewhere\n");
            let lines = ProgressOutput::current();
            let helper = std::thread::spawn(move || lines.with_lines(|| print_line("of a helper")));
            helper.join().expect("no panic");
            let ((), inner) = capture_lines(|| print_line("inner"));
            assert_eq!(inner, "inner\n");
            ProgressStep::start("a step").done("its result");
        });
        let begin = "first\nof a helper\n==> a step\n    done in ";
        assert!(output.starts_with(begin), "{output}");
        assert!(output.ends_with(": its result\n"), "{output}");
    }
}
