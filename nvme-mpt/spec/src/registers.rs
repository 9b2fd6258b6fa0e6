//! Controller properties in BAR0: offsets and bits (Base 2.0, section 3.1.3; PCIe 1.0, section 3.1).

use super::ids::QueueId;

/// Offsets of the properties (Base 2.0, Figure 35).
pub mod offset {
    /// Controller Capabilities, 8 bytes.
    pub const CAP: u64 = 0x00;
    /// Version.
    pub const VS: u64 = 0x08;
    /// Interrupt Mask Set; undefined while MSI-X is enabled.
    pub const INTMS: u64 = 0x0C;
    /// Interrupt Mask Clear; undefined while MSI-X is enabled.
    pub const INTMC: u64 = 0x10;
    /// Controller Configuration.
    pub const CC: u64 = 0x14;
    /// Controller Status.
    pub const CSTS: u64 = 0x1C;
    /// NVM Subsystem Reset.
    pub const NSSR: u64 = 0x20;
    /// Admin Queue Attributes.
    pub const AQA: u64 = 0x24;
    /// Admin Submission Queue Base Address, 8 bytes.
    pub const ASQ: u64 = 0x28;
    /// Admin Completion Queue Base Address, 8 bytes.
    pub const ACQ: u64 = 0x30;
    /// Controller Memory Buffer Location.
    pub const CMBLOC: u64 = 0x38;
    /// Controller Memory Buffer Size.
    pub const CMBSZ: u64 = 0x3C;
    /// Boot Partition Information.
    pub const BPINFO: u64 = 0x40;
    /// Boot Partition Read Select.
    pub const BPRSEL: u64 = 0x44;
    /// Boot Partition Memory Buffer Location, 8 bytes.
    pub const BPMBL: u64 = 0x48;
    /// Controller Memory Buffer Memory Space Control, 8 bytes.
    pub const CMBMSC: u64 = 0x50;
    /// Controller Memory Buffer Status.
    pub const CMBSTS: u64 = 0x58;
    /// Controller Memory Buffer Elasticity Buffer Size.
    pub const CMBEBS: u64 = 0x5C;
    /// Controller Memory Buffer Sustained Write Throughput.
    pub const CMBSWTP: u64 = 0x60;
    /// NVM Subsystem Shutdown.
    pub const NSSD: u64 = 0x64;
    /// Controller Ready Timeouts.
    pub const CRTO: u64 = 0x68;
    /// Persistent Memory Capabilities.
    pub const PMRCAP: u64 = 0xE00;
    /// Persistent Memory Region Control.
    pub const PMRCTL: u64 = 0xE04;
    /// Persistent Memory Region Status.
    pub const PMRSTS: u64 = 0xE08;
    /// Persistent Memory Region Elasticity Buffer Size.
    pub const PMREBS: u64 = 0xE0C;
    /// Persistent Memory Region Sustained Write Throughput.
    pub const PMRSWTP: u64 = 0xE10;
    /// Persistent Memory Region Controller Memory Space Control Lower.
    pub const PMRMSCL: u64 = 0xE14;
    /// Persistent Memory Region Controller Memory Space Control Upper.
    pub const PMRMSCU: u64 = 0xE18;
    /// First doorbell, of the Admin Submission Queue (PCIe 1.0, section 3.1.2).
    pub const DOORBELLS: u64 = 0x1000;
}

/// Value that a 4-byte property reads as after the device was removed from the bus.
pub const REMOVED: u32 = 0xFFFF_FFFF;

