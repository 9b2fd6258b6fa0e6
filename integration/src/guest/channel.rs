//! Connection to the guest's agent, for scripts, their output, and events.
//!
//! The file of the agent, `resources/guest/agent`, describes the protocol.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::prelude::BASE64_STANDARD as BASE64;
use thiserror::Error;

/// Intervals of reminders (empty lines) while a script is awaited: at first, and later.
const REMINDERS: [(Duration, Duration); 2] = [
    (Duration::from_secs(3), Duration::from_millis(50)),
    (Duration::MAX, Duration::from_secs(1)),
];

/// Interval of checks whether the guest is lost.
const LOSS_CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Script that shows whether a guest still works after another script timed out, and the timeout of its answer.
const INQUIRY: &str = include_str!("../../../resources/guest/inquiry");
const INQUIRY_TIMEOUT: Duration = Duration::from_secs(180);

/// Errors of the connection to the agent.
#[derive(Debug, Error)]
pub enum AgentChannelError {
    /// The guest did not answer in time.
    #[error("waited {timeout:?} in vain for {what}{}", describe_life_sign(.life.as_deref()))]
    Timeout {
        /// Expected event.
        what: String,
        /// Timeout.
        timeout: Duration,
        /// Result of the inquiry, if one was made.
        life: Option<Box<SignOfLife>>,
    },
    /// The guest is lost, so that no answer will come.
    #[error("it runs with its host's registers, and {what} was waited for")]
    Lost {
        /// Expected event.
        what: String,
    },
    /// The VMM closed the connection, since it has ended.
    #[error("its VMM ended while {what} was waited for")]
    Closed {
        /// Expected event.
        what: String,
    },
    /// The connection could not be set up.
    #[error("the line to its agent can't be used: {0}")]
    Io(#[from] std::io::Error),
}

/// Result of an inquiry, which distinguishes a hanging script from a hanging guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SignOfLife {
    /// The guest has answered the inquiry. The output may show why the script hangs.
    Answered(String),
    /// The guest has not answered the inquiry.
    None,
}

fn describe_life_sign(life: Option<&SignOfLife>) -> String {
    match life {
        None => String::new(),
        Some(SignOfLife::Answered(text)) => format!("\nIt ran another script afterwards:\n{text}"),
        Some(SignOfLife::None) => "\nIt ran nothing else afterwards.".to_owned(),
    }
}

/// Output and exit status of a script.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScriptOutput {
    /// Exit status; 128 + N if signal N ended the script.
    pub status: i32,
    /// Standard output and standard error, in order of arrival.
    pub text: String,
}

/// A running script in the guest.
#[derive(Debug)]
pub struct ScriptJob {
    script: String,
    result: Receiver<ScriptOutput>,
}

impl ScriptJob {
    /// Returns the script.
    pub fn script(&self) -> &str {
        &self.script
    }

    /// Returns the result if the script has ended.
    pub fn try_result(&self) -> Option<ScriptOutput> {
        self.result.try_recv().ok()
    }
}

#[derive(Debug)]
struct PendingScript {
    text: Vec<u8>,
    result: Sender<ScriptOutput>,
}

type RunningJobs = Arc<Mutex<HashMap<u64, PendingScript>>>;

/// The host's end of the connection.
#[derive(Debug)]
pub(super) struct AgentChannel {
    out: Mutex<UnixStream>,
    running: RunningJobs,
    next_id: AtomicU64,
    ready: Mutex<Receiver<()>>,
    events: Mutex<Receiver<String>>,
    sends_reminders: bool,
}

impl AgentChannel {
    pub(super) fn new(stream: UnixStream) -> Result<Self, AgentChannelError> {
        let running = RunningJobs::default();
        let (ready_in, ready) = mpsc::channel();
        let (events_in, events) = mpsc::channel();
        let input = stream.try_clone()?;
        let jobs = Arc::clone(&running);
        // The thread ends when the VMM closes its end of the connection. It then drops the senders, which wakes all waiting
        // threads.
        std::thread::spawn(move || listen(input, &jobs, &ready_in, &events_in));
        Ok(Self {
            out: Mutex::new(stream),
            running,
            next_id: AtomicU64::new(1),
            ready: Mutex::new(ready),
            events: Mutex::new(events),
            sends_reminders: false,
        })
    }

    /// Sends empty lines, which the agent ignores, while a caller waits for a script. Some serial ports raise a single
    /// interrupt for many bytes. If the guest does not read all of them then (Linux reads 256), the remaining bytes stay in
    /// the port until more bytes arrive.
    pub(super) fn remind(&mut self) {
        self.sends_reminders = true;
    }

    /// Returns whether empty lines are sent: see [`Self::remind`].
    pub(super) fn reminds(&self) -> bool {
        self.sends_reminders
    }

