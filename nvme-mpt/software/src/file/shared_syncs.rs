//! Syncs of a file that its leases share when they are flushed together, as at the end of a server.
//!
//! A sync of one lease makes the completed writes of all leases of the file durable. A file system executes concurrent syncs of
//! one file one after the other, each with a flush of the device's cache. So at most one of these syncs is in progress: flushes
//! that arrive meanwhile share the next one, which begins after all of them have arrived.

use std::io;
use std::sync::{Arc, OnceLock, PoisonError};

use nvme_mpt_memory::sync::{Condvar, Mutex, MutexGuard};

/// Syncs of a file, and the flushes that wait for them.
#[derive(Debug, Default)]
pub(super) struct SharedSyncs {
    schedule: Mutex<SyncSchedule>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct SyncSchedule {
    is_running: bool,
    /// The sync that begins next. Each flush that waits for it has a reference.
    next: Arc<SharedSync>,
}

/// A sync, with its result once it has ended.
#[derive(Debug, Default)]
struct SharedSync {
    result: OnceLock<io::Result<()>>,
}

impl SharedSync {
    fn result(&self) -> Option<io::Result<()>> {
        Some(self.result.get()?.as_ref().copied().map_err(copy_error))
    }
}

/// Copies an error for a further flush that shares the sync.
fn copy_error(error: &io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(errno) => io::Error::from_raw_os_error(errno),
        None => io::Error::new(error.kind(), error.to_string()),
    }
}

impl SharedSyncs {
    /// Returns the result of a sync that begins after this call. The sync is that of `perform`, or of another caller who waits
    /// at the same time.
    pub(super) fn sync(&self, perform: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let mut schedule = self.lock();
        let sync = schedule.next.clone();
        loop {
            if let Some(result) = sync.result() {
                return result;
            }
            if !schedule.is_running {
                break;
            }
            schedule = self
                .ended
                .wait(schedule)
                .unwrap_or_else(PoisonError::into_inner);
        }
        // No sync is in progress and `sync` has not ended, so it is still the next one.
        schedule.is_running = true;
        schedule.next = Arc::default();
        drop(schedule);
        let running = RunningSync { syncs: self, sync };
        let result = perform();
        let copy = result.as_ref().copied().map_err(copy_error);
        running.end(copy);
        result
    }

    fn lock(&self) -> MutexGuard<'_, SyncSchedule> {
        self.schedule.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of flushes that wait for the next sync.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        Arc::strong_count(&self.lock().next) - 1
    }
}

/// The sync in progress. If its thread panics, the waiting flushes get an error, and the next sync can begin.
struct RunningSync<'a> {
    syncs: &'a SharedSyncs,
    sync: Arc<SharedSync>,
}

impl RunningSync<'_> {
    /// Ends the sync with a result for the flushes that wait for it.
    fn end(self, result: io::Result<()>) {
        // Only this thread sets the result.
        let _ = self.sync.result.set(result);
    }
}

impl Drop for RunningSync<'_> {
    fn drop(&mut self) {
        self.sync
            .result
            .get_or_init(|| Err(io::Error::other("A shared sync of the file panicked")));
        self.syncs.lock().is_running = false;
        self.syncs.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::{Sender, channel};
    use std::thread::{JoinHandle, spawn, yield_now};

    use super::*;

    type Flush = JoinHandle<io::Result<()>>;

    #[derive(Default)]
    struct Scene {
        syncs: Arc<SharedSyncs>,
        begun: Arc<AtomicUsize>,
    }

    impl Scene {
        /// Starts a flush, and returns once its sync is in progress. The sync ends with the result that the test sends.
        fn begin(&self) -> (Sender<io::Result<()>>, Flush) {
            let (end, result) = channel();
            let (report_start, started) = channel();
            let syncs = self.syncs.clone();
            let flush = spawn(move || {
                syncs.sync(|| {
                    report_start.send(()).unwrap();
                    result.recv().unwrap()
                })
            });
            started.recv().unwrap();
            (end, flush)
        }

        /// Starts flushes during a sync, and returns once they wait. Whichever of them syncs has the result of `outcome`.
        fn wait(&self, count: usize, outcome: fn() -> io::Result<()>) -> Vec<Flush> {
            let flush = |_| {
                let (syncs, begun) = (self.syncs.clone(), self.begun.clone());
                spawn(move || {
                    syncs.sync(|| {
                        begun.fetch_add(1, Ordering::Relaxed);
                        outcome()
                    })
                })
            };
            let flushes = (0..count).map(flush).collect();
            while self.syncs.waiting() < count {
                yield_now();
            }
            flushes
        }

        fn begun(&self) -> usize {
            self.begun.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn flushes_that_arrive_during_a_sync_share_the_next() {
        let scene = Scene::default();
        let (end, first) = scene.begin();
        let flushes = scene.wait(3, || Ok(()));
        assert_eq!(scene.begun(), 0, "one sync at a time");
        end.send(Ok(())).unwrap();
        first.join().unwrap().unwrap();
        for flush in flushes {
            flush.join().unwrap().unwrap();
        }
        assert_eq!(scene.begun(), 1, "none of them had the first sync");
        scene
            .syncs
            .sync(|| Err(io::ErrorKind::Other.into()))
            .unwrap_err();
    }

    #[test]
    fn each_flush_of_a_shared_sync_gets_its_error() {
        let scene = Scene::default();
        let (end, first) = scene.begin();
        let flushes = scene.wait(3, || Err(io::Error::from_raw_os_error(libc::EIO)));
        end.send(Ok(())).unwrap();
        first.join().unwrap().unwrap();
        for flush in flushes {
            let error = flush.join().unwrap().unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EIO));
        }
        scene.syncs.sync(|| Ok(())).unwrap();
    }

    #[test]
    fn an_error_does_not_reach_flushes_that_wait_for_the_next_sync() {
        let scene = Scene::default();
        let (end, first) = scene.begin();
        let flushes = scene.wait(2, || Ok(()));
        end.send(Err(io::Error::other("no"))).unwrap();
        let error = first.join().unwrap().unwrap_err();
        assert_eq!(error.to_string(), "no");
        for flush in flushes {
            flush.join().unwrap().unwrap();
        }
    }

    #[test]
    fn a_sync_that_panics_is_an_error_and_the_next_one_begins() {
        let scene = Scene::default();
        let panics = AssertUnwindSafe(|| scene.syncs.sync(|| panic!("on purpose")));
        catch_unwind(panics).unwrap_err();
        scene.syncs.sync(|| Ok(())).unwrap();

        let (end, first) = scene.begin();
        let flushes = scene.wait(2, || panic!("on purpose"));
        end.send(Ok(())).unwrap();
        first.join().unwrap().unwrap();
        let results: Vec<_> = flushes.into_iter().map(JoinHandle::join).collect();
        assert_eq!(results.iter().filter(|result| result.is_err()).count(), 1);
        let failed = |result: &Result<io::Result<()>, _>| matches!(result, Ok(Err(_)));
        assert_eq!(results.iter().filter(|result| failed(result)).count(), 1);
    }
}
