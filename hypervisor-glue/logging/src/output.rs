//! Standard output, with a timeout for its reader.

use std::io::{self, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use super::writer_thread::start_writer_thread;

/// Timeout for the reader of standard output in [`Write::flush`].
const READER_TIMEOUT: Duration = Duration::from_secs(1);

/// Standard output that a separate thread writes. [`flush`](Write::flush) waits at most one second for the reader. A reader
/// that continues later still gets all output.
#[derive(Debug)]
pub struct ThreadedOutput<W> {
    out: Option<W>,
    thread: Option<OutputThread>,
    unsent: Vec<u8>,
}

#[derive(Debug)]
struct OutputThread {
    texts: Sender<Vec<u8>>,
    results: Receiver<io::Result<()>>,
    /// True after a flush has timed out. Later flushes do not wait for the reader.
    has_timed_out: bool,
}

impl<W: Write + Send + 'static> ThreadedOutput<W> {
    /// Creates an output, whose thread starts with the first [`flush`](Write::flush).
    pub fn new(out: W) -> Self {
        Self {
            out: Some(out),
            thread: None,
            unsent: Vec::new(),
        }
    }

    fn start(&mut self) -> io::Result<()> {
        let Some(mut out) = self.out.take() else {
            return Ok(());
        };
        let (texts, receiver) = channel::<Vec<u8>>();
        let (outbox, results) = channel();
        let write = move || {
            for text in receiver {
                let written = out.write_all(&text).and_then(|()| out.flush());
                // The send fails only while the process exits.
                let _ = outbox.send(written);
            }
        };
        start_writer_thread("output", write)?;
        self.thread = Some(OutputThread {
            texts,
            results,
            has_timed_out: false,
        });
        Ok(())
    }
}

impl<W: Write + Send + 'static> Write for ThreadedOutput<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.unsent.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.start()?;
        let Some(thread) = &mut self.thread else {
            return Ok(());
        };
        // The thread has ended, which only a panic can cause before the output is dropped.
        let ended = || io::Error::other("the thread of the output has ended");
        let text = std::mem::take(&mut self.unsent);
        thread.texts.send(text).map_err(|_| ended())?;
        if thread.has_timed_out {
            return Ok(());
        }
        match thread.results.recv_timeout(READER_TIMEOUT) {
            Ok(written) => written,
            Err(RecvTimeoutError::Disconnected) => Err(ended()),
            Err(RecvTimeoutError::Timeout) => {
                thread.has_timed_out = true;
                log::warn!(
                    "Standard output is full: this process no longer waits for its reader, which has to read what \
                     was printed"
                );
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn a_stalled_reader_blocks_no_writer_and_gets_all_output_later() {
        let (mut reader, writer) = io::pipe().unwrap();
        let mut out = ThreadedOutput::new(writer);
        // The text is longer than the default capacity of a pipe, so the writer waits for the reader.
        let text = "x".repeat(1 << 20);
        out.write_all(text.as_bytes()).unwrap();
        out.flush().unwrap();
        out.write_all(b"ready\n").unwrap();
        out.flush().unwrap();
        let mut printed = vec![0; text.len() + 6];
        reader.read_exact(&mut printed).unwrap();
        assert!(printed.ends_with(b"xready\n"));
    }

    #[test]
    fn output_to_a_closed_reader_is_an_error() {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let mut out = ThreadedOutput::new(writer);
        out.write_all(b"ready\n").unwrap();
        let error = out.flush().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
