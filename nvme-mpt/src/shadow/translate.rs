//! Translation of a guest's commands for the host controller.
//!
//! A command for the host controller is built only from checked fields. The guest's entry is never copied and patched, so
//! unknown fields do not reach the drive.

use std::sync::Arc;

use nvme_guest::address::{Gpa, Iova, PAGE_SIZE};
use nvme_guest::dma::{DmaDirection, RegionHint, RegionTable};
use nvme_guest::host::ControllerLimits;
use nvme_spec::ids::{CommandId, Nsid};
use nvme_spec::nvm::{
    CompareVerify, CopyCommand, CopyFormat, CopyRange0, DatasetManagement, DsmRange, ReadWrite,
    WriteUncorrectable, WriteZeroes,
};
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::{Cdw0, FusedOperation, Psdt, Sqe};
use nvme_spec::status::Status;
use zerocopy::{FromBytes, IntoBytes};

use super::prp::{self, PrpHints};
use super::{CommandFailure, LeasedBlocks, UntranslatedCommand, field_offsets, sgl};
use crate::host::ListMemory;
use crate::host::{DataPointer, HostMemory};

/// Bits of dword 12 of Read and Write that reach the host controller: NLB, FUA and LR. Directives and protection
/// information are not offered.
const READ_WRITE_CDW12: u32 = 0xC000_FFFF;

/// Bits of the opcode in dword 0.
const OPCODE: Cdw0 = Cdw0(0).with_opcode(u8::MAX);

/// Bits of dword 0 for fused operations and SGLs. All are 0 in a command that is not fused and uses PRPs.
const FUSE_AND_PSDT: Cdw0 = Cdw0(0)
    .with_fuse(FusedOperation(0b11))
    .with_psdt(Psdt(0b11));

/// Translator of guest commands for one shadow queue.
#[derive(Debug)]
pub struct CommandTranslator {
    table: Arc<RegionTable>,
    lists: ListMemory,
    blocks: LeasedBlocks,
    /// Blocks by which translation leaves LBAs unchanged. [Whole commands](Self::translate_whole) keep the LBAs of the lease
    /// until they are split into parts.
    identity_blocks: LeasedBlocks,
    limits: ControllerLimits,
    /// Limits for translating [whole commands](Self::translate_whole): those of commands that will be split into parts.
    whole_limits: ControllerLimits,
    max_transfer: u64,
    prp_hints: PrpHints,
    sgl_hint: RegionHint,
    /// Ranges of the present command, copied from the guest and not checked.
    ranges: Box<[u64; PAGE_SIZE as usize / 8]>,
}

/// Parts of the translator from which a command's parts are built.
#[derive(Debug)]
pub(super) struct PartContext<'a> {
    pub(super) blocks: &'a LeasedBlocks,
    pub(super) limits: &'a ControllerLimits,
    /// Lists of the slots, followed by the lists for parts of commands.
    pub(super) lists: &'a mut ListMemory,
}

impl CommandTranslator {
    pub(super) fn new(
        table: Arc<RegionTable>,
        lists: ListMemory,
        blocks: LeasedBlocks,
        limits: ControllerLimits,
    ) -> Self {
        Self {
            table,
            lists,
            identity_blocks: blocks.to_identity(),
            blocks,
            limits,
            whole_limits: whole_command_limits(limits),
            max_transfer: limits.max_transfer_bytes(),
            prp_hints: PrpHints::default(),
            sgl_hint: RegionHint::default(),
            ranges: Box::new([0; PAGE_SIZE as usize / 8]),
        }
    }

    /// Returns the table of the VM's memory that the translator uses.
    pub(super) fn table(&self) -> &Arc<RegionTable> {
        &self.table
    }

    /// Sets the table of the VM's memory. Returns the old one.
    pub(super) fn set_table(&mut self, table: Arc<RegionTable>) -> Arc<RegionTable> {
        self.prp_hints = PrpHints::default();
        std::mem::replace(&mut self.table, table)
    }

    /// Makes all further commands fail, because the lease was revoked.
    pub(super) fn revoke(&mut self) {
        self.blocks = self.blocks.to_revoked();
    }

    /// Sets the blocks of the lease. Ignored if the lease is revoked.
    pub(super) fn set_blocks(&mut self, blocks: &LeasedBlocks) {
        if !self.blocks.is_revoked() {
            self.blocks = blocks.clone();
            self.identity_blocks = blocks.to_identity();
        }
    }