bit_field! {
    /// Controller Capabilities, `CAP` (Base 2.0, section 3.1.3.1).
    pub struct Cap(u64) {
        /// Maximum Queue Entries Supported, of an I/O queue.
        mqes_z / with_mqes_z: u16 [15:0];
        /// Contiguous Queues Required.
        cqr / with_cqr: bool [16];
        /// Arbitration Mechanism Supported: weighted round robin with urgent priority class.
        ams_wrr / with_ams_wrr: bool [17];
        /// Timeout: maximum time until `CSTS.RDY` follows `CC.EN`, in units of 500 ms.
        to / with_to: u8 [31:24];
        /// Doorbell Stride: the distance of doorbells is `4 << dstrd` bytes.
        dstrd / with_dstrd: u8 [35:32];
        /// NVM Subsystem Reset Supported.
        nssrs / with_nssrs: bool [36];
        /// Command Sets Supported: the NVM Command Set.
        css_nvm / with_css_nvm: bool [37];
        /// Command Sets Supported: one or more I/O command sets, listed by CNS 1Ch.
        css_io / with_css_io: bool [43];
        /// Command Sets Supported: no I/O command set.
        css_none / with_css_none: bool [44];
        /// Boot Partition Support.
        bps / with_bps: bool [45];
        /// Controller Power Scope.
        cps / with_cps: u8 [47:46];
        /// Memory Page Size Minimum, a power of two in units of 4 KiB.
        mpsmin / with_mpsmin: u8 [51:48];
        /// Memory Page Size Maximum, a power of two in units of 4 KiB.
        mpsmax / with_mpsmax: u8 [55:52];
        /// Persistent Memory Region Supported.
        pmrs / with_pmrs: bool [56];
        /// Controller Memory Buffer Supported.
        cmbs / with_cmbs: bool [57];
        /// NVM Subsystem Shutdown Supported.
        nsss / with_nsss: bool [58];
        /// Controller Ready Modes Supported: Controller Ready With Media.
        crwms / with_crwms: bool [59];
        /// Controller Ready Modes Supported: Controller Ready Independent of Media.
        crims / with_crims: bool [60];
    }
}

bit_field! {
    /// Version, `VS` (Base 2.0, section 3.1.3.2). `VER` of Identify Controller has this form as well.
    pub struct NvmeVersion(u32) {
        /// Tertiary Version Number.
        ter / with_ter: u8 [7:0];
        /// Minor Version Number.
        mnr / with_mnr: u8 [15:8];
        /// Major Version Number.
        mjr / with_mjr: u16 [31:16];
    }
}

impl NvmeVersion {
    /// NVM Express Base Specification 2.0.
    pub const V2_0: Self = Self(0x0002_0000);
}

bit_field! {
    /// Controller Configuration, `CC` (Base 2.0, section 3.1.3.5).
    pub struct Cc(u32) {
        /// Enable.
        en / with_en: bool [0];
        /// I/O Command Set Selected.
        css / with_css: CommandSetSelected(u8) [6:4];
        /// Memory Page Size, a power of two in units of 4 KiB.
        mps / with_mps: u8 [10:7];
        /// Arbitration Mechanism Selected.
        ams / with_ams: ArbitrationMechanism(u8) [13:11];
        /// Shutdown Notification.
        shn / with_shn: ShutdownNotification(u8) [15:14];
        /// I/O Submission Queue Entry Size, as a power of two.
        iosqes / with_iosqes: u8 [19:16];
        /// I/O Completion Queue Entry Size, as a power of two.
        iocqes / with_iocqes: u8 [23:20];
        /// Controller Ready Independent of Media Enable.
        crime / with_crime: bool [24];
    }
}

open_enum! {
    /// I/O Command Set Selected, `CC.CSS` (Base 2.0, section 3.1.3.5).
    pub struct CommandSetSelected(u8) {
        NVM = 0b000, "NVM Command Set";
        ALL = 0b110, "All Supported I/O Command Sets";
        ADMIN_ONLY = 0b111, "Admin Command Set only";
    }
}

open_enum! {
    /// Arbitration Mechanism Selected, `CC.AMS` (Base 2.0, section 3.1.3.5).
    pub struct ArbitrationMechanism(u8) {
        ROUND_ROBIN = 0b000, "Round Robin";
        WEIGHTED_ROUND_ROBIN = 0b001, "Weighted Round Robin with Urgent Priority Class";
        VENDOR_SPECIFIC = 0b111, "Vendor Specific";
    }
}

open_enum! {
    /// Shutdown Notification, `CC.SHN` (Base 2.0, section 3.1.3.5).
    pub struct ShutdownNotification(u8) {
        NONE = 0b00, "No notification";
        NORMAL = 0b01, "Normal shutdown notification";
        ABRUPT = 0b10, "Abrupt shutdown notification";
    }
}

