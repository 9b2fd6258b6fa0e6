//! All Identify structures, byte by byte.

use nvme_guest::{ControllerLimits, LeasedNamespace, host::TemperatureThresholds};

use super::*;
use crate::fixtures;

/// Returns the Identify subject for a lease of the fixtures.
fn subject<'a>(
    namespace: &'a LeasedNamespace,
    limits: &'a ControllerLimits,
) -> IdentifySubject<'a> {
    IdentifySubject {
        namespace,
        blocks: namespace.blocks,
        used_bytes: 0,
        limits,
        has_doorbell_buffer: true,
        is_active: true,
        thresholds: fixtures::THRESHOLDS,
        unit_blocks: None,
    }
}

fn identify(cns: u8, csi: u8, cntid: u16, nsid: u32) -> Result<Vec<u8>, Status> {
    let (namespace, limits) = (fixtures::namespace(), fixtures::limits());
    let subject = subject(&namespace, &limits);
    let command = IdentifyCommand {
        cns: Cns(cns),
        csi: Csi(csi),
        cntid,
        ..IdentifyCommand::default()
    };
    subject.identify(command, Nsid(nsid))
}

fn structure(cns: u8, nsid: u32) -> Vec<u8> {
    let structure = identify(cns, 0, 0, nsid).expect("a structure");
    assert_eq!(structure.len(), 4096);
    structure
}

#[test]
fn identify_controller_matches_the_implementation() {
    let id = structure(0x01, 0);
    assert_eq!(id[0..4], [0x50, 0x4D, 0x50, 0x4D]);
    assert_eq!(&id[4..24], b"0123456789          ");
    assert_eq!(&id[24..64], b"nvme-mpt memory                         ");
    assert_eq!(&id[64..72], b"0.1.0   ");
    assert_eq!(id[77], 8, "MDTS: 1 MiB");
    assert_eq!(id[78..80], [0, 0], "CNTLID");
    assert_eq!(id[80..84], [0, 0, 2, 0], "VER");
    assert_eq!(
        id[92..96],
        [0, 1, 0, 0],
        "OAES: Namespace Attribute Notices"
    );
    assert_eq!(id[111], 1, "I/O controller");
    assert_eq!(id[256..258], [0x00, 0x01], "OACS: Doorbell Buffer Config");
    assert_eq!(id[258..264], [3, 3, 0x03, 0b111, 63, 0], "ACL to NPSS");
    assert_eq!(id[266..270], [0x57, 0x01, 0x75, 0x01], "WCTEMP, CCTEMP");
    assert_eq!(id[320..322], [0, 0], "KAS");
    assert_eq!(id[512..514], [0x66, 0x44]);
    assert_eq!(id[516..520], [1, 0, 0, 0], "NN");
    assert_eq!(id[520..522], [0xDF, 0x01], "ONCS: all but reservations");
    assert_eq!(id[525], 0b111, "VWC: present, broadcast flush");
    assert_eq!(id[526..530], [0; 4], "AWUN, AWUPF");
    assert_eq!(
        id[534..540],
        [1, 0, 1, 0, 0, 0],
        "Copy format 0, SGLs at any byte"
    );
    let nqn = b"nqn.2014-08.org.nvmexpress:uuid:00112233-4455-6677-8899-aabbccddeeff\0";
    assert_eq!(&id[768..768 + nqn.len()], nqn);
}

#[test]
fn doorbell_buffer_config_is_offered_only_in_useful_modes() {
    let (namespace, limits) = (fixtures::namespace(), fixtures::limits());
    let subject = IdentifySubject {
        namespace: &namespace,
        blocks: namespace.blocks,
        used_bytes: 0,
        limits: &limits,
        has_doorbell_buffer: false,
        is_active: true,
        thresholds: fixtures::THRESHOLDS,
        unit_blocks: None,
    };
    let command = IdentifyCommand {
        cns: Cns::CONTROLLER,
        ..IdentifyCommand::default()
    };
    assert_eq!(
        subject.identify(command, Nsid(0)).expect("a structure")[256..258],
        [0, 0]
    );
}

