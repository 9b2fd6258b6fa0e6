//! Locks that let others go on until they are free.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{self, LockResult, PoisonError, TryLockError, TryLockResult};
use std::time::Duration;

use super::{Step, acted, now, stores, turn, wait};

/// Time after which a lock for readers is looked at again.
const LOOK: Duration = Duration::from_micros(1);

/// As [`std::sync::Mutex`].
#[derive(Debug, Default)]
pub struct Mutex<T: ?Sized> {
    awaited: AtomicBool,
    mutex: sync::Mutex<T>,
}

/// As [`std::sync::MutexGuard`].
#[derive(Debug)]
pub struct MutexGuard<'a, T: ?Sized> {
    mutex: &'a Mutex<T>,
    guard: sync::MutexGuard<'a, T>,
}

impl<T> Mutex<T> {
    /// A lock that is free.
    pub const fn new(value: T) -> Self {
        Self {
            awaited: AtomicBool::new(false),
            mutex: sync::Mutex::new(value),
        }
    }

    /// Returns the value.
    ///
    /// # Errors
    /// As [`std::sync::Mutex::into_inner`].
    pub fn into_inner(self) -> LockResult<T> {
        self.mutex.into_inner()
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Takes the lock, and lets others go on until it is free.
    ///
    /// # Errors
    /// As [`std::sync::Mutex::lock`].
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
    /// As [`std::sync::Mutex::try_lock`].
    pub fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
        turn(Step::Lock, [0; 2]);
        stores::drain_own();
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

    /// Returns the value, which nobody else can have.
    ///
    /// # Errors
    /// As [`std::sync::Mutex::get_mut`].
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
        // To free a lock is an exchange. Nobody else goes on before it is free.
        stores::drain_own();
        if self.mutex.awaited.swap(false, Ordering::Relaxed) {
            acted();
        }
    }
}

/// As [`std::sync::Condvar`]. An actor that waits looks again after others did something.
#[derive(Debug, Default)]
pub struct Condvar(());

impl Condvar {
    /// A condition that nobody waits for.
    #[must_use]
    pub const fn new() -> Self {
        Self(())
    }

    /// Lets others go on with the lock.
    ///
    /// # Errors
    /// As [`std::sync::Condvar::wait`].
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        let mutex = guard.mutex;
        drop(guard);
        wait(None);
        mutex.lock()
    }

    /// Lets others go on with the lock while `condition` holds.
    ///
    /// # Errors
    /// As [`std::sync::Condvar::wait_while`].
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

    /// Lets others go on with the lock while `condition` holds, for `time` at most.
    ///
    /// # Errors
    /// As [`std::sync::Condvar::wait_timeout_while`].
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

    /// Has all actors that wait look again: see [`Condvar`].
    pub fn notify_one(&self) {
        acted();
    }

    /// Has all actors that wait look again: see [`Condvar`].
    pub fn notify_all(&self) {
        acted();
    }
}

/// As [`std::sync::WaitTimeoutResult`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    /// Returns whether the time was over.
    #[must_use]
    pub const fn timed_out(&self) -> bool {
        self.0
    }
}

/// As [`std::sync::RwLock`].
#[derive(Debug, Default)]
pub struct RwLock<T: ?Sized>(sync::RwLock<T>);

/// As [`std::sync::RwLockReadGuard`].
pub type RwLockReadGuard<'a, T> = sync::RwLockReadGuard<'a, T>;

/// As [`std::sync::RwLockWriteGuard`].
pub type RwLockWriteGuard<'a, T> = sync::RwLockWriteGuard<'a, T>;

impl<T> RwLock<T> {
    /// A lock that is free.
    pub const fn new(value: T) -> Self {
        Self(sync::RwLock::new(value))
    }
}

impl<T: ?Sized> RwLock<T> {
    /// Takes the lock beside other readers.
    ///
    /// # Errors
    /// As [`std::sync::RwLock::read`].
    pub fn read(&self) -> LockResult<RwLockReadGuard<'_, T>> {
        Self::taken(|| self.0.try_read())
    }

    /// Takes the lock alone.
    ///
    /// # Errors
    /// As [`std::sync::RwLock::write`].
    pub fn write(&self) -> LockResult<RwLockWriteGuard<'_, T>> {
        Self::taken(|| self.0.try_write())
    }

    fn taken<G>(mut attempt: impl FnMut() -> TryLockResult<G>) -> LockResult<G> {
        turn(Step::Lock, [0; 2]);
        loop {
            stores::drain_own();
            match attempt() {
                Ok(guard) => return Ok(guard),
                Err(TryLockError::Poisoned(error)) => return Err(error),
                Err(TryLockError::WouldBlock) => wait(Some(now() + LOOK)),
            }
        }
    }
}