bit_field! {
    /// Controller Status, `CSTS` (Base 2.0, section 3.1.3.6).
    pub struct Csts(u32) {
        /// Ready.
        rdy / with_rdy: bool [0];
        /// Controller Fatal Status.
        cfs / with_cfs: bool [1];
        /// Shutdown Status.
        shst / with_shst: ShutdownStatus(u8) [3:2];
        /// NVM Subsystem Reset Occurred.
        nssro / with_nssro: bool [4];
        /// Processing Paused.
        pp / with_pp: bool [5];
        /// Shutdown Type: set for a shutdown of the NVM subsystem, clear for a shutdown of the controller.
        st / with_st: bool [6];
    }
}

open_enum! {
    /// Shutdown Status, `CSTS.SHST` (Base 2.0, section 3.1.3.6).
    pub struct ShutdownStatus(u8) {
        NORMAL = 0b00, "Normal operation";
        OCCURRING = 0b01, "Shutdown processing occurring";
        COMPLETE = 0b10, "Shutdown processing complete";
    }
}

/// Value to write to `NSSR` to reset the NVM subsystem: "NVMe" (Base 2.0, section 3.1.3.7).
pub const NSSR_RESET: u32 = 0x4E56_4D65;

bit_field! {
    /// Admin Queue Attributes, `AQA` (Base 2.0, section 3.1.3.8).
    pub struct Aqa(u32) {
        /// Admin Submission Queue Size, in entries.
        asqs_z / with_asqs_z: u16 [11:0];
        /// Admin Completion Queue Size, in entries.
        acqs_z / with_acqs_z: u16 [27:16];
    }
}

bit_field! {
    /// Controller Ready Timeouts, `CRTO` (Base 2.0, section 3.1.3.21).
    pub struct Crto(u32) {
        /// Controller Ready With Media Timeout, in units of 500 ms.
        crwmt / with_crwmt: u16 [15:0];
        /// Controller Ready Independent of Media Timeout, in units of 500 ms.
        crimt / with_crimt: u16 [31:16];
    }
}

/// Doorbell, which the host writes: the tail of a Submission Queue or the head of a Completion Queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Doorbell {
    /// Submission Queue Tail Doorbell, `SQyTDBL` (PCIe 1.0, section 3.1.2.1).
    SqTail(QueueId),
    /// Completion Queue Head Doorbell, `CQyHDBL` (PCIe 1.0, section 3.1.2.2).
    CqHead(QueueId),
}

impl Doorbell {
    /// Returns the distance of doorbells in bytes, for the stride `dstrd` (`CAP.DSTRD`).
    #[inline]
    #[must_use]
    pub const fn stride_bytes(dstrd: u8) -> u64 {
        4 << (dstrd & 0xF)
    }

    /// Returns the size in bytes of the doorbells of the admin queues and `io_queues` I/O queue pairs. BAR0 and both
    /// buffers of Doorbell Buffer Config (Base 2.0, section 5.8) have this size.
    #[inline]
    #[must_use]
    pub const fn area_bytes(io_queues: u16, dstrd: u8) -> u64 {
        (io_queues as u64 + 1) * 2 * Self::stride_bytes(dstrd)
    }

    /// Returns the index of the doorbell among all doorbells of the controller.
    #[inline]
    #[must_use]
    pub const fn index(self) -> u32 {
        match self {
            Self::SqTail(QueueId(qid)) => 2 * qid as u32,
            Self::CqHead(QueueId(qid)) => 2 * qid as u32 + 1,
        }
    }

    /// Returns the doorbell's offset from the first doorbell, which is also its offset in a doorbell buffer.
    #[inline]
    #[must_use]
    pub const fn offset(self, dstrd: u8) -> u64 {
        self.index() as u64 * Self::stride_bytes(dstrd)
    }

    /// Returns the doorbell's offset in BAR0.
    #[inline]
    #[must_use]
    pub const fn bar_offset(self, dstrd: u8) -> u64 {
        offset::DOORBELLS + self.offset(dstrd)
    }

