//! Processors that pollers are pinned to.

use std::fs;

use crate::memory::processors::ProcessorSet;

/// A processor that pollers are to be pinned to is not there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("There is no processor {cpu} to poll on: this machine has {online}")]
pub struct NoSuchProcessor {
    /// The processor.
    cpu: usize,
    /// Processors that are online, as the kernel lists them.
    online: String,
}

/// Refuses processors that are not online. If the kernel does not list them, as in a sandbox, all are accepted.
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
    let there = ProcessorSet::of_list(online);
    match cpus.iter().find(|cpu| !there.contains(**cpu)) {
        None => Ok(()),
        Some(cpu) => Err(NoSuchProcessor {
            cpu: *cpu,
            online: online.to_owned(),
        }),
    }
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
