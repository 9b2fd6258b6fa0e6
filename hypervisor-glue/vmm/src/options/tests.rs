//! Parsing and refusal of option strings.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use nvme_guest::adaptive::{AdaptivePolicies, PolicyChoice};
use nvme_guest::rate_limit::{RateLimit, RateLimits};
use nvme_guest::{DoorbellMode, DoorbellStride, MemoryKinds};
use nvme_lease::PreviousDataPolicy;
use nvme_lease::range::{ByteRange, ByteSize};
use nvme_models::DriveProfile;
use nvme_mpt::{BackendOptions, PollPolicy};
use nvme_software::MemoryAllocationTime;
use nvme_spec::ids::Nsid;
use nvme_vfio::ArbitrationChoice;

use super::option_table::{FunctionOption, OPTIONS};
use super::*;
use crate::drives::{DriveOptions, LbaSize};

fn function(text: &str) -> FunctionOptions {
    text.parse().unwrap()
}

/// Returns the error and all its causes, one per line.
fn error_text<T: FromStr<Err = OptionError>>(text: &str) -> String {
    let Err(error) = text.parse::<T>() else {
        panic!("{text} was taken");
    };
    crate::report::chain(&error)
}

#[test]
fn a_path_is_enough() {
    assert_eq!(
        function("path=/var/lib/drive.img"),
        FunctionOptions {
            path: "/var/lib/drive.img".parse().unwrap(),
            drive: DriveOptions {
                lba: None,
                profile: None,
                faults: None,
                name: None,
                populate: None,
                namespace: None,
                timeout: None,
                arbitration: None,
                adaptive: AdaptivePolicies::default(),
                memory: None,
                persisted_faults: None,
            },
            range: None,
            size: None,
            unit: None,
            backend: BackendOptions {
                queue_pairs: 16,
                mdts: None,
                doorbells: DoorbellMode::Auto,
                doorbell_stride: DoorbellStride::Widest,
                poll: PollPolicy::default(),
                adaptive: AdaptivePolicies::default(),
                memory: MemoryKinds::Resident,
                memory_limit: None,
                rates: RateLimits::default(),
                serial: None,
            },
            reserve: 0,
            id: None,
            data: PreviousDataPolicy::Refused,
            is_raw: false,
            reconnect: None,
        }
    );
}

#[test]
fn every_option_is_understood_in_any_order() {
    let options = function(
        "serial=A 1,lba=4096,profile=nvm,faults=none,populate=on,poll=dedicated,fixed=spin+doorbells,memory=any,iops=20000+500,bandwidth=1G,data=wipe,doorbells=mapped,doorbell-stride=4,id=vm-1,queues=4,mdts=2M,range=64G+64G,path=memory:1T",
    );
    assert_eq!(
        options,
        FunctionOptions {
            path: "memory:1T".parse().unwrap(),
            drive: DriveOptions {
                lba: Some(LbaSize::B4096),
                profile: Some(Arc::new(DriveProfile::find_built_in("nvm").unwrap())),
                faults: Some(Arc::default()),
                populate: Some(MemoryAllocationTime::AtOnce),
                ..DriveOptions::default()
            },
            range: Some(ByteRange::new(64 << 30, 64 << 30).unwrap()),
            size: None,
            unit: None,
            backend: BackendOptions {
                queue_pairs: 4,
                mdts: Some("2M".parse().unwrap()),
                doorbells: DoorbellMode::Mapped,
                doorbell_stride: DoorbellStride::Bytes4,
                poll: "dedicated".parse().unwrap(),
                adaptive: AdaptivePolicies {
                    spin: PolicyChoice::Fixed,
                    doorbells: PolicyChoice::Fixed,
                    ..AdaptivePolicies::default()
                },
                memory: MemoryKinds::Any,
                memory_limit: None,
                rates: RateLimits {
                    iops: RateLimit::parse_iops("20000+500").ok(),
                    bandwidth: RateLimit::parse_bandwidth("1G").ok(),
                    weight: None,
                },
                serial: Some("A 1".to_owned()),
            },
            reserve: 0,
            id: Some("vm-1".to_owned()),
            data: PreviousDataPolicy::Erased,
            is_raw: false,
            reconnect: None,
        }
    );
    let physical = function(
        "path=0000:01:00.0,namespace=2,timeout=30,arbitration=weighted,reconnect=90,fixed=governor+budget,queues=4,reserve=4,weight=300,memory-limit=16G",
    );
    assert_eq!((physical.queue_pairs(), physical.reserve), (4, 4));
    assert_eq!(physical.backend.rates.to_string(), "weight=300");
    assert_eq!(physical.backend.adaptive.to_string(), "governor+budget");
    assert_eq!(physical.backend.memory_limit, Some(ByteSize(16 << 30)));
    assert_eq!(physical.drive.namespace, Some(Nsid(2)));
    assert_eq!(physical.drive.timeout, Some(Duration::from_secs(30)));
    assert_eq!(
        physical.drive.arbitration,
        Some(ArbitrationChoice::Weighted)
    );
    let file = |text: &str| text.parse::<FunctionOptions>().unwrap();
    assert_eq!(
        file("path=/d,timeout=45").drive.timeout,
        Some(Duration::from_secs(45))
    );
    assert_eq!(file("path=/d,timeout=none"), file("path=/d"));
    assert_eq!(physical.reconnect, Some(Duration::from_secs(90)));
    let by_size = function("path=/d,size=64G,unit=256M,lease=vm-1");
    assert_eq!(by_size.size, Some(ByteSize(64 << 30)));
    assert_eq!(by_size.unit, Some(ByteSize(1 << 28)));
    assert_eq!(by_size.id.as_deref(), Some("vm-1"));
    let server_options: ServerFunctionOptions = "path=/d,socket=/run/a.sock".parse().unwrap();
    assert_eq!(server_options.socket, PathBuf::from("/run/a.sock"));
    assert_eq!(server_options.function, function("path=/d"));
}

