//! The governor: part of a drive that busy members may fill while quiet ones use it, too.
//!
//! The one rule of sharing in time; who is next is the other one (`core.rs`: deficit round robin).
//!
//! A member is *light* while it has few and small commands outstanding ([`CommandClass::is_heavy`]); its
//! commands go to the drive at once. All others are *heavy*: of those, the drive has at most the
//! *window* in flight, of all its queue pairs together. Pairs that wait share it; where a share would
//! be small, they have turns at all of it. A command that is larger goes to the drive in parts of that
//! size ([`split`](super::split)), as far as it can be split. Something is always in flight.
//!
//! While a light member is there, that holds for queue pairs that have one member, too: a drive that
//! is busy with what comes by another pair is not less busy. Otherwise they are not slowed down.
//!
//! A member that has a pair to itself goes straight to the drive, and tells nothing. The drive's supervisor looks at all
//! pairs ten times a second instead ([`survey`](super::survey)). While a quiet tenant waits noticeably beside a busy one,
//! the drive is *contended*, and members with pairs of their own are light or heavy as others are. While several busy
//! tenants wait noticeably, it is *weighed*: they have their [`shares`](super::shares) by weight, whichever pairs they use.
//!
//! [`HeavyWindow`] learns the size of the window. A second after the last light command has completed there is no
//! window.
//!
//! There is one governor per drive, as a drive's queue pairs share its channels.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nvme_mpt::clock::{TickRate, Ticks};
use nvme_mpt::learn::{CommandClass, HeavyWindow, PolicyChoice};
use nvme_mpt::memory::sync::Mutex;

/// Time that a member counts as present after its last command, a light one after its completion: until
/// then it may be waiting for all that heavy members had in the drive before.
const PRESENCE: Duration = Duration::from_secs(1);

/// Room of a queue pair for commands of heavy members in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueuePairWindow {
    /// There is no light member: all the drive takes.
    Open,
    /// So many bytes of its own, or one command.
    Own(u64),
    /// As long as the drive has so many bytes of all its pairs, or one command.
    Drive(u64),
    /// Nothing, for a few milliseconds: light members' latency is being measured, or it is another
    /// pair's turn.
    Closed,
}

/// The least share of the window for which queue pairs do without turns.
const SHARE_MIN: u64 = 64 << 10;

/// Number of direct commands that nobody has counted.
const UNKNOWN: u64 = u64::MAX;

/// Agreement of the queue pairs of one drive about sharing it.
#[derive(Debug)]
pub struct DriveGovernor {
    /// [`PRESENCE`], in ticks.
    presence: u64,
    window: AtomicU64,
    /// Until when no pair is used directly; `u64::MAX` while the drive has light commands.
    governed_until: AtomicU64,
    /// Until when members count as light that have a pair to themselves.
    contended_until: AtomicU64,
    /// Until when busy tenants are limited to their shares by weight.
    weighed_until: AtomicU64,
    /// Until when light members count as present; `u64::MAX` while the drive has commands of theirs.
    light_until: AtomicU64,
    /// Number of light commands.
    lights: AtomicU64,
    /// Until when heavy members pause.
    pause_until: AtomicU64,
    /// When the latency alone is measured next.
    next_probe: AtomicU64,
    /// Queue pairs there were.
    pairs: AtomicU64,
    /// Which of them, by the lowest bits of their numbers, have heavy members waiting.
    waiting: AtomicU64,
    /// Bytes of heavy members that the drive has.
    in_flight: AtomicU64,
    /// Commands that the drive had at the last look from members that used their pairs directly, or [`UNKNOWN`].
    direct: AtomicU64,
    /// When the last light command completed.
    light_landed_at: AtomicU64,
    /// When the last heavy command completed.
    heavy_landed_at: AtomicU64,
    /// A quarter of `timeout=`, in ticks; 0 without one.
    patience: u64,
    /// Length of a pair's turn at the window, in ticks.
    turn: AtomicU64,
    learned: Mutex<HeavyWindow>,
}

impl DriveGovernor {
    /// Of a drive of which nothing is known, with a clock of this rate.
    #[must_use]
    pub fn new(choice: PolicyChoice, rate: TickRate) -> Self {
        let learned = HeavyWindow::new(choice, rate);
        let terms = learned.terms();
        Self {
            presence: rate.ticks(PRESENCE),
            window: AtomicU64::new(terms.window),
            governed_until: AtomicU64::new(0),
            contended_until: AtomicU64::new(0),
            weighed_until: AtomicU64::new(0),
            light_until: AtomicU64::new(0),
            lights: AtomicU64::new(0),
            pause_until: AtomicU64::new(terms.pause_until.0),
            next_probe: AtomicU64::new(terms.next_probe.0),
            pairs: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            in_flight: AtomicU64::new(0),
            direct: AtomicU64::new(0),
            light_landed_at: AtomicU64::new(0),
            heavy_landed_at: AtomicU64::new(0),
            patience: 0,
            turn: AtomicU64::new(terms.turn),
            learned: Mutex::new(learned),
        }
    }

