//! Governor of a drive: limits the bytes that busy users may have in flight while quiet users are active.
//!
//! The governor divides the drive between light and heavy users; arbitration within a pair is by weighted fair queueing
//! (`arbitration.rs`).
//!
//! A user is *light* while it has few and small commands outstanding ([`CommandClass::is_heavy`]); its commands go to the drive
//! immediately. All other users are *heavy*. The *window* is the maximum of all heavy users' bytes in flight, over all queue
//! pairs. Pairs with waiting commands divide the window. If the shares would be too small, the pairs take turns with the whole
//! window. A command that is larger than its pair's share goes to the drive in parts ([`split`](super::split)), as far as the
//! command can be split. At least one command may always be in flight.
//!
//! While a light user is active, the window also applies to pairs with one user, because a busy pair delays the other pairs'
//! commands, too. While no light user is active, lone users are not slowed down.
//!
//! A lone user submits directly to the drive and reports nothing to the governor. So the drive monitor surveys all pairs ten
//! times a second ([`survey`](super::survey)). An *owner* is a lease with all its queues. If commands take noticeably long
//! while there are quiet and busy owners, the drive is *contended*: lone users then count as light or heavy, as other users do.
//! If commands take noticeably long while there are several busy owners, the drive is *weighed*: each owner gets a
//! [share](super::shares) by its weight, whichever pairs it uses.
//!
//! While commands wait on other pairs, the *own window* also limits a pair with a light user. [`HeavyWindow`] adapts both
//! windows. A second after the last light command has completed, neither window applies.
//!
//! There is one governor per drive, as a drive's queue pairs share its channels.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::waiting_pairs::WaitingPairs;
use nvme_guest::adaptive::{CommandClass, HeavyWindow, PolicyChoice};
use nvme_mpt_memory::clock::{TickRate, Ticks};
use nvme_mpt_memory::sync::Mutex;

/// Time for which a user counts as active after its last command was submitted. For a light user, the time begins when that
/// command has completed. During this time, the user may still wait for heavy commands that were in flight before.
const ACTIVITY_TIME: Duration = Duration::from_secs(1);

/// Limit of the bytes that heavy users of one queue pair may have in flight at present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueuePairWindow {
    /// No limit: no light user is active.
    Open,
    /// The pair may have `bytes` in flight, or one command that is larger.
    Pair {
        /// Maximum of the bytes in flight on this pair.
        bytes: u64,
        /// Maximum of the bytes of a part of a command.
        part: u64,
    },
    /// It is the pair's turn. All pairs together may have `total` bytes in flight, and this pair `own` bytes. A command that is
    /// larger than a limit may be in flight if no other bytes count against that limit.
    Turn {
        /// Maximum of the bytes in flight on all pairs.
        total: u64,
        /// Maximum of the bytes in flight on this pair.
        own: u64,
    },
    /// No heavy command may be launched for a few milliseconds: a probe measures the light users' latency, or another pair has
    /// the turn.
    Closed,
}

impl QueuePairWindow {
    /// Returns the window of a pair whose commands may have parts as large as the window.
    pub(super) const fn whole(bytes: u64) -> Self {
        Self::Pair { bytes, part: bytes }
    }
}

/// Minimum share of a pair in the window, in bytes. If the shares were smaller than this, the pairs take turns instead.
const SHARE_MIN: u64 = 64 << 10;

/// Value of `DriveGovernor::direct` while the number of direct commands is unknown.
const UNKNOWN: u64 = u64::MAX;

