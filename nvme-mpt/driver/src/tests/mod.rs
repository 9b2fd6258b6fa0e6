//! A controller for tests, and tests of bring-up and shutdown.

mod admin_queue;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use nvme_mpt_memory::deadline::WaitClock;
use nvme_spec::registers::{
    Aqa, ArbitrationMechanism, Cap, Cc, Crto, Csts, ShutdownNotification, ShutdownStatus, offset,
};

use super::*;

/// A clock that advances only by sleeping.
#[derive(Debug, Default)]
struct SleepClock(Mutex<Duration>);

impl WaitClock for SleepClock {
    fn now(&self) -> Duration {
        *self.0.lock().unwrap()
    }

    fn wait(&self, _: Duration, _: &mut dyn FnMut(Duration) -> bool) -> bool {
        unreachable!("the driver only sleeps")
    }

    fn sleep(&self, time: Duration) {
        *self.0.lock().unwrap() += time;
    }
}

/// Registers of a [`TestController`], and its faults.
#[derive(Debug)]
struct TestRegisters {
    cap: Cap,
    crto: Crto,
    cc: Cc,
    csts: Csts,
    aqa: Aqa,
    asq: u64,
    acq: u64,
    /// Values written to CC.
    written: Vec<Cc>,
    /// Time from a write of CC until CSTS follows.
    delay: Duration,
    /// Time of the next change of CSTS, and the new value.
    next: Option<(Duration, Csts)>,
    /// True if the controller fails when it is enabled.
    fails: bool,
    admin: Option<admin_queue::TestAdminQueue>,
    /// True if the registers read as all ones.
    is_silent: bool,
}

/// A controller whose registers react as those of a drive, after a delay.
#[derive(Debug)]
struct TestController {
    clock: Arc<SleepClock>,
    registers: Mutex<TestRegisters>,
    is_gone: AtomicBool,
    is_removal_requested: AtomicBool,
}

impl TestController {
    fn new() -> Arc<Self> {
        let cap = Cap(0).with_css_nvm(true).with_mqes_z(63).with_to(10);
        Arc::new(Self {
            clock: Arc::default(),
            registers: Mutex::new(TestRegisters {
                cap,
                crto: Crto(0),
                cc: Cc(0),
                csts: Csts(0),
                aqa: Aqa(0),
                asq: 0,
                acq: 0,
                written: Vec::new(),
                delay: Duration::from_millis(20),
                next: None,
                fails: false,
                admin: None,
                is_silent: false,
            }),
            is_gone: AtomicBool::new(false),
            is_removal_requested: AtomicBool::new(false),
        })
    }

    /// Locks the registers, after CSTS has followed CC.
    fn registers(&self) -> MutexGuard<'_, TestRegisters> {
        let mut registers = self.registers.lock().unwrap();
        if let Some((due, csts)) = registers.next
            && self.clock.now() >= due
        {
            registers.csts = csts;
            registers.next = None;
        }
        registers
    }

    fn driver(self: &Arc<Self>) -> ControllerRegisters<Self> {
        ControllerRegisters::new(self.clone()).unwrap()
    }
}

impl ControllerAccess for TestController {
    fn read32(&self, at: u64) -> u32 {
        let registers = self.registers();
        match at {
            _ if registers.is_silent => u32::MAX,
            offset::CC => registers.cc.0,
            offset::CSTS => registers.csts.0,
            offset::CRTO => registers.crto.0,
            offset::VS => 0x2_0000,
            _ => panic!("a read at {at:#x}"),
        }
    }

    fn read64(&self, at: u64) -> u64 {
        assert_eq!(at, offset::CAP);
        let registers = self.registers();
        match registers.is_silent {
            true => u64::MAX,
            false => registers.cap.0,
        }
    }

    fn write32(&self, at: u64, value: u32) {
        let now = self.clock.now();
        let mut registers = self.registers();
        match at {
            offset::AQA => registers.aqa = Aqa(value),
            offset::CC => {
                let cc = Cc(value);
                let csts = match cc.shn() {
                    ShutdownNotification::NONE if cc.en() => {
                        Csts(0).with_rdy(!registers.fails).with_cfs(registers.fails)
                    }
                    ShutdownNotification::NONE => Csts(0),
                    _ => registers.csts.with_shst(ShutdownStatus::COMPLETE),
                };
                registers.cc = cc;
                registers.written.push(cc);
                registers.next = Some((now + registers.delay, csts));
            }
            offset::DOORBELLS.. => {
                let admin = registers.admin.as_mut().expect("an admin queue");
                admin.on_doorbell(at, value);
            }
            _ => panic!("a write at {at:#x}"),
        }
    }

