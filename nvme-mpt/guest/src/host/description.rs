//! Description of a namespace by its I/O command sets, as data: everything that a guest can read.
//!
//! A command set describes a namespace in the code that translates its commands
//! (`CommandSet::describe` of `nvme-mpt`). The back end passes the description to the function,
//! which reports it without knowing the command set.

use nvme_spec::event::AsyncEvent;
use nvme_spec::feature::AsyncEventConfiguration;
use nvme_spec::identify::Csi;
use nvme_spec::log::LogPageId;
use serde::{Deserialize, Serialize};
use zerocopy::{Immutable, IntoBytes};

/// I/O command sets of a namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandSets {
    /// NVM Command Set, whose data structures have the fields that all command sets share.
    pub nvm: CommandSetDescription,
    /// Command set of the namespace, if it is not the NVM Command Set.
    pub other: Option<CommandSetDescription>,
}

impl CommandSets {
    /// Returns the namespace's own command set.
    #[must_use]
    pub fn native(&self) -> &CommandSetDescription {
        self.other.as_ref().unwrap_or(&self.nvm)
    }

    /// Returns the description of command set `csi`: the namespace's own, or the NVM Command Set. Both have an Identify
    /// Controller data structure.
    #[must_use]
    pub fn find(&self, csi: Csi) -> Option<&CommandSetDescription> {
        let sets = [Some(self.native()), Some(&self.nvm)];
        sets.into_iter().flatten().find(|set| set.csi == csi)
    }

    /// Returns the description of command set `csi` if the namespace executes its commands. A namespace with logical blocks
    /// also executes the NVM Command Set.
    #[must_use]
    pub fn find_executed(&self, csi: Csi) -> Option<&CommandSetDescription> {
        let own = self.native();
        let set = self.find(csi)?;
        (set.csi == own.csi || own.has_blocks()).then_some(set)
    }

    /// Returns the I/O commands that the namespace executes for a command set.
    pub fn commands(&self, csi: Csi) -> impl Iterator<Item = &IoCommand> {
        let set = self.find_executed(csi);
        let base = set.filter(|set| set.csi != self.nvm.csi && set.has_blocks());
        let base = base.map(|_| &self.nvm);
        base.into_iter()
            .chain(set)
            .flat_map(|set| set.commands.iter())
    }
}

impl From<CommandSetDescription> for CommandSets {
    /// Creates the command sets of a namespace whose own command set is the NVM Command Set.
    fn from(nvm: CommandSetDescription) -> Self {
        Self { nvm, other: None }
    }
}

/// Description of a namespace by one I/O command set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandSetDescription {
    /// Command Set Identifier.
    pub csi: Csi,
    /// Contents of the namespace.
    pub contents: NamespaceContents,
    /// I/O commands that are executed, in addition to those of the NVM Command Set if the contents are blocks.
    pub commands: Vec<IoCommand>,
    /// I/O Command Set specific Identify Namespace (CNS 05h).
    pub namespace: IdentifyNamespaceData,
    /// I/O Command Set specific Identify Controller (CNS 06h).
    pub controller: SparseStructure,
    /// Change list, if the command set has one.
    pub change_list: Option<ChangeListDescription>,
    /// Properties on which the guest may rely. The saved state of a function contains them.
    pub promises: Vec<GuestPromise>,
}

impl CommandSetDescription {
    /// Returns whether the namespace has logical blocks, and so the commands of the NVM Command Set.
    #[must_use]
    pub fn has_blocks(&self) -> bool {
        matches!(self.contents, NamespaceContents::Blocks { .. })
    }
}

/// Contents of a namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NamespaceContents {
    /// Logical blocks, grouped in units such as zones.
    Blocks {
        /// Number of blocks in a unit, such as a zone.
        unit: u64,
        /// Number of writable blocks in a unit.
        writable: u64,
    },
    /// No logical blocks; the name describes the contents.
    Other(String),
}

impl NamespaceContents {
    /// Logical blocks that are all writable.
    pub const BLOCKS: Self = Self::Blocks {
        unit: 1,
        writable: 1,
    };

    /// Returns the number of writable blocks among the first `blocks` blocks of the namespace (`NCAP`); `None` if the namespace
    /// has no blocks.
    #[must_use]
    pub fn capacity(&self, blocks: u64) -> Option<u64> {
        match *self {
            Self::Blocks { unit, writable } => {
                let units = blocks.checked_div(unit).unwrap_or(0);
                Some(units.saturating_mul(writable))
            }
            Self::Other(_) => None,
        }
    }
}

/// I/O command that is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IoCommand {
    /// Opcode of the command.
    pub opcode: u8,
    /// True if the command changes the content of the namespace (`LBCC`).
    pub changes_content: bool,
}

impl IoCommand {
    /// Creates a command that does not change the content of the namespace.
    #[must_use]
    pub const fn reading(opcode: u8) -> Self {
        let changes_content = false;
        Self {
            opcode,
            changes_content,
        }
    }

    /// Creates a command that changes the content of the namespace.
    #[must_use]
    pub const fn writing(opcode: u8) -> Self {
        let changes_content = true;
        Self {
            opcode,
            changes_content,
        }
    }
}

