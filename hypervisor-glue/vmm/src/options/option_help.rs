//! Table of all options, from which error messages and help texts are made.

/// An option of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHelp {
    /// The key.
    pub key: &'static str,
    /// Form of the value, as in `START+LENGTH`.
    pub value: &'static str,
    /// Help text. Its lines are filled again for a terminal.
    pub help: &'static str,
}

const fn option(key: &'static str, value: &'static str, help: &'static str) -> OptionHelp {
    OptionHelp { key, value, help }
}

/// Options of a server's function in addition to [`OPTIONS`]. The first option is mandatory.
pub const SERVER_OPTIONS: &[OptionHelp] = &[
    option(
        "socket",
        "PATH",
        "path of the UNIX socket on which the VMM connects",
    ),
    option(
        "mode",
        "MODE",
        "file mode of the socket in octal, 0000 to 0777 [default: 0600]",
    ),
    option(
        "owner",
        "USER[:GROUP]",
        "user and group that own the socket; the user owns the lease as well [default: those
of the server]",
    ),
];

/// Options of a function. The first option is mandatory.
pub const OPTIONS: &[OptionHelp] = &[
    option(
        "path",
        "DRIVE",
        "the address of a PCI function, as in 0000:01:00.0, a file, a block device,
memory:SIZE or null:SIZE; functions of this server with the same path share the drive",
    ),
    option(
        "range",
        "START+LENGTH",
        "the part of the drive that the guest gets, in bytes, as in 64G+64G
[default: all of it]",
    ),
    option(
        "size",
        "SIZE",
        "instead of range=: bytes of a lease wherever the drive has free space, as in 64G; needs id=
or lease=. `nvme-mpt resize` makes it larger while its guest runs",
    ),
    option(
        "unit",
        "SIZE",
        "with size=: extents of the lease begin and end at multiples of it, a power of two,
1M or more [default: 1G; a zone on a drive of zones]",
    ),
    option(
        "queues",
        "N",
        "most I/O queue pairs that the guest gets, 1 to 1024; at most 511 with a Doorbell Buffer,
so not with doorbells=mapped or trap [default: 16]",
    ),
    option(
        "reserve",
        "N",
        "I/O queue pairs of a physical drive that belong to this function alone, at most those
of queues= [default: 0]",
    ),
    option(
        "mdts",
        "SIZE",
        "most data of one command, a power of two from 8K to 2M; at most 1M on a physical drive
[default: 1M]",
    ),
    option(
        "id",
        "ID",
        "name of the function and of its lease [default: made from drive and range]",
    ),
    option(
        "lease",
        "ID",
        "the same as id=, for a VMM whose own options have an id=",
    ),
    option(
        "doorbells",
        "auto|shadow|mapped|trap",
        "auto, shadow, mapped or trap [default: auto]",
    ),
    option(
        "doorbell-stride",
        "4|64",
        "bytes from one doorbell to the next; 4 for drivers and firmware that support no other. With
64, a Doorbell Buffer holds 31 queue pairs [default: 64, or less for many queues]",
    ),
    option(
        "poll",
        "POLICY",
        "shared or dedicated, then :adaptive, :busy or :event, then @ and processor numbers
joined by +, as in dedicated:busy@2+3, or @vcpu behind dedicated [default: shared]",
    ),
    option(
        "fixed",
        "NAME+NAME",
        "policies that do not adapt, joined by +: spin, preemption-backoff, coalescing, governor,
doorbells, budget, slices, poll-interval [default: all adapt]",
    ),
    option(
        "memory",
        "resident|any",
        "files that may hold the guest's memory: resident (memfd, tmpfs, hugetlbfs), or any, whose
page faults may wait; any needs poll=dedicated [default: resident]",
    ),
    option(
        "memory-limit",
        "SIZE",
        "most bytes of the guest's memory that are mapped for a physical drive, which pins them,
as in 17G; memory counts as often as it is mapped [default: the memory of the host]",
    ),
    option(
        "iops",
        "NUMBER[+BURST]",
        "most I/O commands per second, and commands that may come at once after idleness, as
in 20000+500 [default: no limit; BURST: those of 10 ms]",
    ),
    option(
        "bandwidth",
        "SIZE[+BURST]",
        "most bytes per second that are read and written, as in 100M+1G
[default: no limit; BURST: those of 10 ms]",
    ),
    option(
        "weight",
        "N",
        "share of a physical drive's queue pair beside busy guests that share it, 1 to 1000: a guest
with 300 gets three times as much as one with 100 [default: 100]",
    ),
    option(
        "data",
        "keep|wipe",
        "data that another id left in the range: keep hands it over, wipe erases it first
[default: such a range is refused]",
    ),
    option(
        "serial",
        "SERIAL",
        "serial number that the guest sees [default: made from drive, range and id]",
    ),
    option(
        "lba",
        "512|4096",
        "bytes of a logical block of a software drive, 512 or 4096 [default: 512]",
    ),
    option(
        "drive-id",
        "NAME",
        "name of the label that `nvme-mpt leases label` gave the drive, for disks without a serial
number [default: the drive is known by itself]",
    ),
    option(
        "format",
        "raw",
        "raw: the guest gets a file or block device as it is, although it begins with the header of a
disk image or of LUKS [default: its first lease is refused]",
    ),
    option(
        "profile",
        "PROFILE",
        "kind of software drive: nvm or ssd (timing), zns or zns-ssd (zones), kv or kv-ssd (keys and
values), or a path with a slash to a file like those in resources/drives [default: as fast
as it can be]",
    ),
    option(
        "faults",
        "PLAN",
        "a file with faults of a software drive, like resources/faults/example.toml, or none, to
inject faults later with `nvme-mpt fault` [default: the drive never fails]",
    ),
    option(
        "populate",
        "on|off",
        "on: a drive in memory allocates all of it at the start, so that first writes are as fast
as others [default: off, memory is allocated as it is written]",
    ),
    option(
        "namespace",
        "N",
        "namespace of a physical drive [default: its first]",
    ),
    option(
        "timeout",
        "SECONDS|none",
        "seconds that a drive may take for a command. Then a physical drive aborts it, or is reset;
the guest of a file or block device sees CSTS.CFS [default: 10 if physical, else none]",
    ),
    option(
        "arbitration",
        "round-robin|weighted",
        "weighted: a physical drive that has weighted round robin divides itself among busy guests by
weight=, also while it is fast; one value per drive [default: round-robin]",
    ),
    option(
        "reconnect",
        "SECONDS",
        "seconds that a function in a VMM waits for a drive server to come back; 0: no wait
[default: no limit]",
    ),
];

