// SPDX-License-Identifier: Apache-2.0

//! Ends of level-triggered interrupts.

use std::sync::Mutex;
use std::{io, mem};

use super::*;

const PIN: usize = 9;

/// Recorder of the messages whose end an IOAPIC watches, by pin and data.
#[derive(Default)]
struct Asked(Mutex<Vec<(InterruptIndex, u32)>>);

impl InterruptSourceGroup for Asked {
    fn trigger(&self, _: InterruptIndex) -> io::Result<()> {
        Ok(())
    }

    fn notifier(&self, _: InterruptIndex) -> Option<EventFd> {
        None
    }

    fn update(
        &self,
        _: InterruptIndex,
        _: InterruptSourceConfig,
        _: bool,
        _: bool,
    ) -> io::Result<()> {
        Ok(())
    }

    fn set_gsi(&self) -> io::Result<()> {
        Ok(())
    }

    fn watch_level(
        &self,
        index: InterruptIndex,
        config: InterruptSourceConfig,
    ) -> io::Result<()> {
        if let InterruptSourceConfig::MsiIrq(message) = config {
            self.0.lock().unwrap().push((index, message.data));
        }
        Ok(())
    }
}

struct Manager(Arc<Asked>);

impl InterruptManager for Manager {
    type GroupConfig = MsiIrqGroupConfig;

    fn create_group(&self, _: MsiIrqGroupConfig) -> io::Result<Arc<dyn InterruptSourceGroup>> {
        Ok(self.0.clone())
    }

    fn destroy_group(&self, _: Arc<dyn InterruptSourceGroup>) -> io::Result<()> {
        Ok(())
    }
}

/// Writes the low bits of the pin's entry, as a guest does.
fn write_entry(ioapic: &mut Ioapic, low: u32) {
    let register = u32::from(IOWIN_OFF) + PIN as u32 * 2;
    ioapic.write(0, IOREGSEL_OFF.into(), &register.to_le_bytes());
    ioapic.write(0, IOWIN_OFF.into(), &low.to_le_bytes());
}

#[test]
fn test_ends_of_level_triggered_interrupts() {
    const LEVEL: u32 = 1 << 15;
    const MASKED: u32 = 1 << 16;
    const VECTOR: u8 = 0x31;

    let asked = Arc::new(Asked::default());
    let manager = Manager(asked.clone());
    let mut ioapic = Ioapic::new("ioapic".to_owned(), GuestAddress(0), &manager, None).unwrap();
    let watched = || mem::take(&mut *asked.0.lock().unwrap());
    let ended = Arc::new(EventFd::new(libc::EFD_NONBLOCK).unwrap());
    let has_ended = || ended.read().is_ok();

    // Without a device that asks, nothing is watched.
    write_entry(&mut ioapic, LEVEL | u32::from(VECTOR));
    assert!(watched().is_empty());
    let message = LEVEL | u32::from(VECTOR);
    ioapic.watch_level(PIN, ended.clone()).unwrap();
    assert_eq!(watched(), [(PIN as u32, message)]);
    assert!(!has_ended());

    ioapic.end_of_interrupt(VECTOR + 1);
    assert!(!has_ended());
    ioapic.end_of_interrupt(VECTOR);
    assert!(has_ended());

    // A masked pin keeps its message, as an interrupt may be in service.
    write_entry(&mut ioapic, MASKED | message);
    assert!(watched().is_empty() && !has_ended());
    ioapic.end_of_interrupt(VECTOR);
    assert!(has_ended());

    // The end of an interrupt with the message before may be lost.
    write_entry(&mut ioapic, message + 1);
    assert_eq!(watched(), [(PIN as u32, message + 1)]);
    assert!(has_ended());

    ioapic.unwatch_level(PIN, &ended);
    ioapic.end_of_interrupt(VECTOR + 1);
    assert!(!has_ended());
}