    fn write64(&self, at: u64, value: u64) {
        let mut registers = self.registers();
        match at {
            offset::ASQ => registers.asq = value,
            offset::ACQ => registers.acq = value,
            _ => panic!("a write at {at:#x}"),
        }
    }

    fn clock(&self) -> Arc<dyn WaitClock> {
        self.clock.clone()
    }

    fn is_removal_requested(&self) -> bool {
        self.is_removal_requested.load(Ordering::Relaxed)
    }

    fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Relaxed)
    }
}

const ROUND_ROBIN: ArbitrationMechanism = ArbitrationMechanism::ROUND_ROBIN;

const QUEUES: QueuePairAddresses = QueuePairAddresses {
    sq: 0x1000,
    cq: 0x2000,
    entries: 32,
};

#[test]
fn a_controller_is_enabled_with_its_queues_and_disabled_again() {
    let controller = TestController::new();
    let driver = controller.driver();
    assert_eq!(driver.is_enabled(), Ok(false));
    driver
        .enable(ArbitrationMechanism::WEIGHTED_ROUND_ROBIN, QUEUES)
        .unwrap();
    assert_eq!(driver.is_enabled(), Ok(true));
    assert_eq!(
        driver.arbitration(),
        Ok(ArbitrationMechanism::WEIGHTED_ROUND_ROBIN)
    );
    {
        let registers = controller.registers();
        assert_eq!(registers.aqa, Aqa(0x1F_001F));
        assert_eq!((registers.asq, registers.acq), (0x1000, 0x2000));
        // CC.EN is set last, once all other fields are valid (section 3.5.1).
        let written: Vec<u32> = registers.written.iter().map(|cc| cc.0).collect();
        assert_eq!(written, [0x46_0800, 0x46_0801]);
    }
    driver.disable().unwrap();
    assert_eq!(driver.is_enabled(), Ok(false));
}

#[test]
fn a_controller_that_becomes_ready_is_not_disabled_before() {
    let controller = TestController::new();
    let driver = controller.driver();
    controller.write32(offset::CC, 0x46_0001);
    let started = controller.clock.now();
    driver.disable().unwrap();
    let delay = controller.registers().delay;
    assert!(controller.clock.now() - started >= 2 * delay);
    // A controller that never becomes ready is disabled after CAP.TO.
    controller.registers().delay = Duration::MAX / 2;
    controller.write32(offset::CC, 0x46_0001);
    controller.registers().delay = delay;
    let started = controller.clock.now();
    driver.disable().unwrap();
    assert!(controller.clock.now() - started >= Duration::from_secs(5));
}

#[test]
fn a_state_is_waited_for_as_long_as_the_controller_declares() {
    let timeout_of = |cap: fn(Cap) -> Cap, crto| {
        let controller = TestController::new();
        {
            let mut registers = controller.registers();
            (registers.cap, registers.crto) = (cap(registers.cap), crto);
            registers.delay = Duration::MAX / 2;
        }
        let driver = controller.driver();
        let error = driver.enable(ROUND_ROBIN, QUEUES).unwrap_err();
        let seconds = driver.ready_timeout().as_secs();
        let (state, csts) = ("become ready", Csts(0));
        assert_eq!(
            error,
            DriverError::StateTimeout {
                state,
                seconds,
                csts
            }
        );
        let waited = controller.clock.now().as_secs();
        assert_eq!(waited, seconds);
        seconds
    };
    let crto = Crto(0).with_crwmt(600);
    assert_eq!(timeout_of(|cap| cap, crto), 5);
    assert_eq!(timeout_of(|cap| cap.with_to(0), crto), 2);
    assert_eq!(timeout_of(|cap| cap.with_crwms(true), crto), 300);
}