    /// Bounds what the drive has in flight, so that no command of it becomes older than this while the drive works
    /// (`pair/backlog.rs`).
    #[must_use]
    pub fn with_time_out(self, time_out: Duration, rate: TickRate) -> Self {
        let patience = rate.ticks(time_out / 4);
        Self { patience, ..self }
    }

    /// Returns a quarter of `timeout=`, in ticks; 0 without one.
    pub(super) fn patience(&self) -> u64 {
        self.patience
    }

    /// Has commands take their turn on all pairs for a while.
    pub(super) fn govern(&self, now: Ticks) {
        let until = now.0.saturating_add(self.presence);
        self.governed_until.fetch_max(until, Ordering::Relaxed);
    }

    /// A number for another queue pair.
    pub(super) fn register(&self) -> u64 {
        self.pairs.fetch_add(1, Ordering::Relaxed)
    }

    /// Sets whether heavy members of a queue pair wait.
    pub(super) fn waiting(&self, pair: u64, is_waiting: bool) {
        let bit = Self::bit(pair);
        if is_waiting {
            self.waiting.fetch_or(bit, Ordering::Relaxed);
        } else {
            self.waiting.fetch_and(!bit, Ordering::Relaxed);
        }
    }

    /// Returns whether it is a queue pair's turn, among those that wait.
    fn is_turn_of(&self, pair: u64, waiting: u64, now: Ticks) -> bool {
        // Turns by the clock: who completes a command would always be the first to try again.
        let turn = now.0 / self.turn.load(Ordering::Relaxed).max(1);
        let mut rest = waiting;
        for _ in 0..turn % u64::from(waiting.count_ones()) {
            rest &= rest - 1;
        }
        rest & rest.wrapping_neg() == Self::bit(pair)
    }

    /// The drive got so many bytes of a heavy member.
    #[inline]
    pub(super) fn launched(&self, bytes: u64) {
        self.in_flight.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The drive has completed so many bytes of a heavy member; `now` is the time if that is known.
    #[inline]
    pub(super) fn landed(&self, bytes: u64, now: Option<Ticks>) {
        self.in_flight.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(now) = now {
            self.heavy_landed_at.store(now.0, Ordering::Relaxed);
        }
    }

    /// Returns the bytes of heavy members that the drive has.
    #[inline]
    pub(super) fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Returns the time that a member counts as present after its last command, in ticks.
    pub(super) fn presence(&self) -> u64 {
        self.presence
    }

    /// Returns whether commands take their turn on all pairs.
    #[inline]
    pub(super) fn is_governed(&self, now: Ticks) -> bool {
        now.0 < self.governed_until.load(Ordering::Relaxed)
    }

    /// Returns whether members count as light that have a pair to themselves.
    #[inline]
    pub(super) fn is_contended(&self, now: Ticks) -> bool {
        now.0 < self.contended_until.load(Ordering::Relaxed)
    }

    /// Returns whether busy tenants are limited to their shares by weight.
    #[inline]
    pub(super) fn is_weighed(&self, now: Ticks) -> bool {
        now.0 < self.weighed_until.load(Ordering::Relaxed)
    }

    /// Limits busy tenants to their shares by weight. The limits expire if no further look renews them.
    pub(super) fn weigh(&self, now: Ticks) {
        self.contend(now);
        let until = now.0.saturating_add(self.presence / 2);
        self.weighed_until.store(until, Ordering::Relaxed);
    }

    /// Ends the limits of [`Self::weigh`].
    pub(super) fn end_weighing(&self) {
        self.weighed_until.store(0, Ordering::Relaxed);
    }

    /// Returns whether heavy members wait on some pair.
    pub(super) fn has_waiting(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) != 0
    }

    /// The drive has so many commands of members that used their pairs directly; `None` while they come and go.
    pub(super) fn note_direct(&self, commands: Option<u64>) {
        self.direct
            .store(commands.unwrap_or(UNKNOWN), Ordering::Relaxed);
    }

    /// Returns whether a heavy command may go to the drive in a window that has no room for a second one. While light
    /// commands are in the drive, one of them completes between two heavy ones, unless that takes longer than a turn.
    /// Otherwise a drive that serves its pairs in turn could take heavy commands of two pairs first.
    #[inline]
    pub(super) fn is_heavy_next(&self, now: Ticks) -> bool {
        let landed = self.heavy_landed_at.load(Ordering::Relaxed);
        self.lights.load(Ordering::Relaxed) == 0
            || self.light_landed_at.load(Ordering::Relaxed) >= landed
            || now.since(Ticks(landed)) > self.turn.load(Ordering::Relaxed)
    }

