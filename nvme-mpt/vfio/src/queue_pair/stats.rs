//! Statistics of a queue pair.

/// Statistics of a host queue pair since its creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PairStats {
    /// Number of commands of all users.
    pub commands: u64,
    /// Number of commands that were split.
    pub splits: u64,
    /// Number of child commands sent to the drive.
    pub children: u64,
    /// Register writes avoided by the drive's Doorbell Buffer.
    pub doorbell_writes_saved: u64,
    /// Completions for commands that were not in flight, which were dropped.
    pub late_completions: u64,
}