#[test]
fn zones_that_linux_does_not_take_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("odd.toml");
    let profile = "model = \"zns\"\nzone_size = \"96M\"\nzone_capacity = \"96M\"\n\
                   max_open = 1\nmax_active = 1\nappend_limit = \"64K\"\n";
    std::fs::write(&path, profile).unwrap();
    let options = function(&format!("path=null:1G,profile={}", path.display()));
    let caution = options.warnings().join("\n");
    assert!(caution.contains("Linux makes no disk of it"), "{caution}");
    assert!(caution.contains("these have 96M"), "{caution}");
}

#[test]
fn unsuitable_queue_counts_are_named() {
    let cautions = |text: &str| {
        let options = function(&format!("path=null:1G,{text}"));
        (options.queue_pairs(), options.warnings().join("\n"))
    };
    for (text, pairs) in [
        ("queues=511", 511),
        ("queues=31,doorbell-stride=64", 31),
        ("queues=511,doorbell-stride=4", 511),
        ("queues=1024,doorbells=mapped", 1024),
        ("queues=1024,doorbells=trap,doorbell-stride=64", 1024),
        ("queues=2", 2),
        ("queues=2,profile=zns", 2),
    ] {
        assert_eq!(cautions(text), (pairs, String::new()), "{text}");
    }
    for (text, pairs, words) in [
        ("queues=512", 511, ["511 of 512", "4 bytes apart"]),
        (
            "queues=40,doorbell-stride=64,doorbells=shadow",
            31,
            ["31 of 40", "doorbell-stride=4"],
        ),
        ("queues=1", 1, ["OVMF", "queues=2"]),
    ] {
        let (left, caution) = cautions(text);
        assert_eq!(left, pairs, "{text}");
        for word in words {
            assert!(caution.contains(word), "{text}: {caution}");
        }
    }
    let reserved =
        error_text::<FunctionOptions>("path=0000:01:00.0,queues=40,doorbell-stride=64,reserve=32");
    assert!(reserved.contains("31 I/O queue pairs"), "{reserved}");
}

#[test]
fn a_comma_in_a_path_is_quoted() {
    assert_eq!(function("path=\"/a,b\"").path, "/a,b".parse().unwrap());
}