    /// Waits for the end of a script. Calls `is_lost` periodically, which returns true if the guest is lost.
    pub(super) fn wait(
        &self,
        job: ScriptJob,
        timeout: Duration,
        is_lost: impl Fn() -> bool,
    ) -> Result<ScriptOutput, AgentChannelError> {
        let what = || format!("the end of `{}`", job.script);
        let started = Instant::now();
        let mut looked = Duration::ZERO;
        loop {
            let waited = started.elapsed();
            let left = timeout.saturating_sub(waited);
            let reminder = REMINDERS.iter().find(|(until, _)| waited < *until);
            let reminder = reminder
                .filter(|_| self.sends_reminders)
                .map(|(_, turn)| *turn);
            let turn = reminder.unwrap_or(LOSS_CHECK_INTERVAL);
            if turn >= left {
                return receive(&job.result, left, what).map_err(|error| match error {
                    AgentChannelError::Timeout { what, .. } => AgentChannelError::Timeout {
                        what,
                        timeout,
                        life: Some(Box::new(self.inquire())),
                    },
                    other => other,
                });
            }
            match receive(&job.result, turn, what) {
                Err(AgentChannelError::Timeout { .. }) => {}
                result => return result,
            }
            if reminder.is_some() {
                let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
                // A failure needs no handling here: the listener thread detects a closed connection.
                let _ = out.write_all(b"\n");
            }
            if waited >= looked + LOSS_CHECK_INTERVAL {
                looked = waited;
                if is_lost() {
                    return Err(AgentChannelError::Lost { what: what() });
                }
            }
        }
    }

    fn inquire(&self) -> SignOfLife {
        let answer = |job: ScriptJob| job.result.recv_timeout(INQUIRY_TIMEOUT).ok();
        match self.start(INQUIRY).ok().and_then(answer) {
            Some(ScriptOutput { text, .. }) => SignOfLife::Answered(text),
            None => SignOfLife::None,
        }
    }

    pub(super) fn await_ready(&self, timeout: Duration) -> Result<(), AgentChannelError> {
        let ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        receive(&ready, timeout, || "the guest to come up".to_owned())
    }

    pub(super) fn start(&self, script: &str) -> Result<ScriptJob, AgentChannelError> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (sender, result) = mpsc::channel();
        let running = PendingScript {
            text: Vec::new(),
            result: sender,
        };
        lock(&self.running).insert(id, running);
        let line = format!("run {id} {}\n", BASE64.encode(script));
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        out.write_all(line.as_bytes())
            .map_err(|_| AgentChannelError::Closed {
                what: format!("the start of `{script}`"),
            })?;
        Ok(ScriptJob {
            script: script.to_owned(),
            result,
        })
    }

    pub(super) fn next_event(&self, timeout: Duration) -> Result<String, AgentChannelError> {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        receive(&events, timeout, || "an event".to_owned())
    }

    pub(super) fn pending_events(&self) -> Vec<String> {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.try_iter().collect()
    }
}

impl Drop for AgentChannel {
    fn drop(&mut self) {
        // Shuts the connection down, which ends the listener thread even if the VMM still runs.
        let out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = out.shutdown(std::net::Shutdown::Both);
    }
}

fn lock(
    jobs: &Mutex<HashMap<u64, PendingScript>>,
) -> std::sync::MutexGuard<'_, HashMap<u64, PendingScript>> {
    jobs.lock().unwrap_or_else(PoisonError::into_inner)
}

fn receive<T>(
    from: &Receiver<T>,
    timeout: Duration,
    what: impl Fn() -> String,
) -> Result<T, AgentChannelError> {
    from.recv_timeout(timeout).map_err(|error| match error {
        RecvTimeoutError::Timeout => AgentChannelError::Timeout {
            what: what(),
            timeout,
            life: None,
        },
        RecvTimeoutError::Disconnected => AgentChannelError::Closed { what: what() },
    })
}

fn listen(input: UnixStream, jobs: &RunningJobs, ready: &Sender<()>, events: &Sender<String>) {
    let mut lines = BufReader::new(input);
    let mut line = Vec::new();
    loop {
        line.clear();
        match lines.read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => break,
            // The connection has ended in the middle of a line.
            Ok(_) if !line.ends_with(b"\n") => break,
            Ok(_) => {}
        }
        let text = String::from_utf8_lossy(&line);
        // The port turns "\n" into "\r\n". Firmware may have left characters before the line.
        handle_line(text.trim(), jobs, ready, events);
    }
    // No answers will arrive any more. Dropping the senders wakes waiting threads.
    lock(jobs).clear();
}

