//! Reports of what a test cannot check where it runs.

use std::io::Write;
use std::thread;

/// Reports that the running test, or a part of it, checks nothing, and the reason.
///
/// The test harness shows no output of a test that passes, but for what goes to the descriptor itself. `cargo verify`
/// repeats such lines at its end.
pub fn not_checked(reason: &str) {
    let thread = thread::current();
    // The harness names the thread of a test after it.
    let line = format!(
        "NOT CHECKED: {}: {reason}\n",
        thread.name().unwrap_or("a test")
    );
    // A reader that is gone fails no test.
    let _ = std::io::stderr().write_all(line.as_bytes());
}
