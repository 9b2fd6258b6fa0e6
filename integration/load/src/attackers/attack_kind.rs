//! Names of attackers.

use clap::ValueEnum;

/// An attacker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AttackKind {
    /// None, as a control: a thread takes processor time, and sends nothing
    Spin,
    /// 16 queues of 128 KiB reads, with 32 in flight in each
    Queues,
    /// Its interrupt's eventfd is watched 20,000 times by epoll, and commands complete all the time
    EventfdWatched,
    /// Its interrupt's eventfd is full, and a write to it waits
    EventfdFull,
    /// Punches holes in its memory beneath buffers of commands in flight
    Holes,
    /// Causes messages in a log that nobody reads, by nonsense on its socket, invalid doorbells and resets
    Log,
    /// Deallocates holes of a sparse file, 32 MiB by each command
    Deallocate,
    /// Its drive is renamed, so that upgrades, which are asked for all the time, are refused
    RefusedUpgrade,
}

impl AttackKind {
    /// All attackers, in the order of the rows of the table.
    pub const ALL: &[Self] = &[
        Self::Spin,
        Self::Queues,
        Self::EventfdWatched,
        Self::EventfdFull,
        Self::Holes,
        Self::Log,
        Self::Deallocate,
        Self::RefusedUpgrade,
    ];

    /// Returns the name of the attacker's row.
    pub fn name(self) -> &'static str {
        match self {
            Self::Spin => "spin",
            Self::Queues => "queues",
            Self::EventfdWatched => "eventfd-watched",
            Self::EventfdFull => "eventfd-full",
            Self::Holes => "holes",
            Self::Log => "log",
            Self::Deallocate => "deallocate",
            Self::RefusedUpgrade => "refused-upgrade",
        }
    }
}
