//! Channels whose receivers let other actors run until a value arrives.

use std::fmt;
use std::sync::mpsc;
pub use std::sync::mpsc::{RecvError, RecvTimeoutError, SendError, TryRecvError, TrySendError};
use std::time::Duration;

use super::{ActorStep, acted, store_buffers, turn, wait_for};

macro_rules! sender {
    ($name:ident) => {
        #[doc = concat!("As [`std::sync::mpsc::", stringify!($name), "`].")]
        pub struct $name<T>(Option<mpsc::$name<T>>);

        impl<T> fmt::Debug for $name<T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name)).finish_non_exhaustive()
            }
        }

        impl<T> $name<T> {
            /// Sends a value.
            ///
            /// # Errors
            /// The receiver does not exist any more.
            pub fn send(&self, value: T) -> Result<(), SendError<T>> {
                turn(ActorStep::Send, [0; 2]);
                // A receiver of the value also sees all earlier stores of the sender.
                store_buffers::drain_own();
                let sent = match &self.0 {
                    Some(sender) => sender.send(value),
                    None => Err(SendError(value)),
                };
                acted();
                sent
            }
        }

        impl<T> Clone for $name<T> {
            fn clone(&self) -> Self {
                Self(self.0.clone())
            }
        }

        impl<T> Drop for $name<T> {
            fn drop(&mut self) {
                store_buffers::drain_own();
                drop(self.0.take());
                acted();
            }
        }
    };
}

sender!(Sender);
sender!(SyncSender);

impl<T> SyncSender<T> {
    /// Sends a value if the channel is not full.
    ///
    /// # Errors
    /// The channel is full, or the receiver does not exist any more.
    pub fn try_send(&self, value: T) -> Result<(), TrySendError<T>> {
        turn(ActorStep::Send, [0; 2]);
        store_buffers::drain_own();
        let sent = match &self.0 {
            Some(sender) => sender.try_send(value),
            None => Err(TrySendError::Disconnected(value)),
        };
        acted();
        sent
    }
}

/// Simulated [`std::sync::mpsc::Receiver`].
#[derive(Debug)]
pub struct Receiver<T>(mpsc::Receiver<T>);

/// Creates a channel, as [`std::sync::mpsc::channel`] does.
#[must_use]
pub fn channel<T>() -> (Sender<T>, Receiver<T>) {
    let (sender, receiver) = mpsc::channel();
    (Sender(Some(sender)), Receiver(receiver))
}

/// Creates a bounded channel, as [`std::sync::mpsc::sync_channel`] does. Senders must never send more values than the
/// channel can hold.
#[must_use]
pub fn sync_channel<T>(bound: usize) -> (SyncSender<T>, Receiver<T>) {
    let (sender, receiver) = mpsc::sync_channel(bound);
    (SyncSender(Some(sender)), Receiver(receiver))
}

impl<T> Receiver<T> {
    /// Receives a value that is already in the channel.
    ///
    /// # Errors
    /// Like [`std::sync::mpsc::Receiver::try_recv`].
    pub fn try_recv(&self) -> Result<T, TryRecvError> {
        turn(ActorStep::Receive, [0; 2]);
        self.0.try_recv()
    }

    /// Receives a value. If there is none, waits for one.
    ///
    /// # Errors
    /// Like [`std::sync::mpsc::Receiver::recv`].
    pub fn recv(&self) -> Result<T, RecvError> {
        self.attempts(None).unwrap_or(Err(RecvError))
    }

    /// Receives a value. If there is none, waits for one for at most `time`.
    ///
    /// # Errors
    /// Like [`std::sync::mpsc::Receiver::recv_timeout`].
    pub fn recv_timeout(&self, time: Duration) -> Result<T, RecvTimeoutError> {
        match self.attempts(Some(time)) {
            Some(received) => received.map_err(|RecvError| RecvTimeoutError::Disconnected),
            None => Err(RecvTimeoutError::Timeout),
        }
    }

    fn attempts(&self, time: Option<Duration>) -> Option<Result<T, RecvError>> {
        turn(ActorStep::Receive, [0; 2]);
        wait_for(time, || match self.0.try_recv() {
            Ok(value) => Some(Ok(value)),
            Err(TryRecvError::Disconnected) => Some(Err(RecvError)),
            Err(TryRecvError::Empty) => None,
        })
    }
}