/// Returns the keys of [`OPTIONS`].
pub(super) fn keys() -> impl Iterator<Item = &'static str> {
    OPTIONS.iter().map(|option| option.key)
}

/// Returns [`SERVER_OPTIONS`] and [`OPTIONS`].
pub(super) fn server_options() -> impl Iterator<Item = &'static OptionHelp> {
    SERVER_OPTIONS.iter().chain(OPTIONS)
}

/// Mandatory options.
const REQUIRED: [&str; 2] = ["socket", "path"];

/// Maximum line length of [`synopsis`] and [`help`], so that help with an indentation of 13 fits into 80 columns.
const LINE_MAX: usize = 67;

/// Returns the synopsis of a server function's option string, in several lines.
#[must_use]
pub fn synopsis() -> String {
    let is_required = |option: &&OptionHelp| REQUIRED.contains(&option.key);
    let required = server_options().filter(is_required);
    let others = server_options().filter(|option| !is_required(option));
    let mut text = String::new();
    let mut line = 0;
    for OptionHelp { key, value, .. } in required.chain(others) {
        let option = match REQUIRED.contains(key) {
            true if text.is_empty() => format!("{key}={value}"),
            true => format!(",{key}={value}"),
            false => format!("[,{key}={value}]"),
        };
        if line + option.len() > LINE_MAX {
            text.push('\n');
            line = 0;
        }
        line += option.len();
        text.push_str(&option);
    }
    text
}

/// Returns the help of all options of a server's function.
#[must_use]
pub fn help() -> String {
    let width = server_options()
        .map(|option| option.key.len())
        .max()
        .unwrap_or(0);
    let mut text = String::new();
    for OptionHelp { key, help, .. } in server_options() {
        let mut line = format!("  {key:width$} ");
        for word in help.split_whitespace() {
            if line.len() + 1 + word.len() > LINE_MAX {
                text.push_str(&line);
                text.push('\n');
                line = format!("  {:width$} ", "");
            }
            line.push(' ');
            line.push_str(word);
        }
        text.push_str(&line);
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{FunctionOptions, OptionError};

    #[test]
    fn every_option_is_parsed() {
        for key in keys() {
            let text = match key {
                "path" => "path=null:1G".to_owned(),
                key => format!("path=null:1G,{key}=x"),
            };
            let parsed = text.parse::<FunctionOptions>();
            assert!(!matches!(parsed, Err(OptionError::Unknown { .. })), "{key}");
        }
    }

    #[test]
    fn help_has_a_line_of_bounded_length_for_every_option() {
        let (synopsis, help) = (synopsis(), help());
        assert!(synopsis.starts_with("socket=PATH,path=DRIVE[,mode=MODE][,owner=USER[:GROUP]]"));
        for OptionHelp { key, .. } in server_options() {
            assert!(synopsis.contains(&format!("{key}=")), "{key}");
            assert!(
                help.lines()
                    .any(|line| line.starts_with(&format!("  {key} "))),
                "{key}"
            );
        }
        for line in synopsis.lines().chain(help.lines()) {
            assert!(line.len() <= LINE_MAX, "{line}");
        }
    }
}
