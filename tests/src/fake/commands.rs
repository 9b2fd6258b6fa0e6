//! The commands that the toy controller knows.

use std::collections::BTreeSet;

use super::{BLOCK, Outcome, QUEUES, Shared, State};
use crate::command::{Sqe, admin, io};
use crate::identify::{IDENTIFY_SIZE, cns, field};
use crate::memory::PAGE_SIZE;
use crate::status::{self, StatusCode};

impl Shared {
    pub(super) fn admin(&self, state: &mut State, sqe: &Sqe) -> Outcome {
        let (low, high) = (sqe.cdw(10) as u16, sqe.cdw(10) >> 16);
        let cdw11 = sqe.cdw(11);
        match sqe.opcode() {
            admin::IDENTIFY => {
                let data = self.identify(low as u8, sqe.nsid())?;
                self.copy_out(sqe, &data)?;
            }
            admin::CREATE_CQ => {
                let vector = (cdw11 & 0b10 != 0).then_some((cdw11 >> 16) as usize);
                if usize::from(low) >= QUEUES
                    || !self.add_cq(state, low, sqe.0[3], high + 1, vector)
                {
                    return Err(status::INVALID_QUEUE_ID);
                }
            }
            admin::CREATE_SQ => {
                let cq = (cdw11 >> 16) as u16;
                if !state.cqs.contains_key(&cq) {
                    return Err(status::CQ_INVALID);
                }
                if !self.add_sq(state, low, sqe.0[3], high + 1, cq) {
                    return Err(status::INVALID_QUEUE_ID);
                }
            }
            admin::DELETE_SQ => {
                state.sqs.remove(&low).ok_or(status::INVALID_QUEUE_ID)?;
            }
            admin::DELETE_CQ => {
                state.cqs.remove(&low).ok_or(status::INVALID_QUEUE_ID)?;
            }
            admin::SET_FEATURES if low as u8 == 7 => {
                let most = (QUEUES - 2) as u32;
                return Ok(cdw11.min(most << 16 | most) & 0xffff | most << 16);
            }
            admin::DOORBELL_BUFFER_CONFIG => {
                let page = |gpa| {
                    let cells = self.memory.cells(gpa, PAGE_SIZE / 4);
                    cells.map_err(|_| status::INVALID_FIELD)
                };
                state.shadow = Some([page(sqe.0[3])?, page(sqe.0[4])?]);
            }
            // Nothing is ever outstanding long enough.
            admin::ABORT => return Ok(1),
            admin::KEEP_ALIVE => {}
            admin::GET_LOG_PAGE => {
                let len = ((high | cdw11 << 16) as usize + 1) * 4;
                let page: Vec<u8> = (0..len).map(|i| (sqe.cdw(12) as usize + i) as u8).collect();
                self.copy_out(sqe, &page)?;
            }
            _ => return Err(status::INVALID_OPCODE),
        }
        Ok(0)
    }

    fn identify(&self, kind: u8, nsid: u32) -> Result<Vec<u8>, StatusCode> {
        let mut data = vec![0; IDENTIFY_SIZE];
        match kind {
            cns::CONTROLLER => {
                data[4..24].copy_from_slice(b"TOY                 ");
                data[24..64].fill(b' ');
                data[24..32].copy_from_slice(b"Toy NVMe");
                data[77] = 9;
                data[257] = 1;
                data[259] = 3;
                data[516] = 1;
                data[520..522].copy_from_slice(&0x18f_u16.to_le_bytes());
                data[536] = 1;
            }
            cns::NAMESPACE if nsid == 1 => {
                for at in [0, 8, 16] {
                    data[at..at + 8].copy_from_slice(&self.options.blocks.to_le_bytes());
                }
                data[33] = 1;
                data[74] = 64;
                data[76] = 128;
                data[80] = 7;
                data[130] = 9;
            }
            cns::ACTIVE_NAMESPACES => data[0] = (nsid == 0) as u8,
            _ => return Err(status::INVALID_FIELD),
        }
        Ok(data)
    }