    /// Returns the doorbell at an offset in BAR0; `None` if no doorbell starts there.
    #[inline]
    #[must_use]
    pub const fn from_bar_offset(bar_offset: u64, dstrd: u8) -> Option<Self> {
        let Some(from_first) = bar_offset.checked_sub(offset::DOORBELLS) else {
            return None;
        };
        let spacing = Self::stride_bytes(dstrd);
        let index = from_first / spacing;
        if !from_first.is_multiple_of(spacing) || index / 2 > u16::MAX as u64 {
            return None;
        }
        let qid = QueueId((index / 2) as u16);
        Some(if index.is_multiple_of(2) {
            Self::SqTail(qid)
        } else {
            Self::CqHead(qid)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cap_is_laid_out_as_specified() {
        // MQES 1023, CQR, TO 20 s, DSTRD 4, NVM command set, 4 KiB to 64 KiB pages, CRWMS.
        let cap = Cap::default()
            .with_mqes_z(1023)
            .with_cqr(true)
            .with_to(40)
            .with_dstrd(4)
            .with_css_nvm(true)
            .with_mpsmax(4)
            .with_crwms(true);
        assert_eq!(cap.0, 0x0840_0024_2801_03FF);
        assert_eq!(
            (cap.mqes_z(), cap.to(), cap.dstrd(), cap.mpsmax()),
            (1023, 40, 4, 4)
        );
        assert!(!cap.css_io() && !cap.nssrs() && !cap.crims());
    }

    #[test]
    fn linux_enables_with_460001() {
        let cc = Cc(0x0046_0001);
        assert!(cc.en());
        assert_eq!((cc.iosqes(), cc.iocqes(), cc.mps()), (6, 4, 0));
        assert_eq!(cc.css(), CommandSetSelected::NVM);
        assert_eq!(cc.ams(), ArbitrationMechanism::ROUND_ROBIN);
        assert_eq!(cc.shn(), ShutdownNotification::NONE);
        assert_eq!(cc.with_shn(ShutdownNotification::NORMAL).0, 0x0046_4001);
        assert_eq!(Cc::default().with_css(CommandSetSelected::ALL).0, 0x60);
    }

    #[test]
    fn csts_aqa_vs_and_crto() {
        let done = Csts::default()
            .with_rdy(true)
            .with_shst(ShutdownStatus::COMPLETE);
        assert_eq!(done.0, 0b1001);
        assert_eq!(Csts::default().with_cfs(true).with_nssro(true).0, 0b1_0010);
        let aqa = Aqa(0x001F_003F);
        assert_eq!((aqa.asqs_z(), aqa.acqs_z()), (63, 31));
        assert_eq!(NvmeVersion::V2_0, NvmeVersion::default().with_mjr(2));
        assert_eq!(NvmeVersion(0x0001_0401).mnr(), 4);
        assert_eq!(Crto(0x0003_0028).crwmt(), 40);
        assert_eq!(NSSR_RESET.to_be_bytes(), *b"NVMe");
    }

    #[test]
    fn doorbells_alternate_at_the_stride() {
        assert_eq!(Doorbell::SqTail(QueueId(0)).bar_offset(0), 0x1000);
        assert_eq!(Doorbell::CqHead(QueueId(0)).bar_offset(0), 0x1004);
        assert_eq!(Doorbell::SqTail(QueueId(3)).bar_offset(0), 0x1018);
        assert_eq!(Doorbell::CqHead(QueueId(1)).bar_offset(4), 0x1000 + 3 * 64);
        assert_eq!(Doorbell::area_bytes(31, 4), 4096);
        for dstrd in 0..16 {
            for doorbell in [
                Doorbell::SqTail(QueueId(u16::MAX)),
                Doorbell::CqHead(QueueId(5)),
            ] {
                let at = doorbell.bar_offset(dstrd);
                assert_eq!(Doorbell::from_bar_offset(at, dstrd), Some(doorbell));
                assert_eq!(Doorbell::from_bar_offset(at + 1, dstrd), None);
            }
        }
        assert_eq!(Doorbell::from_bar_offset(0xFFC, 0), None);
        let last = Doorbell::CqHead(QueueId(u16::MAX)).bar_offset(0);
        assert_eq!(Doorbell::from_bar_offset(last + 4, 0), None);
        assert_eq!(Doorbell::from_bar_offset(u64::MAX, 0), None);
    }
}