#[test]
fn identify_omits_abilities_that_the_drive_lacks() {
    let limits = ControllerLimits {
        commands: Oncs::default().with_write_zeroes(true).with_verify(true),
        awun_z: 0x1234,
        awupf_z: 0x0056,
        volatile_write_cache: false,
        deallocated_reads_zeroes: false,
        sgl_descriptors_max: 0,
        ..fixtures::limits()
    };
    let namespace = LeasedNamespace {
        command_sets: fixtures::command_sets(&limits, 9),
        ..fixtures::namespace()
    };
    let subject = IdentifySubject {
        namespace: &namespace,
        blocks: namespace.blocks,
        used_bytes: 0,
        limits: &limits,
        has_doorbell_buffer: true,
        is_active: true,
        thresholds: TemperatureThresholds {
            warning: 0x155,
            critical: 0,
        },
        unit_blocks: None,
    };
    let identify = |cns, nsid| {
        let command = IdentifyCommand {
            cns: Cns(cns),
            ..IdentifyCommand::default()
        };
        subject.identify(command, Nsid(nsid)).expect("a structure")
    };
    let id = identify(0x01, 0);
    assert_eq!(id[266..270], [0x55, 0x01, 0, 0], "WCTEMP, CCTEMP");
    assert_eq!(
        id[520..522],
        [0b1101_1000, 0],
        "ONCS: with Timestamp and Save"
    );
    assert_eq!(id[525], 0b110, "VWC: not present");
    assert_eq!(id[526..530], [0x34, 0x12, 0x56, 0], "AWUN, AWUPF");
    assert_eq!(id[534..540], [0; 6], "no Copy format, no SGLs");
    // VSL and WZSL are reported; WUSL, DMRL and DMRSL are 0.
    assert_eq!(identify(0x06, 0)[..8], [18, 18, 0, 0, 0, 0, 0, 0]);
    let id = identify(0x00, 1);
    assert_eq!(id[33], 0, "DLFEAT");
    assert_eq!(id[74..81], [0; 7], "MSSRL, MCL, MSRC");
}

#[test]
fn an_inactive_namespace_is_in_no_list() {
    let (namespace, limits) = (fixtures::namespace(), fixtures::limits());
    let subject = IdentifySubject {
        namespace: &namespace,
        blocks: namespace.blocks,
        used_bytes: 0,
        limits: &limits,
        has_doorbell_buffer: true,
        is_active: false,
        thresholds: fixtures::THRESHOLDS,
        unit_blocks: None,
    };
    let identify = |cns, nsid| {
        let command = IdentifyCommand {
            cns: Cns(cns),
            ..IdentifyCommand::default()
        };
        subject.identify(command, Nsid(nsid))
    };
    for cns in [0x02, 0x07] {
        assert_eq!(identify(cns, 0), Ok(vec![0; 4096]), "CNS {cns:#x}");
    }
    for cns in [0x00, 0x05, 0x08] {
        assert_eq!(identify(cns, 1), Ok(vec![0; 4096]), "CNS {cns:#x}");
        let invalid = Err(Status::INVALID_NAMESPACE_OR_FORMAT);
        assert_eq!(identify(cns, 2), invalid, "CNS {cns:#x}");
    }
    assert_eq!(identify(0x03, 1), Err(Status::INVALID_FIELD));
    assert_eq!(identify(0x01, 0).expect("a structure")[516], 1, "NN stays");
}

#[test]
fn the_namespace_is_the_lease() {
    let id = structure(0x00, 1);
    for field in [0..8, 8..16, 16..24] {
        assert_eq!(id[field], 0x20_0000_u64.to_le_bytes(), "NSZE, NCAP, NUSE");
    }
    assert_eq!(id[24..27], [0, 0, 0], "NSFEAT, NLBAF, FLBAS");
    assert_eq!(id[33], 0b1001, "deallocated blocks read as zero");
    assert_eq!(id[48..64], (1_u128 << 30).to_le_bytes(), "NVMCAP");
    assert_eq!(id[74..76], [0x00, 0x08], "MSSRL: 1 MiB");
    assert_eq!(id[76..80], [0x00, 0x08, 0, 0], "MCL: 1 MiB");
    assert_eq!(id[80], 127, "MSRC");
    assert_eq!(id[104..120], [0xA0; 16], "NGUID");
    assert_eq!(id[120..128], [0xE0; 8], "EUI64");
    assert_eq!(
        id[128..136],
        [0, 0, 9, 0, 0, 0, 0, 0],
        "one format, of 512 bytes"
    );
}

