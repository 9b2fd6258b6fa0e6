//! Pinning a poller to a processor.
#![expect(unsafe_code, reason = "sched_setaffinity takes a raw set")]

use std::fs;
use std::io;

/// A processor that pollers are to be pinned to is not there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("There is no processor {cpu} to poll on: this machine has {online}")]
pub struct NoSuchProcessor {
    /// The processor.
    cpu: usize,
    /// Those that there are, as the kernel lists them.
    online: String,
}

/// Refuses processors that are not there. Where the kernel does not tell, as in a sandbox, all are taken.
pub(super) fn check(cpus: &[usize]) -> Result<(), NoSuchProcessor> {
    if cpus.is_empty() {
        return Ok(());
    }
    match fs::read_to_string("/sys/devices/system/cpu/online") {
        Ok(online) => check_among(cpus, online.trim()),
        Err(_) => Ok(()),
    }
}

fn check_among(cpus: &[usize], online: &str) -> Result<(), NoSuchProcessor> {
    match cpus.iter().find(|cpu| !lists(online, **cpu)) {
        None => Ok(()),
        Some(cpu) => Err(NoSuchProcessor {
            cpu: *cpu,
            online: online.to_owned(),
        }),
    }
}

/// Returns whether a list such as `0-3,8` has a processor (Linux,
/// `Documentation/admin-guide/cputopology.rst`).
fn lists(online: &str, cpu: usize) -> bool {
    online.split(',').any(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        match (first.trim().parse(), last.trim().parse()) {
            (Ok(first), Ok(last)) => (first..=last).contains(&cpu),
            _ => false,
        }
    })
}

/// Lets the calling thread run on one processor only.
pub(super) fn pin_this_thread(cpu: usize) -> io::Result<()> {
    // SAFETY: a set of zeroes is a valid empty set.
    let mut set = unsafe { std::mem::zeroed::<libc::cpu_set_t>() };
    if cpu >= 8 * size_of::<libc::cpu_set_t>() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: the processor's bit lies in the set, as was just checked.
    unsafe { libc::CPU_SET(cpu, &mut set) };
    // SAFETY: the set is valid for its size; thread 0 is the calling one.
    if unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_that_are_not_there_are_refused_with_those_that_are() {
        for (online, there, missing) in [
            ("0", &[0][..], &[1, 99][..]),
            ("0-1", &[0, 1], &[2, 99]),
            ("0-3,8,10-11", &[0, 3, 8, 10, 11], &[4, 7, 9, 12]),
        ] {
            assert_eq!(check_among(there, online), Ok(()));
            for cpu in missing {
                let error = check_among(&[0, *cpu], online).unwrap_err().to_string();
                assert!(error.contains(&format!("no processor {cpu} ")), "{error}");
                assert!(error.ends_with(&format!("has {online}")), "{error}");
            }
        }
        assert_eq!(check(&[]), Ok(()));
        assert_eq!(check(&[0]), Ok(()), "where the kernel begins to count");
    }
}