#[test]
fn a_controller_is_disabled_within_cap_to_however_long_it_takes_to_become_ready() {
    let controller = TestController::new();
    {
        let mut registers = controller.registers();
        registers.cap = registers.cap.with_crwms(true);
        registers.crto = Crto(0).with_crwmt(u16::MAX);
    }
    let driver = controller.driver();
    driver.enable(ROUND_ROBIN, QUEUES).unwrap();
    controller.registers().delay = Duration::MAX / 2;
    let started = controller.clock.now();
    let error = driver.disable().unwrap_err();
    let DriverError::StateTimeout { state, seconds, .. } = error else {
        panic!("{error}");
    };
    assert_eq!((state, seconds), ("become disabled", 5));
    let waited = controller.clock.now() - started;
    assert_eq!(waited.as_secs(), 5);
    let error = driver.disable_failed().unwrap_err();
    assert!(matches!(
        error,
        DriverError::StateTimeout { seconds: 5, .. }
    ));
}

#[test]
fn a_controller_that_is_given_back_is_waited_for_no_longer_than_cap_to() {
    let cap_to = Duration::from_secs(5);
    for expected in [DriverError::RemovalRequested, DriverError::Closing] {
        let controller = TestController::new();
        {
            let mut registers = controller.registers();
            registers.cap = registers.cap.with_crwms(true);
            registers.crto = Crto(0).with_crwmt(600);
        }
        let driver = controller.driver();
        let delay = std::mem::replace(&mut controller.registers().delay, Duration::MAX / 2);
        match &expected {
            DriverError::Closing => driver.set_closing(true),
            _ => controller
                .is_removal_requested
                .store(true, Ordering::Relaxed),
        }
        let error = driver.enable(ROUND_ROBIN, QUEUES).unwrap_err();
        assert_eq!(error, expected);
        assert_eq!(controller.clock.now(), cap_to);
        // It is disabled nevertheless, so that it accesses no memory afterwards.
        controller.registers().delay = delay;
        driver.disable().unwrap();
        assert_eq!(driver.is_enabled(), Ok(false));
        assert!(controller.clock.now() < 2 * cap_to + 2 * delay);
    }
}

#[test]
fn a_failure_ends_a_wait_and_is_cleared() {
    let controller = TestController::new();
    let driver = controller.driver();
    controller.registers().fails = true;
    assert_eq!(driver.enable(ROUND_ROBIN, QUEUES), Err(DriverError::Fatal));
    assert_eq!(driver.is_enabled(), Err(DriverError::Fatal));
    let delay = controller.registers().delay;
    assert!(controller.clock.now() < 2 * delay);
    driver.disable_failed().unwrap();
    driver.wait_without_failure().unwrap();
    assert_eq!(driver.is_enabled(), Ok(false));
}

#[test]
fn a_controller_that_does_not_answer_is_lost_and_one_that_is_gone_is_gone() {
    let controller = TestController::new();
    let driver = controller.driver();
    controller.registers().is_silent = true;
    assert_eq!(driver.status(), None);
    assert_eq!(driver.disable(), Err(DriverError::Lost));
    let timeout = Duration::from_secs(1);
    assert_eq!(driver.wait_for_answer(timeout), Err(DriverError::Lost));
    assert_eq!(controller.clock.now(), timeout);
    controller.is_gone.store(true, Ordering::Relaxed);
    assert_eq!(driver.wait_for_answer(timeout), Err(DriverError::Gone));
    assert_eq!(driver.shut_down(timeout), Err(DriverError::Gone));
    assert_eq!(controller.clock.now(), timeout);
    let error = ControllerRegisters::new(controller.clone()).unwrap_err();
    assert_eq!(error, DriverError::Gone);
}

#[test]
fn a_controller_is_shut_down() {
    let controller = TestController::new();
    let driver = controller.driver();
    driver.enable(ROUND_ROBIN, QUEUES).unwrap();
    driver.shut_down(Duration::from_secs(5)).unwrap();
    let csts = driver.status().unwrap();
    assert_eq!(csts.shst(), ShutdownStatus::COMPLETE);
    driver.disable().unwrap();
    assert_eq!(driver.status(), Some(Csts(0)));
}

#[test]
fn a_controller_that_cannot_be_driven_is_refused() {
    let refused = |change: fn(Cap) -> Cap| {
        let controller = TestController::new();
        {
            let mut registers = controller.registers();
            registers.cap = change(registers.cap);
        }
        ControllerRegisters::new(controller).unwrap_err()
    };
    assert_eq!(
        refused(|cap| cap.with_css_nvm(false)),
        DriverError::NoNvmCommandSet
    );
    assert_eq!(
        refused(|cap| cap.with_mpsmin(1)),
        DriverError::MemoryPageSize { min: 8192 }
    );
}
