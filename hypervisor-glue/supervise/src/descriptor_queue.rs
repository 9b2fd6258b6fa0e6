//! Stores many file descriptors in the queue of one socket pair (`SCM_RIGHTS`), of which the supervisor stores only the two
//! ends.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::setsockopt_impl;
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::SetStruct;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, socketpair, sockopt,
};

use crate::datagram::{self, DESCRIPTORS_MAX, ReceivedDatagram};
use crate::error::FdStoreError;

/// Requested size of the queue in bytes, of which the kernel counts about 1 KiB for each message.
const QUEUE_BYTES: usize = 1 << 20;

/// Bytes of the queue that [`DescriptorQueue::put`] leaves free for [`DescriptorQueue::retain`], which copies one message
/// at a time.
const RESERVED_BYTES: usize = 4 << 10;

/// Maximum number of messages in a queue.
const MESSAGES_MAX: usize = 1 << 16;

/// Size of a message's data in bytes. The data is the message's number, under which its descriptors are stored.
const NUMBER_BYTES: usize = 8;

/// Socket option `SO_PEEK_OFF`: the offset in bytes at which the next peek begins.
#[derive(Clone, Copy)]
struct PeekOffset;

setsockopt_impl!(
    PeekOffset,
    libc::SOL_SOCKET,
    libc::SO_PEEK_OFF,
    i32,
    SetStruct<i32>
);

/// Descriptors that outlive the process in the queue of a socket pair, in numbered messages.
///
/// The supervisor stores both [`ends`](Self::ends) of the socket pair under one name. So a queue takes two of the
/// supervisor's descriptors, for any number of messages. Of several messages with the same number, only the last one is
/// valid. Only one process may use a queue at a time.
///
/// A process may die between any two system calls of a method. Each message is then either completely in the queue or
/// absent, and [`retain`](Self::retain) has lost no message that it should retain.
#[derive(Debug)]
pub struct DescriptorQueue {
    writer: OwnedFd,
    reader: OwnedFd,
}

