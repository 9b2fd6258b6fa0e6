//! Pinning of pollers to processors.

use std::fs;
use std::io;
use std::time::Duration;

use log::{info, warn};
use nvme_mpt_memory::clock::{TickRate, Ticks};
use nvme_mpt_memory::processors::{ProcessorSet, current_processors, pin_current_thread};

/// Interval at which a pinned poller checks, while it is awake, on which processors its thread may run. A sleeping poller
/// checks when it wakes up.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A processor for pinning pollers does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("There is no processor {cpu} to poll on: this machine has {online}")]
pub struct NoSuchProcessor {
    /// Number of the processor.
    cpu: usize,
    /// List of online processors, in the kernel's format.
    online: String,
}

/// Checks that the processors are online. If the kernel does not list the online processors, as in a sandbox, accepts all.
pub(super) fn check_online(cpus: &[usize]) -> Result<(), NoSuchProcessor> {
    if cpus.is_empty() {
        return Ok(());
    }
    match fs::read_to_string("/sys/devices/system/cpu/online") {
        Ok(online) => check_among(cpus, online.trim()),
        Err(_) => Ok(()),
    }
}

fn check_among(cpus: &[usize], online: &str) -> Result<(), NoSuchProcessor> {
    let online_processors = ProcessorSet::parse_list(online);
    match cpus.iter().find(|cpu| !online_processors.contains(**cpu)) {
        None => Ok(()),
        Some(cpu) => Err(NoSuchProcessor {
            cpu: *cpu,
            online: online.to_owned(),
        }),
    }
}

/// Pinning of a poller's thread to a processor. The value must stay on that thread.
///
/// If CPU sets change or a processor goes offline, the kernel silently moves the thread to other processors. Before Linux 6.2,
/// the thread stays on these other processors even when its processor is online again.
#[derive(Debug)]
pub(super) struct ThreadPinning {
    processor: usize,
    next_check: Ticks,
    period_ticks: u64,
    /// True if the thread may run on other processors than `processor`, and this was logged.
    is_lost: bool,
}

/// Change of a poller's pinning, found by a check, which is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PinningChange {
    Lost,
    Restored,
}

impl ThreadPinning {
    /// Pins the calling thread, or logs why that failed.
    pub(super) fn pin_current_thread(processor: usize, name: &str) -> Self {
        let pinned = pin_current_thread(processor);
        if let Err(error) = &pinned {
            warn!(
                "Poller {name} stays unpinned: processor {processor} cannot be used: {error}. It is pinned once that can be"
            );
        }
        let period = TickRate::measured().ticks(CHECK_INTERVAL);
        Self {
            processor,
            next_check: Ticks(Ticks::now().0.saturating_add(period)),
            period_ticks: period,
            is_lost: pinned.is_err(),
        }
    }

    /// Checks the pinning once per interval. Pins the thread again if it may run elsewhere.
    #[cold]
    pub(super) fn check(&mut self, now: Ticks, name: &str) {
        // All threads of a simulation are one kernel thread.
        if now < self.next_check || cfg!(simulation) {
            return;
        }
        self.next_check = Ticks(now.0.saturating_add(self.period_ticks));
        let processor = self.processor;
        let (own, wanted) = (
            current_processors(),
            ProcessorSet::from_processor(processor),
        );
        let is_pinned = own.as_ref().is_ok_and(|own| Some(*own) == wanted);
        match self.update(is_pinned, || pin_current_thread(processor)) {
            Some(PinningChange::Lost) => {
                let now = own.map_or("others".to_owned(), |own| own.to_string());
                warn!(
                    "Poller {name} was moved off processor {processor}, as by a change of CPU sets, and runs on {now} until it \
                     may have that again"
                );
            }
            Some(PinningChange::Restored) => {
                info!("Poller {name} is pinned to processor {processor} again");
            }
            None => {}
        }
    }

    /// Updates `is_lost` after a check. `is_pinned` is true if the check found the thread pinned; otherwise `pin` is called to
    /// pin it. Returns the change to log, if there is one.
    fn update(
        &mut self,
        is_pinned: bool,
        pin: impl FnOnce() -> io::Result<()>,
    ) -> Option<PinningChange> {
        let was_lost = self.is_lost;
        self.is_lost = !is_pinned && pin().is_err();
        match (was_lost, self.is_lost) {
            (false, true) => Some(PinningChange::Lost),
            (_, false) if was_lost || !is_pinned => Some(PinningChange::Restored),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use nvme_guest::threads::start_thread;
    use nvme_mpt_memory::processors::set_affinity;

    use super::*;

    #[test]
    fn a_thread_that_was_moved_off_its_processor_returns_to_it() {
        let moved = || {
            let all = current_processors().expect("it lives");
            let processor = all.iter().next().expect("a processor");
            let mut pinning = ThreadPinning::pin_current_thread(processor, "a");
            // Linux 6.1 leaves this mask after a CPU set has lost the processor and got it back.
            set_affinity(&all).expect("allowed");
            let before = pinning.next_check.0 - 1;
            pinning.check(Ticks(before), "a");
            assert_eq!(current_processors().expect("it lives"), all, "not yet");
            pinning.check(pinning.next_check, "a");
            assert_eq!(
                current_processors().ok(),
                ProcessorSet::from_processor(processor)
            );
        };
        start_thread("a", moved)
            .expect("a thread")
            .join()
            .expect("no panic");
    }

    #[test]
    fn a_processor_that_is_gone_is_reported_once_and_taken_again_once_it_is_back() {
        let mut pinning = ThreadPinning {
            processor: 1,
            next_check: Ticks(0),
            period_ticks: 1,
            is_lost: false,
        };
        let refused = || Err(io::Error::from_raw_os_error(libc::EINVAL));
        assert_eq!(pinning.update(true, || unreachable!()), None);
        assert_eq!(pinning.update(false, refused), Some(PinningChange::Lost));
        assert_eq!(pinning.update(false, refused), None);
        let back = pinning.update(false, || Ok(()));
        assert_eq!(back, Some(PinningChange::Restored));
        assert_eq!(pinning.update(true, || unreachable!()), None);
        // The processor was removed and came back between two checks, on a kernel that restores the affinity.
        let back = pinning.update(false, || Ok(()));
        assert_eq!(back, Some(PinningChange::Restored));
        assert_eq!(pinning.update(false, refused), Some(PinningChange::Lost));
        let by_kernel = pinning.update(true, || unreachable!());
        assert_eq!(by_kernel, Some(PinningChange::Restored));
    }

    #[test]
    fn processors_that_are_not_there_are_refused_with_those_that_are() {
        for (online, online_processors, missing) in [
            ("0", &[0][..], &[1, 99][..]),
            ("0-1", &[0, 1], &[2, 99]),
            ("0-3,8,10-11", &[0, 3, 8, 10, 11], &[4, 7, 9, 12]),
        ] {
            assert_eq!(check_among(online_processors, online), Ok(()));
            for cpu in missing {
                let error = check_among(&[0, *cpu], online).unwrap_err().to_string();
                assert!(error.contains(&format!("no processor {cpu} ")), "{error}");
                assert!(error.ends_with(&format!("has {online}")), "{error}");
            }
        }
        assert_eq!(check_online(&[]), Ok(()));
        assert_eq!(
            check_online(&[0]),
            Ok(()),
            "where the kernel begins to count"
        );
    }
}
