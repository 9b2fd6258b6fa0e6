//! Surveys of files: which extents of a range are allocated.
//!
//! The time that a deallocation takes depends on the allocated extents in the range, whereas holes of any length take almost no
//! time. So the limit of a slice ([`slice_scheduler`](super::slice_scheduler)) is a *weight*, which leaves out holes, and not a
//! number of bytes. An extent weighs a block plus a 256th of its bytes. In a file in memory, whose pages are freed one by one,
//! an extent weighs all of its bytes.
//!
//! The calls to the file system (FIEMAP, SEEK_DATA) may block on its locks and its disk. So a separate thread makes these calls
//! if it was [started](start), and pollers do not. If the answer does not arrive in time, a slice is as short as if the range
//! had no holes.

use std::io;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use log::debug;

use super::SharedFile;
use super::io_mode::UNIT;
use super::kernel;
use nvme_guest::threads::ThreadSpawner;
use nvme_mpt_memory::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// Maximum number of requests for surveys that wait for the survey thread. Further requests are dropped.
const QUEUED_REQUESTS_MAX: usize = 256;

/// Maximum time for which a command waits for a survey, before it continues without it.
pub(super) const SURVEY_TIMEOUT: Duration = Duration::from_millis(2);

/// Maximum number of extents that a survey reports.
const EXTENTS_MAX: usize = 64;

/// Divisor of an extent's bytes for its weight on a disk: 256 bytes weigh as much as one byte of a file in memory.
const DISK_WEIGHT_DIVISOR: u64 = 256;

static REQUEST_SENDER: OnceLock<SyncSender<SurveyRequest>> = OnceLock::new();

/// Starts the thread that surveys the files of this process, if it is not running. The thread calls the ioctl FIEMAP, which a
/// seccomp filter has to allow.
///
/// # Errors
/// Returns the error of starting a thread.
pub fn start(threads: &ThreadSpawner) -> io::Result<()> {
    let (sender, questions) = sync_channel(QUEUED_REQUESTS_MAX);
    if REQUEST_SENDER.set(sender).is_err() {
        return Ok(());
    }
    let thread = threads.spawn("extents", Box::new(move || serve_requests(&questions)))?;
    // Dropping the handle detaches the thread, which runs until the process ends.
    drop(thread);
    Ok(())
}

fn serve_requests(questions: &Receiver<SurveyRequest>) {
    while let Ok(question) = questions.recv() {
        let Some(file) = question.file.upgrade() else {
            continue;
        };
        let (start, end) = (question.start, question.end);
        match kernel::extents(&file.open_file, start, end, EXTENTS_MAX) {
            Ok(list) => question.answer(
                list,
                if file.is_in_memory {
                    1
                } else {
                    DISK_WEIGHT_DIVISOR
                },
            ),
            Err(error) => {
                debug!("{} names no extents: {error}", file.path.display());
                file.surveyor.disable();
                question.answer(vec![(start, end)], 1);
            }
        }
    }
}

/// Request for a survey of the extents in the range `start..end` of a file.
#[derive(Debug)]
pub(super) struct SurveyRequest {
    file: Weak<SharedFile>,
    pub(super) start: u64,
    pub(super) end: u64,
    survey: Arc<ExtentSurvey>,
}

impl SurveyRequest {
    /// Answers the request with the first extents of the range, as start and end in ascending order. If there are fewer than
    /// [`EXTENTS_MAX`], these are all. `light` is the number of an extent's bytes that weigh as much as one byte of a file in
    /// memory.
    pub(super) fn answer(self, extents: Vec<(u64, u64)>, light: u64) {
        let known = match extents.last() {
            Some((_, end)) if extents.len() >= EXTENTS_MAX => *end,
            _ => self.end,
        };
        // Fails only if the request was already answered, which cannot happen.
        let _ = self.survey.answer.set(SurveyedExtents {
            known_end: known,
            extents,
            weight_divisor: light,
        });
    }
}

/// Handle by which a file sends requests to the survey thread.
#[derive(Debug, Default)]
pub(super) struct SurveyThreadHandle(OnceLock<SyncSender<SurveyRequest>>, OnceLock<()>);

impl SurveyThreadHandle {
    /// Creates a handle to the survey thread of this process. If there is none, the handle requests no surveys.
    pub(super) fn of_this_process() -> Self {
        let surveyor = Self::default();
        if let Some(questions) = REQUEST_SENDER.get() {
            surveyor.set_sender(questions.clone());
        }
        surveyor
    }

    /// Sends requests to the channel `questions` from now on, if the handle has none yet. Returns whether it had none.
    pub(super) fn set_sender(&self, questions: SyncSender<SurveyRequest>) -> bool {
        self.0.set(questions).is_ok()
    }

    /// Stops sending survey requests, because the file system does not report extents.
    fn disable(&self) {
        let _ = self.1.set(());
    }

    /// Returns whether surveys can be requested.
    pub(super) fn is_enabled(&self) -> bool {
        self.0.get().is_some() && self.1.get().is_none()
    }