#[test]
fn an_absent_namespace_is_invalid() {
    for cns in [0x00, 0x03, 0x05, 0x08] {
        for nsid in [0, 2, 0xFFFF_FFFE, 0xFFFF_FFFF] {
            let invalid = Err(Status::INVALID_NAMESPACE_OR_FORMAT);
            assert_eq!(
                identify(cns, 0, 0, nsid),
                invalid,
                "CNS {cns:#x} NSID {nsid:#x}"
            );
        }
    }
}

#[test]
fn the_active_namespace_list_starts_above_the_given_identifier() {
    for cns in [0x02, 0x07] {
        assert_eq!(structure(cns, 0)[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
        for nsid in [1, 2, 0xFFFF_FFFD] {
            assert_eq!(structure(cns, nsid), [0; 4096]);
        }
        for nsid in [0xFFFF_FFFE, 0xFFFF_FFFF] {
            let invalid = Err(Status::INVALID_NAMESPACE_OR_FORMAT);
            assert_eq!(identify(cns, 0, 0, nsid), invalid);
        }
    }
}

#[test]
fn a_namespace_has_four_descriptors() {
    let list = structure(0x03, 1);
    assert_eq!(
        list[..12],
        [1, 8, 0, 0, 0xE0, 0xE0, 0xE0, 0xE0, 0xE0, 0xE0, 0xE0, 0xE0]
    );
    assert_eq!(list[12..16], [2, 16, 0, 0]);
    assert_eq!(list[32..40], [3, 16, 0, 0, 0x00, 0x11, 0x22, 0x33]);
    assert_eq!(
        list[52..58],
        [4, 1, 0, 0, 0, 0],
        "the NVM command set, and the end"
    );
}

#[test]
fn structures_of_the_nvm_command_set() {
    assert_eq!(structure(0x05, 1), [0; 4096]);
    let controller = structure(0x06, 0);
    // 1 GiB for VSL, WZSL and WUSL; 64 ranges of 1 GiB.
    assert_eq!(controller[..8], [18, 18, 18, 64, 0x00, 0x00, 0x20, 0x00]);
    assert_eq!(structure(0x08, 1)[14], 1, "ready");
    for cns in [0x05, 0x06, 0x07] {
        for csi in [1, 2, 0x30] {
            assert_eq!(identify(cns, csi, 0, 1), Err(Status::INVALID_FIELD));
        }
    }
}

#[test]
fn the_nvm_command_set_is_the_only_combination() {
    for cntid in [0, 0xFFFF] {
        let vectors = identify(0x1C, 0, cntid, 0).expect("a structure");
        assert_eq!(
            vectors[..16],
            [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        );
    }
    assert_eq!(identify(0x1C, 0, 1, 0), Err(Status::INVALID_FIELD));
}

#[test]
fn unknown_structures_are_invalid_fields() {
    for cns in 0..=u8::MAX {
        let known = matches!(cns, 0x00..=0x03 | 0x05..=0x08 | 0x1C);
        if !known {
            assert_eq!(
                identify(cns, 0, 0, 1),
                Err(Status::INVALID_FIELD),
                "{cns:#x}"
            );
        }
    }
}

#[test]
fn text_is_printable_and_padded() {
    assert_eq!(&padded::<6>("ab"), b"ab    ");
    assert_eq!(&padded::<2>("abc"), b"ab");
    assert_eq!(&padded::<4>("a\n\u{e9}"), b"a???");
}

#[test]
fn a_lease_by_size_has_boundaries_that_commands_should_not_cross() {
    let (namespace, limits) = (fixtures::namespace(), fixtures::limits());
    for (unit_blocks, noiob) in [(None, 0), (Some(2048), 2048), (Some(1 << 21), 1 << 15)] {
        let subject = IdentifySubject {
            unit_blocks,
            ..subject(&namespace, &limits)
        };
        let id = subject.namespace(namespace.blocks);
        assert_eq!(u16::from_le_bytes([id[46], id[47]]), noiob);
    }
}
