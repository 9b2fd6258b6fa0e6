//! One side of a lease protocol session, as a list of lines.
//!
//! Each line of the input is a message. The line's first byte chooses what is sent in addition:
//!
//! | byte | |
//! |---|---|
//! | `+` | a memory file |
//! | `*` | an eventfd |
//! | `=` | a memory file twice, and an eventfd |
//! | `!` | nothing, but the length in the header is twice the line's length |
//! | `#` | nothing, and the header is omitted |
//! | other | nothing, and this byte is the first byte of the message |

use std::fs::File;
use std::io::{self, PipeReader, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::LazyLock;

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// Size of the memory file in bytes.
const FILE: u64 = 1 << 20;

static MEMORY: LazyLock<File> = LazyLock::new(|| {
    nvme_mpt_memory::memfd(c"fuzz", FILE)
        .expect("memory")
        .into()
});
/// A readable descriptor and a pipe that hung up, which signal the end of a process.
static SIGNS: LazyLock<(EventFd, PipeReader)> = LazyLock::new(|| {
    let readable = EventFd::new(EFD_NONBLOCK).expect("eventfd");
    readable.write(1).expect("a counter");
    let (hung_up, _) = io::pipe().expect("a pipe");
    (readable, hung_up)
});
static EVENT: LazyLock<EventFd> = LazyLock::new(|| EventFd::new(EFD_NONBLOCK).expect("eventfd"));

/// Sends all lines, then shuts down the sending side.
pub(crate) fn send_lines(stream: &UnixStream, input: &[u8]) {
    for line in input.split(|byte| *byte == b'\n') {
        let Some((first, rest)) = line.split_first() else {
            continue;
        };
        let (memory, event) = (MEMORY.as_raw_fd(), EVENT.as_raw_fd());
        let (ended, hung_up) = &*SIGNS;
        let (fds, text): (&[RawFd], &[u8]) = match first {
            b'+' => (&[memory], rest),
            b'*' => (&[event], rest),
            b'=' => (&[memory, memory, event], rest),
            b'&' => (
                &[
                    memory,
                    memory,
                    event,
                    ended.as_raw_fd(),
                    hung_up.as_raw_fd(),
                ],
                rest,
            ),
            b'!' | b'#' => (&[], rest),
            _ => (&[], line),
        };
        let length = match first {
            b'!' => text.len() * 2,
            _ => text.len(),
        };
        let mut message = Vec::new();
        if *first != b'#' {
            message.extend((length as u32).to_le_bytes());
            message.extend((fds.len() as u32).to_le_bytes());
        }
        message.extend(text);
        // The other side may have disconnected.
        if message.is_empty() || stream.send_with_fds(&[&message[..]], fds).is_err() {
            break;
        }
    }
    let _ = stream.shutdown(Shutdown::Write);
}

/// Reads until the other side disconnects.
pub(crate) fn listen(mut stream: &UnixStream) {
    let mut replies = Vec::new();
    let _ = stream.read_to_end(&mut replies);
    let _ = stream.flush();
}
