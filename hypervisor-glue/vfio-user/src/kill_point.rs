//! Points at which a test can kill the server's process, to check that the successor continues correctly.

/// Marks a point between two effects that a successor process sees, such as a commit and a sent reply. Does nothing outside
/// tests.
#[cfg_attr(not(test), inline)]
pub(crate) fn crash_point() {
    #[cfg(test)]
    kill::crash_point();
}

#[cfg(test)]
pub(crate) use kill::kill_at;

#[cfg(test)]
mod kill {
    use std::cell::Cell;
    use std::panic::{self, AssertUnwindSafe};

    thread_local! {
        static STEPS_LEFT: Cell<Option<u32>> = const { Cell::new(None) };
    }

    /// Payload of the panic that ends a simulated process, as a SIGKILL ends a real one.
    struct SimulatedKill;

    /// Kills the simulated process if no steps are left; otherwise counts a step.
    pub(super) fn crash_point() {
        STEPS_LEFT.with(|left| match left.get() {
            Some(0) => {
                left.set(None);
                panic::resume_unwind(Box::new(SimulatedKill));
            }
            Some(steps) => left.set(Some(steps - 1)),
            None => {}
        });
    }

    /// Runs a simulated process that is killed at `step`, counted from 0. Returns the remaining steps, or `None` if the process
    /// was killed.
    pub(crate) fn kill_at(step: u32, process: impl FnOnce()) -> Option<u32> {
        STEPS_LEFT.set(Some(step));
        let ended = panic::catch_unwind(AssertUnwindSafe(process));
        let left = STEPS_LEFT.take();
        match ended {
            Ok(()) => left,
            Err(reason) if reason.is::<SimulatedKill>() => None,
            Err(reason) => panic::resume_unwind(reason),
        }
    }
}