/// State by which a drive's queue pairs limit their heavy users while light users are active.
#[derive(Debug)]
pub struct DriveGovernor {
    /// [`ACTIVITY_TIME`], in ticks.
    activity_ticks: u64,
    window: AtomicU64,
    /// Maximum of heavy users' bytes in flight on a pair with a light user, while other pairs have waiting commands.
    own_window: AtomicU64,
    /// Time until which no command is submitted directly, on any pair; `u64::MAX` while light commands are in flight.
    direct_disabled_until: AtomicU64,
    /// Time until which the drive counts as contended, so that lone users count as light or heavy too.
    contended_until: AtomicU64,
    /// Time until which the drive counts as weighed: busy owners (leases) are limited to their shares by weight.
    weight_limited_until: AtomicU64,
    /// Time until which some light user counts as active; `u64::MAX` while light commands are in flight.
    light_until: AtomicU64,
    /// Number of light commands in flight.
    light_commands: AtomicU64,
    /// Time until which heavy users pause, so that a probe measures the latency without them.
    pause_until: AtomicU64,
    /// Time of the next probe of the latency without heavy commands.
    next_probe: AtomicU64,
    /// Pairs on which heavy commands wait.
    waiting: WaitingPairs,
    /// Number of heavy users' bytes in flight, on all pairs.
    in_flight: AtomicU64,
    /// Number of commands in flight at the last survey that lone users had submitted directly, or [`UNKNOWN`].
    direct: AtomicU64,
    /// Time at which the last light command completed.
    light_completed_at: AtomicU64,
    /// Time at which the last heavy command completed.
    heavy_completed_at: AtomicU64,
    /// Quarter of the option `timeout=`, in ticks; 0 without a timeout.
    quarter_timeout: u64,
    /// Time for which a pair has its turn at the whole window, in ticks.
    turn: AtomicU64,
    heavy_window: Mutex<HeavyWindow>,
}

impl DriveGovernor {
    /// Creates the governor of a drive whose speed is not known yet. `rate` is the tick rate of the clock.
    #[must_use]
    pub fn new(choice: PolicyChoice, rate: TickRate) -> Self {
        let window = HeavyWindow::new(choice, rate);
        let settings = window.parameters();
        Self {
            activity_ticks: rate.ticks(ACTIVITY_TIME),
            window: AtomicU64::new(settings.window),
            own_window: AtomicU64::new(settings.own_window),
            direct_disabled_until: AtomicU64::new(0),
            contended_until: AtomicU64::new(0),
            weight_limited_until: AtomicU64::new(0),
            light_until: AtomicU64::new(0),
            light_commands: AtomicU64::new(0),
            pause_until: AtomicU64::new(settings.pause_until.0),
            next_probe: AtomicU64::new(settings.next_probe.0),
            waiting: WaitingPairs::default(),
            in_flight: AtomicU64::new(0),
            direct: AtomicU64::new(0),
            light_completed_at: AtomicU64::new(0),
            heavy_completed_at: AtomicU64::new(0),
            quarter_timeout: 0,
            turn: AtomicU64::new(settings.turn),
            heavy_window: Mutex::new(window),
        }
    }

    /// Sets the timeout of commands (`timeout=`). It limits the bytes in flight to those that the drive completes in time
    /// (`queue_pair/inflight_bound.rs`).
    #[must_use]
    pub fn with_timeout(self, time_out: Duration, rate: TickRate) -> Self {
        let quarter_timeout = rate.ticks(time_out / 4);
        Self {
            quarter_timeout,
            ..self
        }
    }

    /// Returns a quarter of the option `timeout=`, in ticks; 0 without a timeout.
    pub(super) fn quarter_timeout(&self) -> u64 {
        self.quarter_timeout
    }

    /// Lets all commands go through arbitration, on all pairs, for the activity time.
    pub(super) fn disable_direct(&self, now: Ticks) {
        let until = now.0.saturating_add(self.activity_ticks);
        self.direct_disabled_until
            .fetch_max(until, Ordering::Relaxed);
    }

    /// Returns the queue pairs on which heavy commands wait.
    #[inline]
    pub(super) fn waiting(&self) -> &WaitingPairs {
        &self.waiting
    }

    /// Returns whether it is this queue pair's turn, among the pairs on which heavy commands wait.
    fn has_turn(&self, pair: u16, now: Ticks) -> bool {
        // Turns follow the clock. Otherwise the pair whose command completes would always be the first to try again.
        let turn = now.0 / self.turn.load(Ordering::Relaxed).max(1);
        self.waiting.has_turn(pair, turn)
    }

