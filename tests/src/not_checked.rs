//! Reports of checks that a test had to skip.

use std::io::Write;
use std::thread;

/// Reports the reason why the running test, or a part of it, was skipped.
///
/// The test harness hides output of passing tests, but not text that is written to the descriptor directly. `cargo verify`
/// prints these reports again at its end.
pub fn not_checked(reason: &str) {
    let thread = thread::current();
    // The name of the thread is that of the test.
    let line = format!(
        "NOT CHECKED: {}: {reason}\n",
        thread.name().unwrap_or("a test")
    );
    // If standard error is closed, the test does not fail.
    let _ = std::io::stderr().write_all(line.as_bytes());
}