    /// Requests a survey of a range. Returns `None` if no surveys can be requested, or if too many requests wait.
    pub(super) fn request_survey(
        &self,
        file: &Arc<SharedFile>,
        start: u64,
        end: u64,
    ) -> Option<Arc<ExtentSurvey>> {
        let survey = Arc::<ExtentSurvey>::default();
        let question = SurveyRequest {
            file: Arc::downgrade(file),
            start,
            end,
            survey: survey.clone(),
        };
        self.0.get()?.try_send(question).ok()?;
        Some(survey)
    }
}

/// A survey that was requested. Its answer may be pending.
#[derive(Debug, Default)]
pub(super) struct ExtentSurvey {
    answer: OnceLock<SurveyedExtents>,
}

impl ExtentSurvey {
    /// Returns the extents of the range; `None` until the survey is answered.
    pub(super) fn extents(&self) -> Option<&SurveyedExtents> {
        self.answer.get()
    }
}

/// Extents of a range of a file that a survey has found: those from the start of the range on, up to a maximum number.
#[derive(Debug)]
pub(super) struct SurveyedExtents {
    /// Offset up to which the extents of the range are known.
    known_end: u64,
    /// Start and end of each extent.
    extents: Vec<(u64, u64)>,
    weight_divisor: u64,
}

impl SurveyedExtents {
    /// Returns whether the survey covers the bytes at offset `at`.
    pub(super) fn is_covered(&self, at: u64) -> bool {
        at < self.known_end
    }

    /// Returns the end and the weight of a slice (a piece that is deallocated at a time) from `at` on. The slice ends at `end`
    /// at the latest and weighs at most `most`, but has at least one block.
    pub(super) fn next_slice(&self, at: u64, end: u64, most: u64) -> (u64, u64) {
        let end = end.min(self.known_end);
        let head = if self.weight_divisor > 1 { UNIT } else { 0 };
        let mut weight = 0;
        for &(from, to) in &self.extents {
            let (from, to) = (from.max(at), to.min(end));
            if from >= to {
                continue;
            }
            let own = head + (to - from) / self.weight_divisor;
            let free_weight = most.saturating_sub(weight);
            if own <= free_weight {
                weight += own;
                continue;
            }
            let part = free_weight
                .saturating_sub(head)
                .saturating_mul(self.weight_divisor);
            let part = if from > at { part } else { part.max(UNIT) };
            return match part {
                0 => (from, weight),
                part => ((from + part).min(to), most.max(UNIT)),
            };
        }
        (end, weight)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn extents(known: u64, light: u64, extents: &[(u64, u64)]) -> SurveyedExtents {
        SurveyedExtents {
            known_end: known,
            extents: extents.to_vec(),
            weight_divisor: light,
        }
    }

    #[test]
    fn a_slice_goes_over_holes_for_free() {
        let file = extents(
            1 << 40,
            1,
            &[(8 * MIB, 9 * MIB), (1 << 30, (1 << 30) + MIB)],
        );
        assert_eq!(file.next_slice(0, 4 * MIB, 1), (4 * MIB, 0));
        assert_eq!(file.next_slice(0, 1 << 40, 2 * MIB), (1 << 40, 2 * MIB));
        assert_eq!(file.next_slice(0, 1 << 40, MIB), (1 << 30, MIB));
        assert_eq!(
            file.next_slice(8 * MIB + UNIT, 1 << 29, MIB),
            (1 << 29, MIB - UNIT)
        );
        assert_eq!(file.next_slice(9 * MIB, 1 << 29, 0), (1 << 29, 0));
    }

    #[test]
    fn a_slice_weighs_no_more_than_it_may() {
        // Each of 64 separate blocks weighs a block, and a long extent weighs a 256th of its bytes.
        let apart: Vec<_> = (0..64)
            .map(|at| (2 * at * UNIT, (2 * at + 1) * UNIT))
            .collect();
        for (light, list, count) in [
            // The limit is slightly less than the weight of 64 blocks with their 256ths.
            (DISK_WEIGHT_DIVISOR, apart.as_slice(), 2..=2),
            (1, &[(0, 4 * MIB)], 16..=16),
            (DISK_WEIGHT_DIVISOR, &[(0, 4 * MIB)], 1..=1),
            (DISK_WEIGHT_DIVISOR, &[(0, 1 << 30)], 16..=18),
        ] {
            let end = list.last().expect("some").1;
            let file = extents(end, light, list);
            let (mut at, mut slices) = (0, 0);
            while at < end {
                let (next, weight) = file.next_slice(at, end, 256 << 10);
                assert!(next > at && weight <= 256 << 10, "{at} {next} {weight}");
                at = next;
                slices += 1;
            }
            assert!(count.contains(&slices), "{slices} of {light}");
        }
    }

    #[test]
    fn a_slice_has_at_least_a_block_and_only_known_extents() {
        let file = extents(MIB, DISK_WEIGHT_DIVISOR, &[(0, MIB)]);
        assert_eq!(file.next_slice(0, 4 * MIB, 1), (UNIT, UNIT));
        let file = extents(MIB, 1, &[(0, UNIT)]);
        assert_eq!(file.next_slice(0, 4 * MIB, MIB), (MIB, UNIT));
        assert!(file.is_covered(MIB - 1) && !file.is_covered(MIB));
    }
}