    /// Counts heavy users' bytes that were submitted to the drive.
    #[inline]
    pub(super) fn on_heavy_submitted(&self, bytes: u64) {
        self.in_flight.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts heavy users' bytes that completed, and records the time `now` if it is known.
    #[inline]
    pub(super) fn on_heavy_completed(&self, bytes: u64, now: Option<Ticks>) {
        self.in_flight.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(now) = now {
            self.heavy_completed_at.store(now.0, Ordering::Relaxed);
        }
    }

    /// Returns the heavy users' bytes in flight.
    #[inline]
    pub(super) fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Returns the time for which a user counts as active after its last command, in ticks.
    pub(super) fn activity_ticks(&self) -> u64 {
        self.activity_ticks
    }

    /// Returns whether no user may submit directly at present, on all pairs.
    #[inline]
    pub(super) fn is_direct_disabled(&self, now: Ticks) -> bool {
        now.0 < self.direct_disabled_until.load(Ordering::Relaxed)
    }

    /// Returns whether the drive counts as contended, so that lone users count as light or heavy too.
    #[inline]
    pub(super) fn is_contended(&self, now: Ticks) -> bool {
        now.0 < self.contended_until.load(Ordering::Relaxed)
    }

    /// Returns whether the drive counts as weighed: busy owners (leases) are limited to their shares by weight.
    #[inline]
    pub(super) fn is_weight_limited(&self, now: Ticks) -> bool {
        now.0 < self.weight_limited_until.load(Ordering::Relaxed)
    }

    /// Limits busy owners (leases) to their shares by weight. The limits expire if no later survey renews them.
    pub(super) fn limit_by_weight(&self, now: Ticks) {
        self.mark_contended(now);
        let until = now.0.saturating_add(self.activity_ticks / 2);
        self.weight_limited_until.store(until, Ordering::Relaxed);
    }

    /// Ends the limits that [`Self::limit_by_weight`] has set.
    pub(super) fn end_weight_limits(&self) {
        self.weight_limited_until.store(0, Ordering::Relaxed);
    }

    /// Records the number of commands in flight that lone users have submitted directly. `None` stands for a drive on which
    /// they still submit directly, so that the number may grow at any time.
    pub(super) fn set_direct_commands(&self, commands: Option<u64>) {
        self.direct
            .store(commands.unwrap_or(UNKNOWN), Ordering::Relaxed);
    }

    /// Returns whether the next heavy command may go to the drive, if the window permits only one heavy command at a time.
    /// While light commands are in flight, one of them must complete between two heavy commands. Otherwise a drive that serves
    /// its pairs in turn could take heavy commands of two pairs before a light command. After the time of a turn, the next
    /// heavy command may go in any case.
    #[inline]
    pub(super) fn can_submit_heavy(&self, now: Ticks) -> bool {
        let completed_at = self.heavy_completed_at.load(Ordering::Relaxed);
        self.light_commands.load(Ordering::Relaxed) == 0
            || self.light_completed_at.load(Ordering::Relaxed) >= completed_at
            || now.since(Ticks(completed_at)) > self.turn.load(Ordering::Relaxed)
    }

    /// Lets the drive count as contended for the activity time, because quiet owners (leases) have to wait for busy ones.
    pub(super) fn mark_contended(&self, now: Ticks) {
        let until = now.0.saturating_add(self.activity_ticks);
        self.contended_until.fetch_max(until, Ordering::Relaxed);
        self.direct_disabled_until
            .fetch_max(until, Ordering::Relaxed);
    }

    /// Returns whether any light user is active.
    #[inline]
    pub(super) fn is_light_active(&self, now: Ticks) -> bool {
        now.0 < self.light_until.load(Ordering::Relaxed)
    }

    /// Returns the present limit of a pair's heavy users. The pairs on which commands wait divide the window, or take turns if
    /// their shares would be too small. Turns are better than small shares: one large command uses the drive better than
    /// several small commands, and delays a light command by no more.
    ///
    /// `is_waiting` is what the pair itself has reported. While commands also wait on other pairs, the own window limits a pair
    /// with a light user (`has_light`). On a drive that serves its pairs in turn, a light command waits for all commands before
    /// it in its own pair, but for few commands of other pairs.
    #[inline]
    pub(super) fn window(
        &self,
        pair: u16,
        is_waiting: bool,
        has_light: bool,
        now: Ticks,
    ) -> QueuePairWindow {
        if now.0 < self.pause_until.load(Ordering::Relaxed) {
            return QueuePairWindow::Closed;
        }
        if !self.is_light_active(now) {
            return QueuePairWindow::Open;
        }
        let bytes = self.window.load(Ordering::Relaxed);
        let elsewhere = self.waiting.count_elsewhere(is_waiting);
        let share = bytes / (elsewhere + 1);
        let own = match has_light && elsewhere > 0 {
            true => self.own_window.load(Ordering::Relaxed),
            false => u64::MAX,
        };
        if share >= SHARE_MIN {
            QueuePairWindow::Pair {
                bytes: share.min(own),
                part: share,
            }
        } else if self.has_turn(pair, now) {
            let own = own.min(bytes);
            QueuePairWindow::Turn { total: bytes, own }
        } else {
            QueuePairWindow::Closed
        }
    }

    /// Records that a light user has submitted a command.
    pub(super) fn on_light_arrived(&self, now: Ticks) {
        let until = now.0.saturating_add(self.activity_ticks);
        self.light_until.fetch_max(until, Ordering::Relaxed);
        self.direct_disabled_until
            .fetch_max(until, Ordering::Relaxed);
        // Commands that lone users have submitted directly are ahead of light commands in the drive, and a pause of heavy
        // users does not change that. A probe therefore waits until no such command is in flight.
        if now.0 >= self.next_probe.load(Ordering::Relaxed)
            && self.direct.load(Ordering::Relaxed) == 0
        {
            self.begin_probe(now);
        }
    }

    /// Counts a light command that was submitted to the drive.
    pub(super) fn on_light_submitted(&self) {
        self.light_commands.fetch_add(1, Ordering::Relaxed);
        self.light_until.store(u64::MAX, Ordering::Relaxed);
        self.direct_disabled_until
            .store(u64::MAX, Ordering::Relaxed);
    }

    /// Counts a light command that has completed, and records the time `now` if it is known.
    pub(super) fn on_light_completed(
        &self,
        class: CommandClass,
        arrived: Ticks,
        now: Option<Ticks>,
    ) {
        if self.light_commands.fetch_sub(1, Ordering::Relaxed) == 1 {
            // A light command that another thread launches at this time may be missed. The light user counts as active at least
            // until this time.
            let until = now.unwrap_or(arrived).0.saturating_add(self.activity_ticks);
            self.light_until.store(until, Ordering::Relaxed);
            self.direct_disabled_until.store(until, Ordering::Relaxed);
        }
        if let Some(now) = now {
            self.light_completed_at.store(now.0, Ordering::Relaxed);
            self.update_light_latency(class, arrived, now);
        }
    }

    #[cold]
    fn begin_probe(&self, now: Ticks) {
        self.update_window(|window| window.on_arrival(now));
    }

    /// Adapts the window by the latency of a light command.
    fn update_light_latency(&self, class: CommandClass, arrived: Ticks, now: Ticks) {
        let is_pause = now.0 < self.pause_until.load(Ordering::Relaxed);
        let is_alone = self.in_flight() == 0;
        // In a pause, only latencies without heavy commands in flight count. At other times, only latencies with heavy commands
        // in flight count: an unused window would grow, and be too large for the next heavy user.
        let is_counted = match is_pause {
            true => is_alone,
            false => !is_alone || self.heavy_completed_at.load(Ordering::Relaxed) >= arrived.0,
        };
        if !is_counted {
            return;
        }
        self.update_window(|window| window.on_completion(class, arrived, now));
    }

    /// Adapts the window by `observe`, and publishes its new parameters to the pairs.
    fn update_window(&self, observe: impl FnOnce(&mut HeavyWindow)) {
        let mut window = self
            .heavy_window
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let before = window.parameters();
        observe(&mut window);
        let settings = window.parameters();
        if settings != before {
            self.window.store(settings.window, Ordering::Relaxed);
            self.own_window
                .store(settings.own_window, Ordering::Relaxed);
            self.turn.store(settings.turn, Ordering::Relaxed);
            self.pause_until
                .store(settings.pause_until.0, Ordering::Relaxed);
            self.next_probe
                .store(settings.next_probe.0, Ordering::Relaxed);
        }
    }
}