    pub(super) fn io(&self, state: &mut State, sqe: &Sqe) -> Outcome {
        let slba = sqe.0[5];
        let blocks = u64::from(sqe.cdw(12) & 0xffff) + 1;
        let range = |slba: u64, blocks: u64| -> Result<std::ops::Range<usize>, StatusCode> {
            match slba.checked_add(blocks) {
                Some(end) if end <= self.options.blocks => {
                    Ok(slba as usize * BLOCK..end as usize * BLOCK)
                }
                _ => Err(status::LBA_OUT_OF_RANGE),
            }
        };
        let is_bad = |bad: &BTreeSet<u64>, slba: u64, blocks: u64| {
            bad.range(slba..slba + blocks).next().is_some()
        };
        let clear = |bad: &mut BTreeSet<u64>| bad.retain(|b| !(slba..slba + blocks).contains(b));
        match sqe.opcode() {
            io::FLUSH => {}
            io::READ | io::WRITE if self.options.null => {
                range(slba, blocks)?;
            }
            io::READ => {
                let range = range(slba, blocks)?;
                if is_bad(&state.bad, slba, blocks) {
                    return Err(status::UNRECOVERED_READ_ERROR);
                }
                self.copy_out(sqe, &state.disk[range])?;
            }
            io::WRITE => {
                let range = range(slba, blocks)?;
                let data = self.copy_in(sqe, range.len())?;
                state.disk[range].copy_from_slice(&data);
                clear(&mut state.bad);
            }
            io::COMPARE => {
                let range = range(slba, blocks)?;
                let data = self.copy_in(sqe, range.len())?;
                if is_bad(&state.bad, slba, blocks) {
                    return Err(status::UNRECOVERED_READ_ERROR);
                }
                if state.disk[range] != data {
                    return Err(status::COMPARE_FAILURE);
                }
            }
            io::VERIFY => {
                range(slba, blocks)?;
                if is_bad(&state.bad, slba, blocks) {
                    return Err(status::UNRECOVERED_READ_ERROR);
                }
            }
            io::WRITE_ZEROES => {
                state.disk[range(slba, blocks)?].fill(0);
                clear(&mut state.bad);
            }
            io::WRITE_UNCORRECTABLE => {
                range(slba, blocks)?;
                state.bad.extend(slba..slba + blocks);
            }
            io::DATASET_MANAGEMENT => {
                let data = self.copy_in(sqe, ((sqe.cdw(10) & 0xff) as usize + 1) * 16)?;
                for entry in data.chunks(16) {
                    let range = range(field::u64(entry, 8), u64::from(field::u32(entry, 4)))?;
                    state.disk[range].fill(0);
                }
            }
            io::COPY => {
                let data = self.copy_in(sqe, ((sqe.cdw(12) & 0xff) as usize + 1) * 32)?;
                let mut to = slba;
                for entry in data.chunks(32) {
                    let from = field::u64(entry, 8);
                    let blocks = u64::from(field::u16(entry, 16)) + 1;
                    let source = range(from, blocks)?;
                    let target = range(to, blocks)?;
                    if is_bad(&state.bad, from, blocks) {
                        return Err(status::UNRECOVERED_READ_ERROR);
                    }
                    state.disk.copy_within(source, target.start);
                    state.bad.retain(|b| !(to..to + blocks).contains(b));
                    to += blocks;
                }
            }
            _ => return Err(status::INVALID_OPCODE),
        }
        Ok(0)
    }

    /// The pieces of guest memory that the data pointer names.
    fn pieces(&self, sqe: &Sqe, len: usize) -> Result<Vec<(u64, usize)>, StatusCode> {
        let word = |gpa: u64| {
            let mut bytes = [0; 8];
            match self.memory.read(gpa, &mut bytes) {
                Ok(()) => Ok(u64::from_le_bytes(bytes)),
                Err(_) => Err(status::DATA_TRANSFER_ERROR),
            }
        };
        let page = PAGE_SIZE as u64;
        let mut pieces = Vec::new();
        if sqe.cdw(0) >> 14 & 0b11 == 0 {
            let first = len.min((page - sqe.0[3] % page) as usize);
            pieces.push((sqe.0[3], first));
            let mut left = len - first;
            if left > 0 && left <= PAGE_SIZE {
                pieces.push((sqe.0[4], left));
                left = 0;
            }
            let mut entry = sqe.0[4];
            while left > 0 {
                if entry % page == page - 8 && left > PAGE_SIZE {
                    entry = word(entry)?;
                    continue;
                }
                pieces.push((word(entry)?, left.min(PAGE_SIZE)));
                left -= left.min(PAGE_SIZE);
                entry += 8;
            }
            return Ok(pieces);
        }
        let mut segment = vec![[sqe.0[3], sqe.0[4]]];
        while let Some(descriptor) = (!segment.is_empty()).then(|| segment.remove(0)) {
            let [gpa, rest] = descriptor;
            let bytes = rest as u32;
            match rest >> 60 {
                0 => pieces.push((gpa, bytes as usize)),
                2 | 3 => {
                    for at in (0..u64::from(bytes)).step_by(16) {
                        segment.push([word(gpa + at)?, word(gpa + at + 8)?]);
                    }
                }
                _ => return Err(status::SGL_TYPE_INVALID),
            }
        }
        match pieces.iter().map(|p| p.1).sum::<usize>() == len {
            true => Ok(pieces),
            false => Err(status::SGL_LENGTH_INVALID),
        }
    }

    fn copy_out(&self, sqe: &Sqe, mut data: &[u8]) -> Result<(), StatusCode> {
        for (gpa, len) in self.pieces(sqe, data.len())? {
            let (now, rest) = data.split_at(len);
            let written = self.memory.write(gpa, now);
            written.map_err(|_| status::DATA_TRANSFER_ERROR)?;
            data = rest;
        }
        Ok(())
    }

    fn copy_in(&self, sqe: &Sqe, len: usize) -> Result<Vec<u8>, StatusCode> {
        let mut data = vec![0; len];
        let mut at = 0;
        for (gpa, len) in self.pieces(sqe, len)? {
            let read = self.memory.read(gpa, &mut data[at..at + len]);
            read.map_err(|_| status::DATA_TRANSFER_ERROR)?;
            at += len;
        }
        Ok(data)
    }
}
