//! Locks that let other actors run until the lock is free.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{self, LockResult, PoisonError, TryLockError, TryLockResult};
use std::time::Duration;

use super::{ActorStep, acted, now, store_buffers, turn, wait};

/// Interval at which an actor polls a reader-writer lock that is not free.
const LOOK: Duration = Duration::from_micros(1);

/// Simulated [`std::sync::Mutex`].
#[derive(Debug, Default)]
pub struct Mutex<T: ?Sized> {
    awaited: AtomicBool,
    mutex: sync::Mutex<T>,
}

/// Simulated [`std::sync::MutexGuard`].
#[derive(Debug)]
pub struct MutexGuard<'a, T: ?Sized> {
    mutex: &'a Mutex<T>,
    guard: sync::MutexGuard<'a, T>,
}

impl<T> Mutex<T> {
    /// Creates a lock that is free.
    pub const fn new(value: T) -> Self {
        Self {
            awaited: AtomicBool::new(false),
            mutex: sync::Mutex::new(value),
        }
    }

    /// Returns the value that the lock protects.
    ///
    /// # Errors
    /// Like [`std::sync::Mutex::into_inner`].
    pub fn into_inner(self) -> LockResult<T> {
        self.mutex.into_inner()
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Takes the lock. Other actors run until it is free.
    ///
    /// # Errors
    /// Like [`std::sync::Mutex::lock`].
    pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        loop {
            match self.try_lock() {
                Ok(guard) => return Ok(guard),
                Err(TryLockError::Poisoned(error)) => return Err(error),
                Err(TryLockError::WouldBlock) => {
                    self.awaited.store(true, Ordering::Relaxed);
                    wait(None);
                }
            }
        }
    }

    /// Takes the lock if it is free.
    ///
    /// # Errors
    /// Like [`std::sync::Mutex::try_lock`].
    pub fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
        turn(ActorStep::Lock, [0; 2]);
        store_buffers::drain_own();
        match self.mutex.try_lock() {
            Ok(guard) => Ok(MutexGuard { mutex: self, guard }),
            Err(TryLockError::WouldBlock) => Err(TryLockError::WouldBlock),
            Err(TryLockError::Poisoned(error)) => {
                let guard = error.into_inner();
                let guard = MutexGuard { mutex: self, guard };
                Err(TryLockError::Poisoned(PoisonError::new(guard)))
            }
        }
    }

    /// Returns the value, which no other thread can access during the borrow.
    ///
    /// # Errors
    /// Like [`std::sync::Mutex::get_mut`].
    pub fn get_mut(&mut self) -> LockResult<&mut T> {
        self.mutex.get_mut()
    }
}

impl<T> From<T> for Mutex<T> {
    fn from(value: T) -> Self {
        Self::new(value)
    }
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

impl<T: ?Sized> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        // Releasing a lock makes the actor's stores visible. No other actor runs until the lock is free.
        store_buffers::drain_own();
        if self.mutex.awaited.swap(false, Ordering::Relaxed) {
            acted();
        }
    }
}

/// Simulated [`std::sync::Condvar`]. A waiting actor checks its condition whenever another actor has acted.
#[derive(Debug, Default)]
pub struct Condvar(());

impl Condvar {
    /// Creates a condition variable without waiting actors.
    #[must_use]
    pub const fn new() -> Self {
        Self(())
    }

    /// Releases the lock, lets other actors run, and takes the lock again.
    ///
    /// # Errors
    /// Like [`std::sync::Condvar::wait`].
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        let mutex = guard.mutex;
        drop(guard);
        wait(None);
        mutex.lock()
    }

    /// Waits while `condition` holds, without the lock.
    ///
    /// # Errors
    /// Like [`std::sync::Condvar::wait_while`].
    pub fn wait_while<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        mut condition: impl FnMut(&mut T) -> bool,
    ) -> LockResult<MutexGuard<'a, T>> {
        while condition(&mut guard) {
            guard = self.wait(guard)?;
        }
        Ok(guard)
    }

    /// Waits while `condition` holds, without the lock, for at most `time`.
    ///
    /// # Errors
    /// Like [`std::sync::Condvar::wait_timeout_while`].
    pub fn wait_timeout_while<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        time: Duration,
        mut condition: impl FnMut(&mut T) -> bool,
    ) -> LockResult<(MutexGuard<'a, T>, WaitTimeoutResult)> {
        let until = now().saturating_add(time);
        loop {
            if !condition(&mut guard) {
                return Ok((guard, WaitTimeoutResult(false)));
            }
            if now() >= until {
                return Ok((guard, WaitTimeoutResult(true)));
            }
            let mutex = guard.mutex;
            drop(guard);
            wait(Some(until));
            guard = match mutex.lock() {
                Ok(guard) => guard,
                Err(poisoned) => {
                    let guard = poisoned.into_inner();
                    return Err(PoisonError::new((guard, WaitTimeoutResult(false))));
                }
            };
        }
    }

    /// Lets all waiting actors check their conditions: see [`Condvar`].
    pub fn notify_one(&self) {
        acted();
    }

    /// Lets all waiting actors check their conditions: see [`Condvar`].
    pub fn notify_all(&self) {
        acted();
    }
}

/// Simulated [`std::sync::WaitTimeoutResult`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    /// Returns whether the wait timed out.
    #[must_use]
    pub const fn timed_out(&self) -> bool {
        self.0
    }
}

/// Simulated [`std::sync::RwLock`].
#[derive(Debug, Default)]
pub struct RwLock<T: ?Sized>(sync::RwLock<T>);

/// Guard of the simulated [`std::sync::RwLock`], for reading.
pub type RwLockReadGuard<'a, T> = sync::RwLockReadGuard<'a, T>;

/// Guard of the simulated [`std::sync::RwLock`], for writing.
pub type RwLockWriteGuard<'a, T> = sync::RwLockWriteGuard<'a, T>;

impl<T> RwLock<T> {
    /// Creates a lock that is free.
    pub const fn new(value: T) -> Self {
        Self(sync::RwLock::new(value))
    }
}

impl<T: ?Sized> RwLock<T> {
    /// Takes the lock for reading, shared with other readers.
    ///
    /// # Errors
    /// Like [`std::sync::RwLock::read`].
    pub fn read(&self) -> LockResult<RwLockReadGuard<'_, T>> {
        Self::taken(|| self.0.try_read())
    }

    /// Takes the lock for writing.
    ///
    /// # Errors
    /// Like [`std::sync::RwLock::write`].
    pub fn write(&self) -> LockResult<RwLockWriteGuard<'_, T>> {
        Self::taken(|| self.0.try_write())
    }

    fn taken<G>(mut attempt: impl FnMut() -> TryLockResult<G>) -> LockResult<G> {
        turn(ActorStep::Lock, [0; 2]);
        loop {
            store_buffers::drain_own();
            match attempt() {
                Ok(guard) => return Ok(guard),
                Err(TryLockError::Poisoned(error)) => return Err(error),
                Err(TryLockError::WouldBlock) => wait(Some(now() + LOOK)),
            }
        }
    }
}
