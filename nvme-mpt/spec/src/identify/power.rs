//! Power states in Identify Controller.

use core::mem::{offset_of, size_of};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Power State Descriptor (Base 2.0, Figure 276).
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct PowerStateDescriptor {
    /// Maximum Power, in centiwatts, or in units of 0.1 mW if [`PowerFlags::mxps`] is set.
    pub mp: u16,
    /// Reserved.
    pub rsvd2: u8,
    /// Max Power Scale and Non-Operational State.
    pub flags: PowerFlags,
    /// Entry Latency, in microseconds.
    pub enlat: u32,
    /// Exit Latency, in microseconds.
    pub exlat: u32,
    /// Relative Read Throughput; 0 is best.
    pub rrt: u8,
    /// Relative Read Latency; 0 is best.
    pub rrl: u8,
    /// Relative Write Throughput; 0 is best.
    pub rwt: u8,
    /// Relative Write Latency; 0 is best.
    pub rwl: u8,
    /// Idle Power.
    pub idlp: u16,
    /// Idle Power Scale, in bits 7:6.
    pub ips: u8,
    /// Reserved.
    pub rsvd19: u8,
    /// Active Power.
    pub actp: u16,
    /// Active Power Workload in bits 2:0 and Active Power Scale in bits 7:6.
    pub apw_aps: u8,
    /// Reserved.
    pub rsvd23: [u8; 9],
}

const _: () = assert!(size_of::<PowerStateDescriptor>() == 32);
const _: () = assert!(offset_of!(PowerStateDescriptor, idlp) == 16);
const _: () = assert!(offset_of!(PowerStateDescriptor, apw_aps) == 22);

bit_field! {
    /// Flags of a [`PowerStateDescriptor`] (Base 2.0, Figure 276).
    pub struct PowerFlags(u8) {
        /// Max Power Scale: units of 0.1 mW rather than 10 mW.
        mxps / with_mxps: bool [0];
        /// Non-Operational State: no I/O commands are processed.
        nops / with_nops: bool [1];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_power_state_is_laid_out_as_specified() {
        let state = PowerStateDescriptor {
            mp: 2500,
            flags: PowerFlags::default().with_nops(true),
            enlat: 0x10,
            exlat: 0x20,
            rwl: 3,
            ..PowerStateDescriptor::default()
        };
        assert_eq!(
            state.as_bytes()[..16],
            [
                0xC4, 0x09, 0, 0b10, 0x10, 0, 0, 0, 0x20, 0, 0, 0, 0, 0, 0, 3
            ]
        );
        assert!(!state.flags.mxps());
    }
}
