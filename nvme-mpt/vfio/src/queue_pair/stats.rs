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
    /// Number of doorbell register writes that the drive's Doorbell Buffer has avoided.
    pub doorbell_writes_saved: u64,
    /// Number of dropped completions, which named no in-flight command.
    pub late_completions: u64,
}