fn handle_line(line: &str, jobs: &RunningJobs, ready: &Sender<()>, events: &Sender<String>) {
    let (verb, rest) = line.split_once(' ').unwrap_or((line, ""));
    // A send fails only if the guest was dropped, and then nothing waits for the answer.
    match verb {
        "ready" => {
            // The guest has rebooted, so scripts that were started before will not end.
            lock(jobs).clear();
            let _ = ready.send(());
        }
        "event" => {
            let _ = events.send(rest.to_owned());
        }
        "out" => {
            if let Some((id, piece)) = rest.split_once(' ')
                && let Ok(id) = id.parse::<u64>()
                && let Some(running) = lock(jobs).get_mut(&id)
            {
                // If the text cannot be decoded, it is kept as it is.
                let text = BASE64.decode(piece).unwrap_or_else(|_| piece.into());
                running.text.extend(text);
            }
        }
        "end" => {
            if let Some((id, status)) = rest.split_once(' ')
                && let (Ok(id), Ok(status)) = (id.parse::<u64>(), status.parse())
                && let Some(running) = lock(jobs).remove(&id)
            {
                let text = String::from_utf8_lossy(&running.text).into_owned();
                let _ = running.result.send(ScriptOutput { status, text });
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(180);

    fn line() -> (AgentChannel, UnixStream) {
        let (ours, theirs) = UnixStream::pair().expect("socket pair");
        (AgentChannel::new(ours).expect("channel"), theirs)
    }

    #[test]
    fn output_of_two_jobs_is_kept_apart() {
        let (channel, mut guest) = line();
        let first = channel.start("one").expect("start");
        let second = channel.start("two").expect("start");
        let (a, b) = (BASE64.encode("aa"), BASE64.encode("b"));
        let console_output =
            format!("out 1 {a}\r\nout 2 {b}\r\nout 1 {a}\r\nend 2 3\r\nend 1 0\r\n");
        guest.write_all(console_output.as_bytes()).expect("write");
        let output = |status, text: &str| ScriptOutput {
            status,
            text: text.to_owned(),
        };
        assert_eq!(
            channel.wait(first, TIMEOUT, || false).expect("first"),
            output(0, "aaaa")
        );
        assert_eq!(
            channel.wait(second, TIMEOUT, || false).expect("second"),
            output(3, "b")
        );
    }

    #[test]
    fn a_guest_is_reminded_until_its_script_ends() {
        let (mut channel, mut guest) = line();
        channel.remind();
        let job = channel.start("long").expect("start");
        let answers = std::thread::spawn(move || {
            let mut lines = BufReader::new(guest.try_clone().expect("clone")).lines();
            let mut next = || lines.next().expect("a line").expect("read");
            assert!(next().starts_with("run 1 "));
            assert_eq!([next(), next()], ["", ""]);
            guest.write_all(b"end 1 0\r\n").expect("write");
            guest
        });
        assert_eq!(
            channel.wait(job, TIMEOUT, || false).expect("an end").status,
            0
        );
        let mut guest = answers.join().expect("answers");
        let job = channel.start("never").expect("start");
        let timeout = Duration::from_millis(120);
        let answers = std::thread::spawn(move || {
            let mut lines = BufReader::new(guest.try_clone().expect("clone")).lines();
            while !lines
                .next()
                .expect("a line")
                .expect("read")
                .starts_with("run 3 ")
            {}
            let output = BASE64.encode("no interrupts");
            let answer = format!("out 3 {output}\r\nend 3 0\r\n");
            guest.write_all(answer.as_bytes()).expect("write");
            guest
        });
        let error = channel
            .wait(job, timeout, || false)
            .expect_err("no end")
            .to_string();
        assert!(error.contains("120ms in vain"), "{error}");
        assert!(
            error.ends_with("It ran another script afterwards:\nno interrupts"),
            "{error}"
        );
        let _guest = answers.join().expect("answers");
    }

    #[test]
    fn a_dead_guest_ends_every_wait() {
        let (channel, guest) = line();
        let job = channel.start("sleep").expect("start");
        drop(guest);
        assert!(matches!(
            channel.wait(job, TIMEOUT, || false),
            Err(AgentChannelError::Closed { .. })
        ));
        assert!(matches!(
            channel.next_event(TIMEOUT),
            Err(AgentChannelError::Closed { .. })
        ));
        assert!(matches!(
            channel.await_ready(TIMEOUT),
            Err(AgentChannelError::Closed { .. })
        ));
    }

    #[test]
    fn a_truncated_line_is_ignored() {
        let (channel, mut guest) = line();
        guest
            .write_all(b"event record 41\r\nevent record 4")
            .expect("write");
        drop(guest);
        assert_eq!(channel.next_event(TIMEOUT).expect("event"), "record 41");
        assert!(matches!(
            channel.next_event(TIMEOUT),
            Err(AgentChannelError::Closed { .. })
        ));
    }

    #[test]
    fn a_reboot_ends_earlier_jobs() {
        let (channel, mut guest) = line();
        let job = channel.start("reboot").expect("start");
        guest.write_all(b"ready\r\n").expect("write");
        channel.await_ready(TIMEOUT).expect("ready");
        assert!(matches!(
            channel.wait(job, TIMEOUT, || false),
            Err(AgentChannelError::Closed { .. })
        ));
    }

    #[test]
    fn noise_is_ignored() {
        let (channel, mut guest) = line();
        guest
            .write_all(b"\xff\xfe garbage\r\nend x y\r\nout 9\r\nend 77 0\r\nevent hello there\r\n")
            .expect("write");
        assert_eq!(channel.next_event(TIMEOUT).expect("event"), "hello there");
    }
}