    /// Translates a command that is executed [in parts](UntranslatedCommand::InParts). The result keeps the LBAs of the lease
    /// and may exceed the host controller's limits. The result is never submitted itself; the command's parts are made from it.
    ///
    /// # Errors
    /// As [`Self::translate`].
    #[cold]
    pub(super) fn translate_whole(
        &mut self,
        translate: impl FnOnce(&mut Self) -> Result<u32, UntranslatedCommand>,
    ) -> Result<u32, CommandFailure> {
        self.swap_whole_context();
        let translated = translate(self);
        self.swap_whole_context();
        translated.map_err(|error| match error {
            UntranslatedCommand::Failed(failure) => failure,
            // Not reached: the blocks of a whole command are contiguous, and their number is not limited.
            UntranslatedCommand::InParts => {
                CommandFailure::permanent(Status::INTERNAL_ERROR, field_offsets::CDW10)
            }
        })
    }

    fn swap_whole_context(&mut self) {
        std::mem::swap(&mut self.blocks, &mut self.identity_blocks);
        std::mem::swap(&mut self.limits, &mut self.whole_limits);
    }

    /// Returns what is needed to build the parts of a command.
    pub(super) fn part_context(&mut self) -> PartContext<'_> {
        PartContext {
            blocks: &self.blocks,
            limits: &self.limits,
            lists: &mut self.lists,
        }
    }

    /// Returns the memory that the host controller accesses for translated commands.
    #[inline]
    pub(super) fn memory(&self) -> HostMemory<'_> {
        HostMemory {
            table: &self.table,
            lists: &self.lists,
        }
    }

    /// Returns the leased blocks.
    #[must_use]
    pub fn blocks(&self) -> &LeasedBlocks {
        &self.blocks
    }

    /// Returns the limits that were promised to the guest.
    #[must_use]
    pub fn limits(&self) -> &ControllerLimits {
        &self.limits
    }

    /// Translates a command for `slot` of the host controller into `host`. After an error, `host` is not a valid command.
    /// Returns the number of bytes in the VM's memory that the host controller reads or writes. Ranges to deallocate or copy do
    /// not count, because they are copied.
    ///
    /// # Errors
    /// [`UntranslatedCommand`] if the command does not reach the host controller as a single command.
    #[inline(always)]
    pub fn translate(
        &mut self,
        guest: &Sqe,
        slot: u16,
        host: &mut Sqe,
    ) -> Result<u32, UntranslatedCommand> {
        const READ: u32 = NvmOpcode::READ.0 as u32;
        const WRITE: u32 = NvmOpcode::WRITE.0 as u32;
        let opcode = NvmOpcode(guest.opcode());
        // A single comparison detects unfused reads and writes with PRPs, which are nearly all commands.
        let kind = guest.cdw0.0 & (OPCODE.0 | FUSE_AND_PSDT.0);
        if matches!(kind, READ | WRITE) {
            self.check_nsid(guest)?;
            return self.translate_read_write::<true>(guest, opcode, slot, host);
        }
        self.translate_others(guest, opcode, slot, host)
    }

    fn translate_others(
        &mut self,
        guest: &Sqe,
        opcode: NvmOpcode,
        slot: u16,
        host: &mut Sqe,
    ) -> Result<u32, UntranslatedCommand> {
        if matches!(opcode, NvmOpcode::READ | NvmOpcode::WRITE) {
            self.check_common(guest)?;
            return self.translate_read_write::<false>(guest, opcode, slot, host);
        }
        if !self.limits.supports(opcode) {
            return Err(
                CommandFailure::permanent(Status::INVALID_OPCODE, field_offsets::OPCODE).into(),
            );
        }
        match opcode {
            NvmOpcode::FLUSH if guest.nsid == Nsid::BROADCAST => {
                self.check_common(&Sqe {
                    nsid: self.blocks.guest_nsid(),
                    ..*guest
                })?;
                self.init_command(host, opcode.0, slot);
                Ok(0)
            }
            NvmOpcode::FLUSH
            | NvmOpcode::WRITE_UNCORRECTABLE
            | NvmOpcode::COMPARE
            | NvmOpcode::WRITE_ZEROES
            | NvmOpcode::DATASET_MANAGEMENT
            | NvmOpcode::VERIFY
            | NvmOpcode::COPY => {
                self.check_common(guest)?;
                match opcode {
                    NvmOpcode::FLUSH => {
                        self.init_command(host, opcode.0, slot);
                        Ok(0)
                    }
                    NvmOpcode::COMPARE => self.translate_compare(guest, slot, host),
                    NvmOpcode::DATASET_MANAGEMENT => {
                        self.translate_dataset_management(guest, slot, host)
                    }
                    NvmOpcode::COPY => self.translate_copy(guest, slot, host),
                    _ => self.translate_without_data(guest, opcode, slot, host),
                }
            }
            _ => {
                Err(CommandFailure::permanent(Status::INVALID_OPCODE, field_offsets::OPCODE).into())
            }
        }
    }

    /// Checks the fields that all commands have in common (Base 2.0, section 3.3.3.1).
    ///
    /// # Errors
    /// Invalid Field, or Invalid Namespace or Format.
    #[inline(always)]
    pub fn check_common(&self, guest: &Sqe) -> Result<(), CommandFailure> {
        let cdw0 = guest.cdw0;
        if cdw0.0 & FUSE_AND_PSDT.0 != 0 {
            let sgl = cdw0.psdt() == Psdt::SGL_MPTR_BUFFER && self.limits.sgl_descriptors_max > 0;
            if cdw0.fuse() != FusedOperation::NORMAL || !sgl {
                return Err(CommandFailure::permanent(
                    Status::INVALID_FIELD,
                    field_offsets::FUSE_AND_PSDT,
                ));
            }
        }
        self.check_nsid(guest)
    }

    #[inline(always)]
    fn check_nsid(&self, guest: &Sqe) -> Result<(), CommandFailure> {
        if guest.nsid != self.blocks.guest_nsid() {
            return Err(CommandFailure::permanent(
                Status::INVALID_NAMESPACE_OR_FORMAT,
                field_offsets::NSID,
            ));
        }
        Ok(())
    }

    /// Initializes the host's command with an opcode and the slot's number. Its parameters are 0.
    #[inline(always)]
    pub fn init_command(&self, host: &mut Sqe, opcode: u8, slot: u16) {
        let cdw0 = Cdw0::default()
            .with_opcode(opcode)
            .with_cid(CommandId(slot));
        *host = Sqe {
            cdw0,
            nsid: self.blocks.host_nsid(),
            ..Sqe::default()
        };
    }

    /// Translates a Data Pointer into `host`.
    ///
    /// # Errors
    /// [`CommandFailure`] if the data does not lie in the VM's memory.
    #[inline(always)]
    pub fn translate_data(
        &mut self,
        guest: &Sqe,
        len: u64,
        direction: DmaDirection,
        slot: u16,
        host: &mut Sqe,
    ) -> Result<(), CommandFailure> {
        if guest.cdw0.psdt() == Psdt::PRP {
            self.translate_prps(guest, len, direction, slot, host)?;
        } else {
            let hint = &mut self.sgl_hint;
            host.cdw0 = host.cdw0.with_psdt(Psdt::SGL_MPTR_BUFFER);
            host.dptr = sgl::translate(
                &self.table,
                hint,
                guest.dptr,
                len,
                direction,
                &mut self.lists,
                slot,
            )?;
        }
        Ok(())
    }

    /// Translates the command's PRP entries, and puts the result into the host's command.
    #[inline(always)]
    fn translate_prps(
        &mut self,
        guest: &Sqe,
        len: u64,
        direction: DmaDirection,
        slot: u16,
        host: &mut Sqe,
    ) -> Result<(), CommandFailure> {
        // Each branch stores its own result. A common result variable would cost another copy.
        if let Some(prp1) = prp::translate_page(&self.prp_hints, guest.prp1(), len, direction) {
            debug_assert_eq!(
                self.table
                    .translate(
                        Gpa(guest.prp1()),
                        len,
                        direction,
                        &mut RegionHint::default()
                    )
                    .map(Iova::bits),
                Some(prp1),
                "a hint is of another table"
            );
            host.dptr = [prp1, 0];
            return Ok(());
        }
        host.dptr = prp::translate(
            &self.table,
            &mut self.prp_hints,
            guest.dptr,
            len,
            direction,
            &mut self.lists,
            slot,
        )?;
        Ok(())
    }

    /// Translates a Read or a Write. `PRPS` is true if the caller has checked that the command uses PRPs.
    #[inline(always)]
    fn translate_read_write<const PRPS: bool>(
        &mut self,
        guest: &Sqe,
        opcode: NvmOpcode,
        slot: u16,
        host: &mut Sqe,
    ) -> Result<u32, UntranslatedCommand> {
        let command = ReadWrite::from(guest);
        let count = u64::from(command.nlb_z) + 1;
        let slba = self.blocks.translate(command.slba, count)?;
        let len = count << self.blocks.lba_shift();
        if len > self.max_transfer {
            return Err(
                CommandFailure::permanent(Status::INVALID_FIELD, field_offsets::CDW12).into(),
            );
        }
        let direction = if opcode == NvmOpcode::READ {
            DmaDirection::ToGuest
        } else {
            DmaDirection::FromGuest
        };
        self.init_command(host, opcode.0, slot);
        host.set_cdw10_11(slba.0);
        host.cdw12 = guest.cdw12 & READ_WRITE_CDW12;
        if PRPS {
            self.translate_prps(guest, len, direction, slot, host)?;
        } else {
            self.translate_data(guest, len, direction, slot, host)?;
        }
        Ok(len as u32)
    }

    fn translate_compare(
        &mut self,
        guest: &Sqe,
        slot: u16,
        host: &mut Sqe,
    ) -> Result<u32, UntranslatedCommand> {
        let command = CompareVerify::from(guest);
        let count = u64::from(command.nlb_z) + 1;
        let slba = self.blocks.translate(command.slba, count)?;
        let len = count << self.blocks.lba_shift();
        if len > self.max_transfer {
            return Err(
                CommandFailure::permanent(Status::INVALID_FIELD, field_offsets::CDW12).into(),
            );
        }
        self.init_command(host, NvmOpcode::COMPARE.0, slot);
        let CompareVerify { nlb_z, fua, lr, .. } = command;
        CompareVerify {
            slba,
            nlb_z,
            fua,
            lr,
            ..CompareVerify::default()
        }
        .write_to(host);
        self.translate_data(guest, len, DmaDirection::FromGuest, slot, host)?;
        Ok(len as u32)
    }

    /// Translates Write Zeroes, Write Uncorrectable and Verify, which have only a range of blocks.
    fn translate_without_data(
        &mut self,
        guest: &Sqe,
        opcode: NvmOpcode,
        slot: u16,
        host: &mut Sqe,
    ) -> Result<u32, UntranslatedCommand> {
        // All three commands have the range in the same fields.
        let WriteUncorrectable { slba, nlb_z } = WriteUncorrectable::from(guest);
        let count = u64::from(nlb_z) + 1;
        let slba = self.blocks.translate(slba, count)?;
        // The limits are WZSL, WUSL and VSL (NVM 1.0, section 4.1.5.4), which drivers older than NVMe 2.0 do not know.
        if count << self.blocks.lba_shift() > self.limits.no_data_bytes_max {
            return Err(UntranslatedCommand::InParts);
        }
        self.init_command(host, opcode.0, slot);
        match opcode {
            NvmOpcode::WRITE_ZEROES => {
                let WriteZeroes { deac, fua, lr, .. } = WriteZeroes::from(guest);
                let command = WriteZeroes {
                    slba,
                    nlb_z,
                    // DEAC is offered (DLFEAT) only if deallocated blocks read as zeroes.
                    deac: deac && self.limits.deallocated_reads_zeroes,
                    fua,
                    lr,
                    ..WriteZeroes::default()
                };
                command.write_to(host);
            }
            NvmOpcode::VERIFY => {
                let CompareVerify { fua, lr, .. } = CompareVerify::from(guest);
                let command = CompareVerify {
                    slba,
                    nlb_z,
                    fua,
                    lr,
                    ..CompareVerify::default()
                };
                command.write_to(host);
            }
            _ => WriteUncorrectable { slba, nlb_z }.write_to(host),
        }
        Ok(0)
    }

    fn translate_dataset_management(
        &mut self,
        guest: &Sqe,
        slot: u16,
        host: &mut Sqe,
    ) -> Result<u32, UntranslatedCommand> {
        let command = DatasetManagement::from(guest);
        let count = usize::from(command.nr_z) + 1;
        // The limits are DMRL and DMRSL (NVM 1.0, section 4.1.5.4), which drivers older than NVMe 2.0 do not know.
        if count as u64 > u64::from(self.limits.dsm_ranges_max) {
            return Err(UntranslatedCommand::InParts);
        }
        self.init_command(host, NvmOpcode::DATASET_MANAGEMENT.0, slot);
        let len = self.fetch_ranges(guest, count * size_of::<DsmRange>(), slot)?;
        let (blocks, most) = (&self.blocks, self.limits.dsm_range_bytes_max);
        let mut total = 0;
        for range in ranges_mut::<DsmRange>(&mut self.ranges.as_mut_bytes()[..len])? {
            total += u64::from(range.nlb) << blocks.lba_shift();
            if command.ad && total > most {
                return Err(UntranslatedCommand::InParts);
            }
            range.slba = blocks.translate(range.slba, u64::from(range.nlb))?;
            range.cattr = 0;
        }
        self.set_ranges(len, slot, host);
        let DatasetManagement { nr_z, idr, idw, ad } = command;
        DatasetManagement { nr_z, idr, idw, ad }.write_to(host);
        Ok(0)
    }

    fn translate_copy(
        &mut self,
        guest: &Sqe,
        slot: u16,
        host: &mut Sqe,
    ) -> Result<u32, UntranslatedCommand> {
        let command = CopyCommand::from(guest);
        let invalid = CommandFailure::permanent(Status::INVALID_FIELD, field_offsets::CDW12);
        if command.desfmt != CopyFormat::FORMAT_0 {
            return Err(invalid.into());
        }
        let too_large =
            CommandFailure::permanent(Status::COMMAND_SIZE_LIMIT_EXCEEDED, field_offsets::CDW12);
        let count = usize::from(command.nr_z) + 1;
        if count as u64 > u64::from(self.limits.copy_ranges_max) {
            return Err(too_large.into());
        }
        self.init_command(host, NvmOpcode::COPY.0, slot);
        let len = self.fetch_ranges(guest, count * size_of::<CopyRange0>(), slot)?;
        let (blocks, most) = (&self.blocks, self.limits.copy_bytes_max);
        let mut total = 0;
        for range in ranges_mut::<CopyRange0>(&mut self.ranges.as_mut_bytes()[..len])? {
            let count = u64::from(range.nlb_z) + 1;
            total += count;
            if total << blocks.lba_shift() > most {
                return Err(too_large.into());
            }
            let slba = blocks.translate(range.slba, count)?;
            *range = CopyRange0 {
                slba,
                nlb_z: range.nlb_z,
                ..CopyRange0::default()
            };
        }
        let sdlba = self.blocks.translate(command.sdlba, total)?;
        self.set_ranges(len, slot, host);
        let CopyCommand {
            nr_z,
            desfmt,
            fua,
            lr,
            ..
        } = command;
        CopyCommand {
            sdlba,
            nr_z,
            desfmt,
            fua,
            lr,
            ..CopyCommand::default()
        }
        .write_to(host);
        Ok(0)
    }

    /// Copies a command's ranges from guest memory, reading each byte once.
    fn fetch_ranges(
        &mut self,
        guest: &Sqe,
        len: usize,
        slot: u16,
    ) -> Result<usize, CommandFailure> {
        let mut fetched = Sqe::default();
        self.translate_data(
            guest,
            len as u64,
            DmaDirection::FromGuest,
            slot,
            &mut fetched,
        )?;
        let memory = HostMemory {
            table: &self.table,
            lists: &self.lists,
        };
        let mut done = 0;
        let ranges = &mut self.ranges.as_mut_bytes()[..len];
        DataPointer::from_sqe(&fetched)
            .for_each_piece(memory, len as u64, |part| {
                part.copy_to(&mut ranges[done..]);
                done += part.len();
            })
            .map_err(|status| CommandFailure::permanent(status, field_offsets::DATA))?;
        Ok(len)
    }

    /// Puts the translated ranges into the slot's list, and lets the Data Pointer of the host's command refer to them.
    fn set_ranges(&mut self, len: usize, slot: u16, host: &mut Sqe) {
        let (list, iova) = self.lists.slot_list(slot);
        list.as_mut_bytes()[..len].copy_from_slice(&self.ranges.as_bytes()[..len]);
        host.dptr = [iova.bits(), 0];
    }
}

/// Returns the limits for translating whole commands. Their ranges and their blocks without data are not limited, because they
/// are split into parts.
fn whole_command_limits(limits: ControllerLimits) -> ControllerLimits {
    ControllerLimits {
        no_data_bytes_max: u64::MAX,
        dsm_range_bytes_max: u64::MAX,
        dsm_ranges_max: 256,
        ..limits
    }
}

/// Returns the bytes as ranges. The caller ensures that their length is a multiple of a range's size.
fn ranges_mut<T: FromBytes + IntoBytes + zerocopy::KnownLayout>(
    bytes: &mut [u8],
) -> Result<&mut [T], CommandFailure> {
    <[T]>::mut_from_bytes(bytes)
        .map_err(|_| CommandFailure::permanent(Status::INTERNAL_ERROR, field_offsets::DATA))
}
