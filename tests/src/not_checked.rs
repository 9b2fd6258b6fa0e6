//! Reports of checks that a test had to skip.

use std::io::Write;
use std::thread;

/// Reports that the running test, or a part of it, was skipped, and the reason.
///
/// The test harness hides output of passing tests, except for direct writes to the descriptor. `cargo verify` repeats these
/// lines at its end.
pub fn not_checked(reason: &str) {
    let thread = thread::current();
    // The harness names the thread of a test after it.
    let line = format!(
        "NOT CHECKED: {}: {reason}\n",
        thread.name().unwrap_or("a test")
    );
    // A closed standard error is no failure of the test.
    let _ = std::io::stderr().write_all(line.as_bytes());
}