#[test]
fn complaints_name_the_option_the_value_and_what_is_allowed() {
    for (text, message) in [
        (
            "range=0+1G",
            "Option \"path\" is missing: add path=DRIVE, a PCI address, a file, a block device, memory:SIZE or null:SIZE",
        ),
        (
            "path=/d,length=4",
            "There is no option \"length\": the options are path, range, size, unit, queues, reserve, mdts, id, lease, doorbells, doorbell-stride, poll, fixed, memory, memory-limit, iops, \
             bandwidth, weight, data, serial, \
             lba, drive-id, format, profile, faults, populate, namespace, timeout, arbitration, reconnect",
        ),
        (
            "path=/d,socket=/run/a.sock",
            "There is no option \"socket\": the options are path, range, size, unit, queues, reserve, mdts, id, lease, doorbells, doorbell-stride, poll, fixed, memory, memory-limit, iops, \
             bandwidth, weight, data, serial, \
             lba, drive-id, format, profile, faults, populate, namespace, timeout, arbitration, reconnect",
        ),
        (
            "path=/d,queues=0",
            "Option \"queues\" cannot be \"0\"\n  A function has 1 to 1024 I/O queue pairs",
        ),
        (
            "path=/d,queues=1025",
            "Option \"queues\" cannot be \"1025\"\n  A function has 1 to 1024 I/O queue pairs",
        ),
        (
            "path=0000:01:00.0,lba=512",
            "Option \"lba\" is not for 0000:01:00.0: a physical drive has the logical block size \
             with which it was formatted; leave it out",
        ),
        (
            "path=0000:01:00.0,profile=nvm",
            "Option \"profile\" is not for 0000:01:00.0: a physical drive has its own timing; leave it out",
        ),
        (
            "path=memory:1G,profile=fast",
            "Option \"profile\" cannot be \"fast\"\n  There is no profile `fast`; use nvm, ssd, zns, zns-ssd, kv, kv-ssd, or \
             a path with a slash to one of your own, as in ./drive.toml",
        ),
        (
            "path=0000:01:00.0,faults=none",
            "Option \"faults\" is not for 0000:01:00.0: faults can be injected into software drives only; leave it \
             out",
        ),
        (
            "path=memory:1G,profile=kv,lba=4096",
            "Option \"lba\" is not for memory:1G: a drive of keys and values has no logical blocks; leave it out",
        ),
        (
            "path=memory:1G,profile=kv,faults=none",
            "Option \"faults\" is not for memory:1G: faults are declared for logical blocks, which a drive of keys \
             and values does not have; leave it out",
        ),
        (
            "path=memory:1G,faults=/nonexistent/plan",
            "Option \"faults\" cannot be \"/nonexistent/plan\"\n  Fault plan `/nonexistent/plan` cannot be read; \
             name a file, or `none` to begin without faults\n  No such file or directory (os error 2)",
        ),
        (
            "path=null:1G,populate=on",
            "Option \"populate\" is not for null:1G: only the blocks of a drive in memory, as in path=memory:4G, take \
             memory of the host; leave it out",
        ),
        (
            "path=memory:1G,profile=kv,populate=off",
            "Option \"populate\" is not for memory:1G: only the blocks of a drive in memory, as in path=memory:4G, take \
             memory of the host; leave it out",
        ),
        (
            "path=memory:1G,populate=yes",
            "Option \"populate\" cannot be \"yes\"\n  `yes` is not a choice for populate; use on (all memory at the \
             start) or off (as it is written)",
        ),
        (
            "path=memory:1G,namespace=1",
            "Option \"namespace\" is not for memory:1G: only a physical drive, as in path=0000:01:00.0, has \
             more than one namespace; leave it out",
        ),
        (
            "path=/d,fixed=coalescing+doorbell",
            "Option \"fixed\" cannot be \"coalescing+doorbell\"\n  `doorbell` is not adaptive; join names by +, from spin, \
             preemption-backoff, coalescing, governor, doorbells, budget, slices, poll-interval",
        ),
        (
            "path=/d,fixed=spin+governor",
            "Option \"fixed=governor\" is not for /d: only a physical drive has queue pairs that guests share, and \
             an IOMMU; leave it out",
        ),
        (
            "path=memory:1G,fixed=spin+slices",
            "Option \"fixed=slices\" is not for memory:1G: only the blocks of a file or block device are deallocated \
             in slices; leave it out",
        ),
        (
            "path=/d,profile=kv,fixed=slices",
            "Option \"fixed=slices\" is not for /d: only the blocks of a file or block device are deallocated in \
             slices; leave it out",
        ),
        (
            "path=memory:1G,timeout=5",
            "Option \"timeout\" is not for memory:1G: this process executes its commands in memory, so they \
             cannot hang; leave it out",
        ),
        (
            "path=/d,reconnect=soon",
            "Option \"reconnect\" cannot be \"soon\"\n  It is 0 to 4294967295 whole seconds",
        ),
        (
            "path=memory:1G,reconnect=5",
            "Option \"reconnect\" is not for memory:1G: it is in the memory of the process that opens it, so \
             there is no server to wait for; leave it out",
        ),
        (
            "path=memory:1G,reserve=1",
            "Option \"reserve\" is not for memory:1G: only a physical drive, as in path=0000:01:00.0, has a \
             bound on its queue pairs; leave it out",
        ),
        (
            "path=memory:1G,weight=200",
            "Option \"weight\" is not for memory:1G: only a physical drive, as in path=0000:01:00.0, has queue pairs \
             that guests share; leave it out",
        ),
        (
            "path=memory:1G,memory-limit=2G",
            "Option \"memory-limit\" is not for memory:1G: only a physical drive, as in path=0000:01:00.0, pins the memory \
             of its VMs; leave it out",
        ),
        (
            "path=0000:01:00.0,memory-limit=16",
            "Option \"memory-limit\" cannot be \"16\"\n  That is too little memory for a VM: write at least 1M, as in 16G",
        ),
        (
            "path=0000:01:00.0,memory-limit=much",
            "Option \"memory-limit\" cannot be \"much\"\n  \"much\" is not a size: write bytes, or a number with suffix K, M, G \
             or T (powers of 1024), such as 64G",
        ),
        (
            "path=0000:01:00.0,weight=0",
            "Option \"weight\" cannot be \"0\"\n  A weight is a whole number from 1 to 1000, as in 300; 100 is the \
             usual one",
        ),
        (
            "path=0000:01:00.0,queues=2,reserve=3",
            "Option \"reserve\" cannot be \"3\"\n  The function has 2 I/O queue pairs: reserve at most that, or \
             raise queues=",
        ),
        (
            "path=0000:01:00.0,reserve=some",
            "Option \"reserve\" cannot be \"some\"\n  A function has 0 to 1024 queue pairs for itself alone",
        ),
        (
            "path=/d,size=1G",
            "Option \"size=1G\" needs lease= (or id= on a server): only its name identifies the lease at the next start; add \
             that, or leave it out",
        ),
        (
            "path=/d,size=1G,range=0+1G,id=a",
            "Options \"range\" and \"size\" are both given: a lease has a fixed range or a size; keep one",
        ),
        (
            "path=/d,size=1G,data=keep,id=a",
            "Options \"size\" and \"data=keep\" are both given: data is taken over with its range; use range= \
             instead of size=; keep one",
        ),
        (
            "path=/d,unit=1G,range=0+1G",
            "Option \"unit=1G\" needs size=: a range is not divided into units; add that, or leave it out",
        ),
        (
            "path=/d,id=a,lease=a",
            "Options \"id\" and \"lease\" are both given: they are two names of one option; keep one",
        ),
        (
            "path=0000:01:00.0,namespace=0",
            "Option \"namespace\" cannot be \"0\"\n  A namespace is a number from 1 to \
             4294967294; `nvme-mpt drives` shows them",
        ),
        (
            "path=/d,arbitration=weighted",
            "Option \"arbitration\" is not for /d: only a physical drive, as in path=0000:01:00.0, has an arbitration \
             between its queues; leave it out",
        ),
        (
            "path=0000:01:00.0,arbitration=urgent",
            "Option \"arbitration\" cannot be \"urgent\"\n  `urgent` is not an arbitration; use round-robin (queues \
             have turns) or weighted (the drive counts weights)",
        ),
        (
            "path=0000:01:00.0,timeout=0",
            "Option \"timeout\" cannot be \"0\"\n  A timeout is 1 to 3600 whole seconds, or none",
        ),
        (
            "path=0000:01:00.0,timeout=none",
            "Option \"timeout\" cannot be \"none\"\n  A physical drive needs one: without it, guests wait forever \
             for commands that the drive loses",
        ),
        (
            "path=/d,doorbells=mapped,poll=shared:event",
            "Option \"doorbells=mapped\" needs a poller that polls: poll=shared or dedicated without :event: a \
             guest's store to a mapped doorbell does not wake a poller; add that, or leave it out",
        ),
        (
            "path=/d,memory=any",
            "Option \"memory=any\" needs poll=dedicated: page faults in such memory may stop its pollers; add \
             that, or leave it out",
        ),
        (
            "path=0000:01:00.0,memory=any,poll=dedicated",
            "Option \"memory\" is not for 0000:01:00.0: it pins the memory of all its VMs, and a page fault that \
             waits would delay other VMs; leave it out",
        ),
        (
            "path=/d,lba=520",
            "Option \"lba\" cannot be \"520\"\n  A logical block has 512 or 4096 bytes",
        ),
        (
            "path=/d,range=1G",
            "Option \"range\" cannot be \"1G\"\n  \"1G\" is not a range: write START+LENGTH, such as 64G+64G",
        ),
        (
            "path=/d,range=1G+1Q",
            "Option \"range\" cannot be \"1G+1Q\"\n  \"1G+1Q\" is not a range: its length is wrong\n  \
             \"1Q\" is not a size: write bytes, or a number with suffix K, M, G or T (powers of 1024), such as 64G",
        ),
        (
            "path=/d,serial=123456789012345678901",
            "Option \"serial\" cannot be \"123456789012345678901\"\n  A serial number has 1 to 20 ASCII \
             characters, without spaces around it",
        ),
    ] {
        assert_eq!(error_text::<FunctionOptions>(text), message);
    }
    for key in ["doorbells", "poll", "fixed", "memory", "data"] {
        let error_message = error_text::<FunctionOptions>(&format!("path=/d,{key}=never"));
        assert!(
            error_message.starts_with(&format!("Option \"{key}\" cannot be \"never\"\n  ")),
            "{error_message}"
        );
    }
}