    /// Quiet tenants wait for busy ones now, whichever pairs they use.
    pub(super) fn contend(&self, now: Ticks) {
        let until = now.0.saturating_add(self.presence);
        self.contended_until.fetch_max(until, Ordering::Relaxed);
        self.governed_until.fetch_max(until, Ordering::Relaxed);
    }

    /// Returns whether some light member uses the drive.
    #[inline]
    pub(super) fn is_light_present(&self, now: Ticks) -> bool {
        now.0 < self.light_until.load(Ordering::Relaxed)
    }

    /// Returns the room of a queue pair's heavy members now. Pairs that wait share the window, or have turns
    /// at it where it is small: one large command keeps a drive busier than small ones of several pairs, for
    /// which a light member's command waits as long.
    #[inline]
    pub(super) fn window(&self, pair: u64, now: Ticks) -> QueuePairWindow {
        if now.0 < self.pause_until.load(Ordering::Relaxed) {
            return QueuePairWindow::Closed;
        }
        if !self.is_light_present(now) {
            return QueuePairWindow::Open;
        }
        let waiting = self.waiting.load(Ordering::Relaxed) | Self::bit(pair);
        let bytes = self.window.load(Ordering::Relaxed);
        let share = bytes / u64::from(waiting.count_ones());
        if share >= SHARE_MIN {
            QueuePairWindow::Own(share)
        } else if self.is_turn_of(pair, waiting, now) {
            QueuePairWindow::Drive(bytes)
        } else {
            QueuePairWindow::Closed
        }
    }

    fn bit(pair: u64) -> u64 {
        1 << (pair % 64)
    }

    /// A light member has submitted something.
    pub(super) fn light_arrived(&self, now: Ticks) {
        let until = now.0.saturating_add(self.presence);
        self.light_until.fetch_max(until, Ordering::Relaxed);
        self.governed_until.fetch_max(until, Ordering::Relaxed);
        // What came directly is in front of light commands, however long heavy members pause.
        if now.0 >= self.next_probe.load(Ordering::Relaxed)
            && self.direct.load(Ordering::Relaxed) == 0
        {
            self.begin_probe(now);
        }
    }

    /// The drive got a light command.
    pub(super) fn light_launched(&self) {
        self.lights.fetch_add(1, Ordering::Relaxed);
        self.light_until.store(u64::MAX, Ordering::Relaxed);
        self.governed_until.store(u64::MAX, Ordering::Relaxed);
    }

    /// The drive has a light command no more; `now` is the time if that is known.
    pub(super) fn light_landed(&self, class: CommandClass, arrived: Ticks, now: Option<Ticks>) {
        if self.lights.fetch_sub(1, Ordering::Relaxed) == 1 {
            // One that is launched right now may be forgotten; it is present for this long at least.
            let until = now.unwrap_or(arrived).0.saturating_add(self.presence);
            self.light_until.store(until, Ordering::Relaxed);
            self.governed_until.store(until, Ordering::Relaxed);
        }
        if let Some(now) = now {
            self.light_landed_at.store(now.0, Ordering::Relaxed);
            self.light_completed(class, arrived, now);
        }
    }

    #[cold]
    fn begin_probe(&self, now: Ticks) {
        self.learn(|learned| learned.arrived(now));
    }

    /// A light command that arrived at some time has completed.
    fn light_completed(&self, class: CommandClass, arrived: Ticks, now: Ticks) {
        let is_pause = now.0 < self.pause_until.load(Ordering::Relaxed);
        let is_alone = self.in_flight() == 0;
        // In a pause, the drive still works on what heavy members had in front of it. Otherwise, a window that nobody uses
        // would grow, and the heavy member that comes next would find it too large.
        let is_learnt = match is_pause {
            true => is_alone,
            false => !is_alone || self.heavy_landed_at.load(Ordering::Relaxed) >= arrived.0,
        };
        if !is_learnt {
            return;
        }
        self.learn(|learned| learned.completed(class, arrived, now));
    }

    /// Lets the window learn, and has the pairs keep to the new terms.
    fn learn(&self, observe: impl FnOnce(&mut HeavyWindow)) {
        let mut learned = self.learned.lock().unwrap_or_else(PoisonError::into_inner);
        let before = learned.terms();
        observe(&mut learned);
        let terms = learned.terms();
        if terms != before {
            self.window.store(terms.window, Ordering::Relaxed);
            self.turn.store(terms.turn, Ordering::Relaxed);
            self.pause_until
                .store(terms.pause_until.0, Ordering::Relaxed);
            self.next_probe.store(terms.next_probe.0, Ordering::Relaxed);
        }
    }
}
