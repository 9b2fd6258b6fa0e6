//! Execution and completion of commands.

use std::time::Duration;

use super::data::{self, InvalidDataPointer, Piece};
use super::faults::{AbortReaction, Effect};
use super::queues::entry;
use super::{Controller, ModelCommand};
use crate::command::{Sqe, admin, io};
use crate::identify::{
    ONCS_COMPARE, ONCS_COPY, ONCS_DSM, ONCS_VERIFY, ONCS_WRITE_UNCORRECTABLE, ONCS_WRITE_ZEROES,
};
use crate::memory::PAGE_SIZE;
use crate::status::{self, StatusCode};

/// Maximum number of commands in a turn of the drive's thread. Register accesses wait for the end of a turn.
const AT_ONCE: usize = 16;

/// Command identifier that hosts rarely use: they number slots from 0 in the lower 11 bits.
const UNKNOWN_CID: u16 = 0xFFF0;

impl Controller {
    /// Executes commands that are due.
    pub(super) fn execute_due(&mut self, now: Duration) -> bool {
        let holds_aborts = self.faults.aborts == AbortReaction::Hold;
        for done in 0..AT_ONCE {
            if self.fatal || self.hung {
                return true;
            }
            let is_held = |work: &ModelCommand| {
                holds_aborts && work.sq == 0 && work.sqe.opcode() == admin::ABORT
            };
            let due =
                |work: &ModelCommand| work.due.is_some_and(|due| due <= now) && !is_held(work);
            let count = self.fetched.iter().filter(|work| due(work)).count();
            if count == 0 {
                return done > 0;
            }
            let nth = match self.options.seed {
                Some(_) => self.rng.below(count as u64) as usize,
                None => 0,
            };
            let indices = self.fetched.iter().enumerate();
            let Some(index) = indices
                .filter(|(_, work)| due(work))
                .map(|(i, _)| i)
                .nth(nth)
            else {
                return done > 0;
            };
            let work = self.fetched.remove(index);
            self.finish(&work);
        }
        true
    }

    fn finish(&mut self, work: &ModelCommand) {
        let ModelCommand {
            sq, sqe, effect, ..
        } = work;
        if *sq == 0 {
            if let Some(Effect::Fail(code, dnr)) = effect {
                return self.complete(*sq, sqe, Err(*code), *dnr);
            }
            return self.admin(sqe);
        }
        self.counters.completed += 1;
        match effect {
            Some(Effect::Fail(code, dnr)) => {
                return self.complete(*sq, sqe, Err(*code), *dnr);
            }
            Some(Effect::Skip) => return self.complete(*sq, sqe, Ok(0), false),
            Some(Effect::Garbage) => {
                // The random identifier gets bits that slots of hosts do not have, so that the entry completes no command
                // in flight.
                let cid = u64::from(UNKNOWN_CID & 0x7FF) << 32;
                let entry = [self.rng.next_u64(), self.rng.next_u64() | cid];
                self.post(*sq, entry);
            }
            Some(Effect::CompleteUnknown) => {
                let nobodys = sqe.with_cid(UNKNOWN_CID);
                self.complete(*sq, &nobodys, Ok(0), false);
            }
            _ => {}
        }
        let outcome = self.execute(sqe);
        // Do Not Retry is set, since media errors are permanent, and all other errors are mistakes of the host.
        self.complete(*sq, sqe, outcome, true);
        match effect {
            Some(Effect::CompleteTwice) => self.complete(*sq, sqe, outcome, true),
            Some(Effect::CompleteAgain(further)) => {
                self.post_delayed(*sq, entry(*sq, sqe, outcome, true), *further);
            }
            _ => {}
        }
    }

    /// Executes an I/O command.
    fn execute(&mut self, sqe: &Sqe) -> Result<u32, StatusCode> {
        let result = self
            .check(sqe)
            .and_then(|pieces| self.transfer(sqe, &pieces));
        let code = match result {
            Ok(()) => return Ok(0),
            Err(InvalidDataPointer { status, what }) => {
                // These errors are mistakes of the host. An error without a description can happen to any host.
                if !what.is_empty() {
                    self.record_violation(format!("{what}: {sqe:?}"));
                }
                status
            }
        };
        self.error_count += 1;
        Err(code)
    }