/// Returns whether an option's value is a number, possibly with a unit.
fn is_numeric(option: &FunctionOption) -> bool {
    let mut forms = option.help.value.split(['|', '+', '[']);
    forms.any(|form| {
        matches!(form, "N" | "NUMBER" | "SIZE" | "SECONDS" | "START") || form.parse::<u64>().is_ok()
    })
}

#[test]
fn a_wrong_number_is_answered_with_the_option_its_value_and_what_it_accepts() {
    let numeric: Vec<_> = OPTIONS.iter().filter(|option| is_numeric(option)).collect();
    assert!(
        OPTIONS
            .iter()
            .all(|option| option.number.is_none() || is_numeric(option))
    );
    assert_eq!(numeric.len(), 15);
    let of_numbers = [
        "many".parse::<u8>(),
        "-1".parse(),
        "999".parse(),
        "".parse(),
    ];
    let unspecific = of_numbers.map(|number| number.unwrap_err().to_string());
    for value in ["many", "-1", "1.5", "99999999999999999999999"] {
        for option in &numeric {
            let key = option.help.key;
            let pairs = [("path", "0000:01:00.0"), (key, value)];
            let config = FunctionConfig::from_pairs(pairs);
            let config = config.and_then(|config| config.options()).unwrap_err();
            for message in [
                error_text::<FunctionOptions>(&format!("path=0000:01:00.0,{key}={value}")),
                crate::report::chain(&config),
            ] {
                let start = format!("Option \"{key}\" cannot be \"{value}\"\n  ");
                let accepted = message.strip_prefix(&start).expect(&message);
                assert!(!unspecific.iter().any(|text| text == accepted), "{message}");
            }
        }
    }
    for option in OPTIONS.iter().filter(|option| option.number.is_some()) {
        let key = option.help.key;
        for (value, shown) in [
            ("\"many\"", "string \"many\""),
            ("-1", "integer `-1`"),
            ("1.5", "floating point `1.5`"),
            ("true", "boolean `true`"),
        ] {
            let json = format!(r#"{{"path":"0000:01:00.0","{key}":{value}}}"#);
            let error = serde_json::from_str::<FunctionConfig>(&json).unwrap_err();
            let expected = format!("{shown}, expected a whole number for the option \"{key}\"");
            assert!(error.to_string().contains(&expected), "{error}");
        }
    }
    for key in RateChange::KEYS {
        let message = error_text::<RateChange>(&format!("{key}=many"));
        assert!(message.starts_with(&format!("Option \"{key}\" cannot be \"many\"\n  ")));
        assert!(
            !unspecific.iter().any(|text| message.ends_with(text)),
            "{message}"
        );
    }
}

#[test]
fn a_socket_has_a_path_that_fits() {
    assert_eq!(
        error_text::<ServerFunctionOptions>("path=/d"),
        "Option \"socket\" is missing: add socket=PATH, where the VMM connects"
    );
    let longest = format!("/{}", "x".repeat(106));
    let options: ServerFunctionOptions = format!("path=/d,socket={longest}").parse().unwrap();
    assert_eq!(options.socket, PathBuf::from(longest));
    let too_long = format!("/{}", "x".repeat(107));
    let message = error_text::<ServerFunctionOptions>(&format!("path=/d,socket={too_long}"));
    assert!(
        message.ends_with(
            "The path of a socket has at most 107 bytes, this one has 108: use a shorter directory, such as one in \
             /run"
        ),
        "{message}"
    );
}
