//! Runs units of checks concurrently. Results are reported in the order of the list of checks, each with the complete
//! output of its check.
//!
//! Checks run on threads of this module. For each check, a trial of `libtest-mimic` waits for the result and reports it.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Conclusion, Failed, Trial};

use super::{Check, CheckUnit, Failure, Run, report};
use crate::progress;

/// Result of a check with its output.
struct CheckResult {
    result: thread::Result<Result<(), Failure>>,
    output: String,
    duration: Duration,
}

/// Function that runs a check, on any thread.
type Job = Box<dyn FnOnce() + Send>;

/// Jobs of each unit.
type Jobs = Vec<Vec<Job>>;

/// Runs `at_once` units concurrently, and the exclusive units after them.
pub(super) fn run(tests: &Arguments, units: Vec<CheckUnit>, at_once: usize) -> Conclusion {
    let (trials, together, alone) = split(units);
    thread::scope(|scope| {
        scope.spawn(move || {
            run_jobs(together, at_once);
            run_jobs(alone, 1);
        });
        libtest_mimic::run(tests, trials)
    })
}

/// Returns the trials of all checks, the jobs of units that may run concurrently, and the jobs of exclusive units.
fn split(units: Vec<CheckUnit>) -> (Vec<Trial>, Jobs, Jobs) {
    let (mut trials, mut together, mut alone) = (Vec::new(), Vec::new(), Vec::new());
    for CheckUnit {
        checks,
        is_exclusive: is_alone,
    } in units
    {
        let mut jobs = Vec::new();
        for Check { name, run } in checks {
            let (job, made) = job(run);
            jobs.push(job);
            trials.push(Trial::test(name, move || report_result(&made)));
        }
        match is_alone {
            true => alone.push(jobs),
            false => together.push(jobs),
        }
    }
    (trials, together, alone)
}

/// Returns the job of a check, and the receiver of its result.
fn job(run: Run) -> (Job, Receiver<CheckResult>) {
    let (sender, made) = mpsc::channel();
    let job = move || {
        let started = Instant::now();
        let (result, output) = progress::capture_lines(|| catch_unwind(AssertUnwindSafe(run)));
        // Fails only if the trial no longer waits.
        let _ = sender.send(CheckResult {
            result,
            output,
            duration: started.elapsed(),
        });
    };
    (Box::new(job), made)
}

/// Waits for a check's result and reports it. If the check has panicked, this panics, too.
fn report_result(made: &Receiver<CheckResult>) -> Result<(), Failed> {
    let ended = |_| Failed::from("The thread that makes the check has ended");
    let CheckResult {
        result,
        output,
        duration: took,
    } = made.recv().map_err(ended)?;
    match result {
        Ok(result) => report(&output, took, result),
        Err(panic) => {
            report(&output, took, Ok(()))?;
            resume_unwind(panic)
        }
    }
}

/// Runs all jobs. The jobs of one unit run in sequence, and units run concurrently.
fn run_jobs(units: Jobs, at_once: usize) {
    let units = Mutex::new(units.into_iter());
    let next = || {
        let mut units = units.lock().unwrap_or_else(PoisonError::into_inner);
        units.next()
    };
    thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                while let Some(jobs) = next() {
                    jobs.into_iter().for_each(|job| job());
                }
            });
        }
    });
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::progress::print_line;

    const TIMEOUT: Duration = Duration::from_secs(180);

    fn job_of(
        run: impl FnOnce() -> Result<(), Failure> + Send + 'static,
    ) -> (Job, Receiver<CheckResult>) {
        job(Box::new(run))
    }

    #[test]
    fn units_run_beside_each_other_and_their_jobs_in_order() {
        let done = Arc::new(Mutex::new(Vec::new()));
        // The first job of each unit waits for a message of the other unit's first job, so both must run concurrently.
        let unit = |name: &'static str, give: mpsc::Sender<()>, take: Receiver<()>| {
            let (first, second) = (Arc::clone(&done), Arc::clone(&done));
            let meet = move || {
                give.send(()).expect("the other unit");
                take.recv_timeout(TIMEOUT).expect("the other unit at once");
                first.lock().expect("a list").push((name, 1));
            };
            let follow = move || second.lock().expect("a list").push((name, 2));
            vec![Box::new(meet) as Job, Box::new(follow)]
        };
        let (to_b, from_a) = mpsc::channel();
        let (to_a, from_b) = mpsc::channel();
        run_jobs(vec![unit("a", to_b, from_b), unit("b", to_a, from_a)], 2);
        let done = done.lock().expect("a list");
        for name in ["a", "b"] {
            let jobs = done.iter().filter(|(unit, _)| *unit == name);
            let places: Vec<_> = jobs.map(|(_, place)| *place).collect();
            assert_eq!(places, [1, 2], "{name}");
        }
    }

    #[test]
    fn a_result_comes_with_all_output_of_its_check() {
        let (make, made) = job_of(|| {
            print_line("one");
            print_line("two");
            Err("why".into())
        });
        make();
        let made = made.recv().expect("an end");
        assert_eq!(made.output, "one\ntwo\n");
        assert_eq!(
            made.result.expect("no panic").unwrap_err().to_string(),
            "why"
        );
    }

    #[test]
    fn panicking_and_missing_checks_have_failed() {
        let (make, made) = job_of(|| panic!("a check panics"));
        make();
        let reported_panic = catch_unwind(AssertUnwindSafe(|| report_result(&made)));
        let panic = reported_panic.expect_err("a panic");
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"a check panics"));

        let (never, made) = job_of(|| Ok(()));
        drop(never);
        let failed = report_result(&made).expect_err("a failure");
        assert!(
            failed
                .message()
                .is_some_and(|message| message.contains("has ended"))
        );
    }
}