    /// Checks that the host has followed the rules, and returns the parts of memory with the command's data.
    fn check(&self, sqe: &Sqe) -> Result<Vec<Piece>, InvalidDataPointer> {
        let unsound = |status, what| Err(InvalidDataPointer { status, what });
        let oncs = match sqe.opcode() {
            io::FLUSH | io::READ | io::WRITE => 0,
            io::COMPARE => ONCS_COMPARE,
            io::WRITE_UNCORRECTABLE => ONCS_WRITE_UNCORRECTABLE,
            io::DATASET_MANAGEMENT => ONCS_DSM,
            io::WRITE_ZEROES => ONCS_WRITE_ZEROES,
            io::VERIFY => ONCS_VERIFY,
            io::COPY => ONCS_COPY,
            _ => return unsound(status::INVALID_OPCODE, "an opcode that is not offered"),
        };
        if oncs & self.options.oncs != oncs {
            return unsound(status::INVALID_OPCODE, "a command that is not offered");
        }
        let Some(namespace) = self.namespaces.get(&sqe.nsid()) else {
            if sqe.opcode() == io::FLUSH && sqe.nsid() == u32::MAX {
                return Ok(Vec::new());
            }
            return unsound(status::INVALID_NAMESPACE, "a namespace that is not");
        };
        if sqe.cdw(0) >> 8 & 0b11 != 0 {
            return unsound(status::INVALID_FIELD, "a fused command");
        }
        if sqe.cdw(0) >> 14 & 0b11 != 0 && !self.options.sgl {
            return unsound(status::INVALID_FIELD, "an SGL, which is not offered");
        }
        let len = namespace.transfer(sqe);
        let most = |power: u8| match power {
            0 => usize::MAX,
            power => PAGE_SIZE << power,
        };
        if len > most(self.options.mdts) {
            return unsound(status::INVALID_FIELD, "more data than MDTS allows");
        }
        let blocks = (sqe.cdw(12) & 0xFFFF) as usize + 1;
        let no_data = matches!(
            sqe.opcode(),
            io::WRITE_ZEROES | io::VERIFY | io::WRITE_UNCORRECTABLE
        );
        let bytes = blocks << namespace.options.lba_shift;
        if no_data && bytes > most(self.options.no_data_limit) {
            return unsound(
                status::INVALID_FIELD,
                "more blocks than WZSL, VSL or WUSL allow",
            );
        }
        if len == 0 {
            return Ok(Vec::new());
        }
        data::pieces(&self.iommu, sqe, len)
    }

    /// Executes a command with its DMA.
    fn transfer(&mut self, sqe: &Sqe, pieces: &[Piece]) -> Result<(), InvalidDataPointer> {
        let fault = |_| InvalidDataPointer {
            status: status::DATA_TRANSFER_ERROR,
            what: "data outside of memory",
        };
        if !self.bus_master && !pieces.is_empty() {
            return Err(InvalidDataPointer {
                status: status::DATA_TRANSFER_ERROR,
                what: "data, but no bus mastering",
            });
        }
        let mut data = Vec::new();
        if sqe.opcode() != io::READ {
            for &(iova, len) in pieces {
                let at = data.len();
                data.resize(at + len, 0);
                self.iommu.read(iova, &mut data[at..]).map_err(fault)?;
            }
        }
        self.counters.flushes += u64::from(sqe.opcode() == io::FLUSH);
        let Some(namespace) = self.namespaces.get_mut(&sqe.nsid()) else {
            return Ok(());
        };
        let resized = namespace.resized;
        let mut read = match namespace.execute(sqe, &data) {
            Ok(read) => read,
            Err(status) => {
                let what = match status {
                    // A host must know the size of a namespace, and the limits of Copy.
                    status::LBA_OUT_OF_RANGE if !resized => "blocks that are not",
                    status::SIZE_LIMIT_EXCEEDED => "more than one Copy may be",
                    _ => "",
                };
                return Err(InvalidDataPointer { status, what });
            }
        };
        for &(iova, len) in pieces.iter().filter(|_| sqe.opcode() == io::READ) {
            let (now, rest) = read.split_at(len);
            self.iommu.write(iova, now).map_err(fault)?;
            read = rest;
        }
        Ok(())
    }

    /// Executes the DMA of lost commands. A controller may do this until CSTS.RDY is cleared.
    pub(super) fn transfer_lost_commands(&mut self) {
        for work in std::mem::take(&mut self.fetched) {
            if work.sq != 0 && self.bus_master {
                let _status = self.execute(&work.sqe);
            }
        }
    }
}
