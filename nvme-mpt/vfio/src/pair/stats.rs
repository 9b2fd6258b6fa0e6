//! Figures of a queue pair.

/// Figures of a host queue pair since it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PairStats {
    /// Commands of its members.
    pub commands: u64,
    /// Those of them that the drive could not take in one.
    pub splits: u64,
    /// Commands that the drive got in their place.
    pub children: u64,
    /// Doorbell register writes that the drive's Doorbell Buffer spared.
    pub doorbell_writes_saved: u64,
    /// Completions of commands that were not in flight; they were dropped.
    pub late_completions: u64,
}
