//! The terminal of `nvme-mpt top`, its keys, and the thread that polls the server.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::time::Duration;

use jiff::Timestamp;
use nvme_guest::threads::start_thread;
use nvme_mpt_memory::clock;
use nvme_mpt_server::control::{self, ControlError};
use nvme_mpt_vmm::report;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use thiserror::Error;

use super::{TopCommand, TopSample, TopView};

/// Interval at which keys and samples are polled.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Error of `nvme-mpt top`.
#[derive(Debug, Error)]
pub enum TopError {
    /// Standard output is not a terminal.
    #[error("Standard output is not a terminal: use --once, which prints a table")]
    NoTerminal,
    /// The terminal cannot be used.
    #[error("Cannot use the terminal; use --once, which prints a table")]
    Terminal(#[source] io::Error),
    /// The thread cannot be started.
    #[error("Cannot start the thread that asks the server")]
    Thread(#[source] io::Error),
    /// The server does not answer.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The table cannot be printed.
    #[error(transparent)]
    Print(io::Error),
}

fn take_sample(control: &Path) -> Result<TopSample, ControlError> {
    let functions = control::query_functions(control)?;
    let stats = control::query_stats(control)?;
    Ok(TopSample {
        taken_at: clock::monotonic(),
        time: Timestamp::now(),
        stats,
        functions,
    })
}

/// Prints the rates of one interval as a table.
///
/// # Errors
/// The server does not answer, or the table cannot be printed.
pub fn run_once(
    control: &Path,
    mut view: TopView,
    interval: Duration,
    out: &mut dyn Write,
) -> Result<(), TopError> {
    view.add_sample(Ok(take_sample(control)?));
    clock::sleep(interval);
    view.add_sample(Ok(take_sample(control)?));
    write!(out, "{}", view.table()).map_err(TopError::Print)
}

/// Shows the display in the terminal until the user quits.
///
/// # Errors
/// The server does not answer, or the terminal cannot be used.
pub fn run(control: PathBuf, mut view: TopView, interval: Duration) -> Result<(), TopError> {
    if !io::stdout().is_terminal() {
        return Err(TopError::NoTerminal);
    }
    // The first sample precedes any change of the screen, so that an error is printed normally.
    view.add_sample(Ok(take_sample(&control)?));
    let samples = poll_server(control, interval).map_err(TopError::Thread)?;
    let mut terminal = ratatui::try_init().map_err(TopError::Terminal)?;
    let shown = run_loop(&mut terminal, &mut view, &samples);
    ratatui::restore();
    shown.map_err(TopError::Terminal)
}

/// Polls the server on a separate thread, so that a slow answer does not delay the handling of keys.
fn poll_server(
    control: PathBuf,
    interval: Duration,
) -> io::Result<Receiver<Result<TopSample, String>>> {
    let (sender, samples) = mpsc::sync_channel(1);
    let work = move || {
        let mut next = clock::monotonic() + interval;
        loop {
            clock::sleep(next.saturating_sub(clock::monotonic()));
            let sample = take_sample(&control).map_err(|error| report::chain(&error));
            if sender.send(sample).is_err() {
                return;
            }
            next = (next + interval).max(clock::monotonic());
        }
    };
    start_thread("top", work)?;
    Ok(samples)
}

fn run_loop(
    terminal: &mut ratatui::DefaultTerminal,
    view: &mut TopView,
    samples: &Receiver<Result<TopSample, String>>,
) -> io::Result<()> {
    let mut changed = true;
    loop {
        match samples.try_recv() {
            Ok(sample) => {
                view.add_sample(sample);
                changed = true;
            }
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => {
                return Err(io::Error::other("The thread that asks the server ended"));
            }
        }
        if changed {
            terminal.draw(|frame| view.draw(frame))?;
            changed = false;
        }
        if event::poll(POLL_INTERVAL)? {
            changed = true;
            if let Event::Key(key) = event::read()?
                && key.kind == KeyEventKind::Press
            {
                match key_action(key) {
                    KeyAction::End => return Ok(()),
                    KeyAction::Press(key) => view.handle_command(key),
                    KeyAction::None => {}
                }
            }
        }
    }
}

/// Action of a pressed key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeyAction {
    End,
    Press(TopCommand),
    None,
}

fn key_action(key: KeyEvent) -> KeyAction {
    match key.code {
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => KeyAction::End,
        KeyCode::Char('q') | KeyCode::Esc => KeyAction::End,
        KeyCode::Tab => KeyAction::Press(TopCommand::Subject),
        KeyCode::Left => KeyAction::Press(TopCommand::Sort(-1)),
        KeyCode::Right => KeyAction::Press(TopCommand::Sort(1)),
        KeyCode::Char('r') => KeyAction::Press(TopCommand::Reverse),
        KeyCode::Up => KeyAction::Press(TopCommand::Scroll(-1)),
        KeyCode::Down => KeyAction::Press(TopCommand::Scroll(1)),
        KeyCode::PageUp => KeyAction::Press(TopCommand::Scroll(-10)),
        KeyCode::PageDown => KeyAction::Press(TopCommand::Scroll(10)),
        KeyCode::Char(' ') => KeyAction::Press(TopCommand::Pause),
        _ => KeyAction::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_their_meaning() {
        let key = |code| key_action(KeyEvent::new(code, KeyModifiers::NONE));
        assert_eq!(key(KeyCode::Char('q')), KeyAction::End);
        assert_eq!(key(KeyCode::Tab), KeyAction::Press(TopCommand::Subject));
        assert_eq!(key(KeyCode::Left), KeyAction::Press(TopCommand::Sort(-1)));
        assert_eq!(key(KeyCode::Char('c')), KeyAction::None);
        let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(key_action(interrupt), KeyAction::End);
    }
}