/// Property that a guest may rely on as long as its controller exists.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestPromise {
    /// Readable name. Saved functions have it, so it must not change.
    pub name: String,
    /// Value.
    pub value: u64,
}

impl GuestPromise {
    /// Creates a property from its name and value.
    #[must_use]
    pub fn new(name: &str, value: impl Into<u64>) -> Self {
        Self {
            name: name.to_owned(),
            value: value.into(),
        }
    }
}

/// Log page that lists changes of a namespace which the guest did not cause, and the event that reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeListDescription {
    /// Log Page Identifier.
    pub lid: LogPageId,
    /// Event that reports a change.
    pub event: AsyncEvent,
    /// Bit of Asynchronous Event Configuration that enables the event. The same bit of OAES reports that the controller
    /// supports the event.
    pub notice: AsyncEventConfiguration,
    /// Number of logical blocks whose changes are reported together, such as a zone. The identifier of a change in the log page
    /// is the first LBA of these blocks.
    pub unit: u64,
}

/// Identify Namespace data structure of a command set. The function fills in the fields in `facts`, because only it knows their
/// values.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdentifyNamespaceData {
    /// Data structure, with zeroes in place of the facts.
    pub structure: SparseStructure,
    /// Facts that the function fills in.
    pub facts: Vec<NamespaceFactOffset>,
}

impl IdentifyNamespaceData {
    /// Returns the first `len` bytes of the data structure, including the facts.
    #[must_use]
    pub fn to_bytes<'a>(&self, len: usize, value: impl Fn(NamespaceFact) -> &'a [u8]) -> Vec<u8> {
        let mut structure = self.structure.to_bytes(len);
        for NamespaceFactOffset { offset, fact } in &self.facts {
            copy_at(&mut structure, *offset, value(*fact));
        }
        structure
    }
}

/// Position of a fact in a data structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceFactOffset {
    /// Offset of its first byte.
    pub offset: u16,
    /// Fact at this offset.
    pub fact: NamespaceFact,
}

/// Fact of a namespace that only the function knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NamespaceFact {
    /// Bytes of the namespace that are in use, as an 8-byte number.
    Used,
    /// Namespace Globally Unique Identifier.
    Nguid,
    /// IEEE Extended Unique Identifier.
    Eui64,
}

/// Data structure, stored as its runs of nonzero bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SparseStructure(Vec<StructureRun>);

/// Consecutive nonzero bytes of a data structure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct StructureRun {
    offset: u16,
    bytes: Vec<u8>,
}

impl SparseStructure {
    /// Returns the nonzero runs of a data structure of at most 64 KiB.
    #[must_use]
    pub fn from_structure(structure: &(impl IntoBytes + Immutable)) -> Self {
        let mut runs: Vec<StructureRun> = Vec::new();
        for (offset, byte) in (0..=u16::MAX).zip(structure.as_bytes()) {
            match runs.last_mut() {
                _ if *byte == 0 => {}
                Some(run) if usize::from(run.offset) + run.bytes.len() == usize::from(offset) => {
                    run.bytes.push(*byte);
                }
                _ => runs.push(StructureRun {
                    offset,
                    bytes: vec![*byte],
                }),
            }
        }
        Self(runs)
    }

    /// Returns the first `len` bytes of the data structure.
    #[must_use]
    pub fn to_bytes(&self, len: usize) -> Vec<u8> {
        let mut structure = vec![0; len];
        for StructureRun { offset, bytes } in &self.0 {
            copy_at(&mut structure, *offset, bytes);
        }
        structure
    }
}

/// Copies bytes to an offset in a data structure. Bytes beyond its end are dropped.
fn copy_at(structure: &mut [u8], offset: u16, bytes: &[u8]) {
    let places = structure.iter_mut().skip(offset.into());
    for (place, byte) in places.zip(bytes) {
        *place = *byte;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_structure_is_kept_as_its_bytes_that_are_not_zero() {
        let bytes = [0_u8, 7, 8, 0, 0, 9, 0];
        let structure = SparseStructure::from_structure(&bytes);
        let text = serde_json::to_string(&structure).unwrap();
        let runs = r#"[{"offset":1,"bytes":[7,8]},{"offset":5,"bytes":[9]}]"#;
        assert_eq!(text, runs);
        assert_eq!(structure.to_bytes(7), bytes);
        assert_eq!(
            structure.to_bytes(2),
            [0, 7],
            "bytes beyond it are left out"
        );
        assert_eq!(SparseStructure::default().to_bytes(3), [0; 3]);
    }

    #[test]
    fn a_unit_of_no_blocks_has_no_capacity() {
        let contents = |unit, writable| NamespaceContents::Blocks { unit, writable };
        assert_eq!(NamespaceContents::BLOCKS.capacity(17), Some(17));
        assert_eq!(contents(8, 6).capacity(17), Some(12));
        assert_eq!(contents(0, 6).capacity(17), Some(0));
        assert_eq!(NamespaceContents::Other(String::new()).capacity(17), None);
    }
}