impl DescriptorQueue {
    /// Creates an empty queue.
    ///
    /// # Errors
    ///
    /// The kernel makes no socket pair.
    pub fn new() -> Result<Self, FdStoreError> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let (writer, reader) = pair.map_err(|error| {
            FdStoreError::system("create the sockets of a descriptor store", error)
        })?;
        let queue = Self { writer, reader };
        queue.set_send_buffer(false)?;
        Ok(queue)
    }

    /// Opens a queue from the two ends of its socket pair, in any order, as received from a supervisor.
    ///
    /// The end with messages in its queue is the reader. If neither end has messages, either may be the reader.
    ///
    /// # Errors
    ///
    /// The descriptors are not the two ends of a queue.
    pub fn from_persisted(ends: Vec<OwnedFd>) -> Result<Self, FdStoreError> {
        let no_bag = |reason| FdStoreError::NotDescriptorQueue { reason };
        let Ok([first, second]) = <[OwnedFd; 2]>::try_from(ends) else {
            return Err(no_bag("it needs two sockets"));
        };
        let mut empty = [true; 2];
        for (end, empty) in [&first, &second].into_iter().zip(&mut empty) {
            let is_end = sockopt::socket_domain(end) == Ok(AddressFamily::UNIX)
                && sockopt::socket_type(end) == Ok(SocketType::SEQPACKET);
            if !is_end {
                return Err(no_bag("one of them is not a SOCK_SEQPACKET socket"));
            }
            *empty = rustix::io::ioctl_fionread(end)
                .map_err(|error| FdStoreError::system("look into a descriptor store", error))?
                == 0;
        }
        let (reader, writer) = match empty {
            [false, false] => return Err(no_bag("both sockets have messages")),
            [false, true] => (first, second),
            [true, _] => (second, first),
        };
        let queue = Self { writer, reader };
        queue.set_send_buffer(false)?;
        Ok(queue)
    }

    /// Returns both ends of the socket pair, which the supervisor must store.
    #[must_use]
    pub fn ends(&self) -> [BorrowedFd<'_>; 2] {
        [self.writer.as_fd(), self.reader.as_fd()]
    }

    /// Adds a message with at most 253 descriptors. The message replaces earlier messages with the same number.
    ///
    /// # Errors
    ///
    /// The queue is full, or the process's user has too many descriptors in the queues of sockets. After an error, the queue is
    /// unchanged.
    pub fn put(&self, number: u64, descriptors: &[BorrowedFd<'_>]) -> Result<(), FdStoreError> {
        let count = descriptors.len();
        if count > DESCRIPTORS_MAX {
            return Err(FdStoreError::TooMany { count });
        }
        let bytes = number.to_le_bytes();
        datagram::send(&self.writer, &bytes, descriptors, SendFlags::DONTWAIT).map_err(|error| {
            match error {
                Errno::AGAIN => FdStoreError::Full,
                Errno::TOOMANYREFS => FdStoreError::TooManyInQueues,
                error => FdStoreError::system("put a message into a descriptor store", error),
            }
        })
    }

    /// Returns the last message of each number, sorted by number. All messages stay in the queue.
    ///
    /// # Errors
    ///
    /// The process's limit of open descriptors is too low, or the queue has more than 65,536 messages.
    pub fn contents(&mut self) -> Result<Vec<(u64, Vec<OwnedFd>)>, FdStoreError> {
        let mut last = BTreeMap::new();
        self.visit_messages(|number, descriptors| {
            last.insert(number, descriptors);
        })?;
        Ok(last.into_iter().collect())
    }

    /// Removes the messages for whose number `is_retained` returns false, and messages that were replaced. Returns the number
    /// of messages left.
    ///
    /// # Errors
    ///
    /// See [`put`](Self::put) and [`contents`](Self::contents). No retained message is lost.
    pub fn retain(&mut self, is_retained: impl Fn(u64) -> bool) -> Result<usize, FdStoreError> {
        self.retain_until(is_retained, || false)
    }

    /// Does the work of `retain`. Calls `stops` before each change of the queue, and returns early once it returns true, as
    /// if the process died there.
    ///
    /// A retained message is copied to the back before it is removed from the front. So after a stop, the queue contains
    /// each retained message once or twice.
    fn retain_until(
        &mut self,
        is_retained: impl Fn(u64) -> bool,
        mut stops: impl FnMut() -> bool,
    ) -> Result<usize, FdStoreError> {
        let (mut count, mut last) = (0, BTreeMap::new());
        self.visit_messages(|number, _| {
            last.insert(number, count);
            count += 1;
        })?;
        self.set_send_buffer(true)?;
        let mut move_all = || {
            for at in 0..count {
                let Some((number, descriptors)) = self.next(RecvFlags::PEEK)? else {
                    break;
                };
                if is_retained(number) && last.get(&number) == Some(&at) {
                    if stops() {
                        return Ok(());
                    }
                    let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
                    self.put(number, &descriptors)?;
                }
                drop(descriptors);
                if stops() {
                    return Ok(());
                }
                self.next(RecvFlags::empty())?;
            }
            Ok(())
        };
        let moved = move_all();
        self.set_send_buffer(false)?;
        moved?;
        Ok(last
            .into_keys()
            .filter(|number| is_retained(*number))
            .count())
    }

    /// Calls `take` with each message, oldest first. The messages stay in the queue.
    fn visit_messages(
        &mut self,
        mut take: impl FnMut(u64, Vec<OwnedFd>),
    ) -> Result<(), FdStoreError> {
        self.peek_from(0)?;
        let read = (0..=MESSAGES_MAX).try_fold(false, |ended, _| match ended {
            true => Ok(true),
            false => self.next(RecvFlags::PEEK).map(|message| match message {
                None => true,
                Some((number, descriptors)) => {
                    take(number, descriptors);
                    false
                }
            }),
        });
        self.peek_from(-1)?;
        match read? {
            true => Ok(()),
            false => Err(FdStoreError::TooManyMessages {
                limit: MESSAGES_MAX,
            }),
        }
    }

    /// Receives or peeks the next message, depending on `flags`; `None` at the end of the queue.
    fn next(&self, flags: RecvFlags) -> Result<Option<(u64, Vec<OwnedFd>)>, FdStoreError> {
        let mut number = [0; NUMBER_BYTES];
        match datagram::receive(&self.reader, &mut number, flags | RecvFlags::DONTWAIT) {
            Ok(ReceivedDatagram {
                bytes: NUMBER_BYTES,
                descriptors,
                is_truncated: is_cut,
            }) => match is_cut && flags.contains(RecvFlags::PEEK) {
                true => Err(FdStoreError::Truncated),
                false => Ok(Some((u64::from_le_bytes(number), descriptors))),
            },
            Ok(_) => Err(FdStoreError::NotDescriptorQueue {
                reason: "a message has no number",
            }),
            Err(Errno::AGAIN) => Ok(None),
            Err(error) => Err(FdStoreError::system("read a descriptor store", error)),
        }
    }

    /// Sets the offset of the next peek, in bytes; -1 makes every peek begin at the front.
    fn peek_from(&self, offset: i32) -> Result<(), FdStoreError> {
        setsockopt(&self.reader, PeekOffset, &offset).map_err(|error| {
            FdStoreError::system("set the place to read a descriptor store from", error)
        })
    }

    /// Sets the queue's size to the maximum for this process. Subtracts [`RESERVED_BYTES`] if `all` is false.
    fn set_send_buffer(&self, all: bool) -> Result<(), FdStoreError> {
        let set = |size| {
            sockopt::set_socket_send_buffer_size_force(&self.writer, size)
                .or_else(|_| sockopt::set_socket_send_buffer_size(&self.writer, size))
        };
        let most = || {
            set(QUEUE_BYTES)?;
            // The kernel doubles the requested size.
            let size = sockopt::socket_send_buffer_size(&self.writer)? / 2;
            match all {
                true => Ok(()),
                false => set(size.saturating_sub(RESERVED_BYTES)),
            }
        };
        most()
            .map_err(|error| FdStoreError::system("set the capacity of a descriptor store", error))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use proptest::prelude::*;
    use rustix::fs::{MemfdFlags, fstat, memfd_create};

    use super::*;

    fn file() -> OwnedFd {
        memfd_create("bag", MemfdFlags::CLOEXEC).unwrap()
    }

    fn identity(descriptor: &OwnedFd) -> u64 {
        fstat(descriptor).unwrap().st_ino
    }

    /// Expected content of a queue: the identities of the descriptors of each message, by the message's number.
    type Model = BTreeMap<u64, Vec<u64>>;

    fn put_messages(queue: &DescriptorQueue, model: &mut Model, number: u64, count: usize) {
        let files: Vec<_> = (0..count).map(|_| file()).collect();
        let borrowed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        queue.put(number, &borrowed).unwrap();
        model.insert(number, files.iter().map(identity).collect());
    }

    fn read(queue: &mut DescriptorQueue) -> Model {
        let identities = |(number, files): (u64, Vec<OwnedFd>)| {
            let files = files.iter().map(identity).collect();
            (number, files)
        };
        queue
            .contents()
            .unwrap()
            .into_iter()
            .map(identities)
            .collect()
    }

    /// Restores the queue from copies of its ends, as a successor process does. `swap` exchanges the two ends.
    fn reopen(queue: DescriptorQueue, swap: bool) -> DescriptorQueue {
        let mut ends = queue.ends().map(|end| end.try_clone_to_owned().unwrap());
        drop(queue);
        if swap {
            ends.reverse();
        }
        DescriptorQueue::from_persisted(ends.into()).unwrap()
    }

    fn messages(queue: &mut DescriptorQueue) -> usize {
        let mut count = 0;
        queue.visit_messages(|_, _| count += 1).unwrap();
        count
    }

    #[test]
    fn the_stored_form_of_messages_is_read() {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let (writer, reader) = pair.unwrap();
        let files = [file(), file(), file()];
        let numbers = [
            [3, 0, 0, 0, 0, 0, 0, 0],
            [1, 0, 0, 0, 0, 0, 0, 0x80],
            [3, 0, 0, 0, 0, 0, 0, 0],
        ];
        for (number, file) in numbers.iter().zip(&files) {
            datagram::send(&writer, number, &[file.as_fd()], SendFlags::empty()).unwrap();
        }
        let mut queue = DescriptorQueue::from_persisted(vec![writer, reader]).unwrap();
        let [_, second, last] = files.each_ref().map(identity);
        let left = Model::from([(3, vec![last]), (0x8000_0000_0000_0001, vec![second])]);
        assert_eq!(read(&mut queue), left);
    }

    #[derive(Clone, Debug)]
    enum DescriptorQueueStep {
        Put(u64, usize),
        Retain(BTreeSet<u64>),
        /// Calls `retain` for these numbers, as in a process that dies after the given number of changes of the queue. Then
        /// another process restores the queue.
        Die(BTreeSet<u64>, usize),
        Reopen(bool),
    }

    fn step() -> impl Strategy<Value = DescriptorQueueStep> {
        let numbers = || proptest::collection::btree_set(0..6_u64, 0..6);
        prop_oneof![
            4 => (0..6_u64, 0..4_usize).prop_map(|(number, count)| DescriptorQueueStep::Put(number, count)),
            1 => numbers().prop_map(DescriptorQueueStep::Retain),
            1 => (numbers(), 0..12_usize).prop_map(|(numbers, at)| DescriptorQueueStep::Die(numbers, at)),
            1 => any::<bool>().prop_map(DescriptorQueueStep::Reopen),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_descriptor_queue_behaves_like_a_map(steps in proptest::collection::vec(step(), 0..40)) {
            let mut queue = DescriptorQueue::new().unwrap();
            let mut model = Model::new();
            for step in steps {
                match step {
                    DescriptorQueueStep::Put(number, count) => put_messages(&queue, &mut model, number, count),
                    DescriptorQueueStep::Retain(numbers) => {
                        queue.retain(|number| numbers.contains(&number)).unwrap();
                        model.retain(|number, _| numbers.contains(number));
                        prop_assert_eq!(messages(&mut queue), model.len());
                    }
                    DescriptorQueueStep::Die(numbers, at) => {
                        let mut left = at;
                        let stops = || { let stop = left == 0; left = left.saturating_sub(1); stop };
                        queue.retain_until(|number| numbers.contains(&number), stops).unwrap();
                        queue = reopen(queue, at % 2 == 0);
                        let all = read(&mut queue);
                        for (number, files) in &model {
                            let found = all.get(number);
                            prop_assert!(found == Some(files) || found.is_none() || !numbers.contains(number));
                            prop_assert!(found.is_some() || !numbers.contains(number));
                        }
                        // `retain` was interrupted, so messages that it had to remove may remain, including replaced
                        // messages.
                        queue.retain(|number| numbers.contains(&number)).unwrap();
                        model.retain(|number, _| numbers.contains(number));
                    }
                    DescriptorQueueStep::Reopen(swap) => queue = reopen(queue, swap),
                }
                prop_assert_eq!(&read(&mut queue), &model);
            }
        }
    }

    #[test]
    fn an_interrupted_retain_loses_nothing() {
        let is_retained = |number| number % 2 == 0;
        for at in 0.. {
            let (mut queue, mut model) = (DescriptorQueue::new().unwrap(), Model::new());
            for number in [0, 1, 2, 0, 3, 4, 2] {
                put_messages(&queue, &mut model, number, 2);
            }
            let (mut changes, mut stopped) = (0, false);
            let stops = || {
                stopped = changes == at;
                changes += 1;
                stopped
            };
            queue.retain_until(is_retained, stops).unwrap();
            let mut queue = reopen(queue, false);
            model.retain(|number, _| is_retained(*number));
            let mut found = read(&mut queue);
            found.retain(|number, _| is_retained(*number));
            assert_eq!(found, model, "stopped before change {at}");
            queue.retain(is_retained).unwrap();
            assert_eq!(read(&mut queue), model, "stopped before change {at}");
            assert_eq!(messages(&mut queue), 3);
            if !stopped {
                // An uninterrupted `retain` makes ten changes: it copies the three messages that it retains, and removes all
                // seven old ones.
                assert_eq!(changes, 10);
                break;
            }
        }
    }

    #[test]
    fn a_full_queue_reports_it_and_can_still_retain() {
        let mut queue = DescriptorQueue::new().unwrap();
        // A small socket buffer fills quickly.
        sockopt::set_socket_send_buffer_size(&queue.writer, 4096).unwrap();
        let mut model = Model::new();
        let shared = file();
        let mut number = 0;
        let full = loop {
            match queue.put(number, &[shared.as_fd()]) {
                Ok(()) => model.insert(number, vec![identity(&shared)]),
                Err(error) => break error,
            };
            number += 1;
        };
        assert!(matches!(full, FdStoreError::Full), "{full}");
        assert!(number > 1);
        assert_eq!(read(&mut queue), model);
        queue.retain(|_| true).unwrap();
        assert_eq!(read(&mut queue), model);
    }

    #[test]
    fn the_reserve_has_room_for_a_copy_of_the_largest_message() {
        let mut queue = DescriptorQueue::new().unwrap();
        let shared = file();
        let most = [shared.as_fd(); DESCRIPTORS_MAX];
        // Descriptors occupy no buffer space. So the queue can hold a few messages with many descriptors among many small
        // messages.
        queue.put(0, &most).unwrap();
        let mut number = 1;
        while queue.put(number, &[]).is_ok() {
            number += 1;
        }
        assert!(matches!(queue.put(number, &most), Err(FdStoreError::Full)));
        queue.retain(|_| true).unwrap();
        assert_eq!(queue.contents().unwrap().len() as u64, number);
        // `put` must not use the reserve.
        assert!(matches!(queue.put(number, &[]), Err(FdStoreError::Full)));
        queue.retain(|number| number % 2 == 0).unwrap();
        queue.put(number, &most).unwrap();
    }

    #[test]
    fn a_socket_in_a_bag_stays_connected() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let queue = DescriptorQueue::new().unwrap();
        queue.put(0, &[theirs.as_fd()]).unwrap();
        drop(theirs);
        let mut queue = reopen(queue, true);
        ours.write_all(b"kept").unwrap();
        queue.retain(|_| true).unwrap();
        let (_, mut sockets) = queue.contents().unwrap().pop().unwrap();
        let mut bytes = [0; 4];
        let mut theirs = UnixStream::from(sockets.pop().unwrap());
        theirs.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"kept");
    }

    #[test]
    fn a_message_has_at_most_253_descriptors() {
        let queue = DescriptorQueue::new().unwrap();
        let shared = file();
        let refused = queue.put(0, &vec![shared.as_fd(); 254]);
        assert!(matches!(refused, Err(FdStoreError::TooMany { count: 254 })));
    }

    #[test]
    fn other_descriptors_are_refused_as_queue() {
        let refused = |ends: Vec<OwnedFd>| match DescriptorQueue::from_persisted(ends) {
            Err(FdStoreError::NotDescriptorQueue { reason }) => reason,
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(vec![]), "it needs two sockets");
        assert_eq!(
            refused(vec![file(), file(), file()]),
            "it needs two sockets"
        );
        let sockets = "one of them is not a SOCK_SEQPACKET socket";
        assert_eq!(refused(vec![file(), file()]), sockets);
        let flags = SocketFlags::CLOEXEC;
        let (one, other) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        assert_eq!(refused(vec![one, other]), sockets);
        let queue = DescriptorQueue::new().unwrap();
        queue.put(0, &[]).unwrap();
        let backwards = DescriptorQueue {
            writer: queue.reader,
            reader: queue.writer,
        };
        backwards.put(0, &[]).unwrap();
        let DescriptorQueue { writer, reader } = backwards;
        assert_eq!(refused(vec![writer, reader]), "both sockets have messages");
    }
}
