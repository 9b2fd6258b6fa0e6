//! Description of a namespace by its I/O command sets, as data: all of it that a guest reads.
//!
//! A command set describes a namespace where it translates commands
//! ([`CommandSet::describe`](crate::shadow::CommandSet::describe)). Then the description crosses the seam, and the
//! function serves it, without knowledge of the command set.

use serde::{Deserialize, Serialize};
use zerocopy::{Immutable, IntoBytes};

use crate::spec::event::AsyncEvent;
use crate::spec::feature::AsyncEventConfiguration;
use crate::spec::identify::Csi;
use crate::spec::log::LogPageId;

/// I/O command sets of a namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandSets {
    /// NVM Command Set, whose structures are there for what others have in common.
    pub nvm: CommandSetDescription,
    /// Another one, which the namespace has as its own.
    pub other: Option<CommandSetDescription>,
}

impl CommandSets {
    /// Returns the namespace's own command set.
    #[must_use]
    pub fn own(&self) -> &CommandSetDescription {
        self.other.as_ref().unwrap_or(&self.nvm)
    }

    /// Returns a command set that has an Identify Controller data structure.
    #[must_use]
    pub fn find(&self, csi: Csi) -> Option<&CommandSetDescription> {
        let sets = [Some(self.own()), Some(&self.nvm)];
        sets.into_iter().flatten().find(|set| set.csi == csi)
    }

    /// Returns a command set whose commands the namespace executes. Blocks have the NVM Command Set beside their own.
    #[must_use]
    pub fn executed(&self, csi: Csi) -> Option<&CommandSetDescription> {
        let own = self.own();
        let set = self.find(csi)?;
        (set.csi == own.csi || own.has_blocks()).then_some(set)
    }

    /// Returns the I/O commands that the namespace executes as those of a command set.
    pub fn commands(&self, csi: Csi) -> impl Iterator<Item = &IoCommand> {
        let set = self.executed(csi);
        let base = set.filter(|set| set.csi != self.nvm.csi && set.has_blocks());
        let base = base.map(|_| &self.nvm);
        base.into_iter()
            .chain(set)
            .flat_map(|set| set.commands.iter())
    }
}

impl From<CommandSetDescription> for CommandSets {
    /// Returns the command sets of a namespace of blocks whose own one is the NVM Command Set.
    fn from(nvm: CommandSetDescription) -> Self {
        Self { nvm, other: None }
    }
}

/// Description of a namespace by one I/O command set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandSetDescription {
    /// Its identifier.
    pub csi: Csi,
    /// Contents of the namespace.
    pub contents: Contents,
    /// I/O commands that are executed, beside those of the NVM Command Set if the contents are blocks.
    pub commands: Vec<IoCommand>,
    /// I/O Command Set specific Identify Namespace (CNS 05h).
    pub namespace: IdentifyNamespaceData,
    /// I/O Command Set specific Identify Controller (CNS 06h).
    pub controller: Structure,
    /// List of changes, if it has one.
    pub change_list: Option<ChangeListDescription>,
    /// Promises to the guest, which a snapshot keeps.
    pub promises: Vec<Promise>,
}

impl CommandSetDescription {
    /// Returns whether the namespace has logical blocks, and so the commands of the NVM Command Set.
    #[must_use]
    pub fn has_blocks(&self) -> bool {
        matches!(self.contents, Contents::Blocks { .. })
    }
}

/// Contents of a namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Contents {
    /// Logical blocks, in units of so many.
    Blocks {
        /// Blocks of a unit.
        unit: u64,
        /// Blocks of a unit that can be written.
        writable: u64,
    },
    /// No logical blocks, but what this name says to people.
    Other(String),
}

impl Contents {
    /// Logical blocks, all of which can be written.
    pub const BLOCKS: Self = Self::Blocks {
        unit: 1,
        writable: 1,
    };

    /// Returns the number of blocks that can be written, of so many (`NCAP`); `None` if there are no blocks.
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

/// An I/O command that is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IoCommand {
    /// Its opcode.
    pub opcode: u8,
    /// True if it changes the content of the namespace (`LBCC`).
    pub changes_content: bool,
}

impl IoCommand {
    /// A command that leaves the content of the namespace as it is.
    #[must_use]
    pub const fn reading(opcode: u8) -> Self {
        let changes_content = false;
        Self {
            opcode,
            changes_content,
        }
    }

    /// A command that changes the content of the namespace.
    #[must_use]
    pub const fn writing(opcode: u8) -> Self {
        let changes_content = true;
        Self {
            opcode,
            changes_content,
        }
    }
}

/// Something that a guest may rely on as long as its controller is there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Promise {
    /// Name for people. A snapshot has it, so it stays.
    pub name: String,
    /// Value.
    pub value: u64,
}

impl Promise {
    /// A promise by its name.
    #[must_use]
    pub fn new(name: &str, value: impl Into<u64>) -> Self {
        Self {
            name: name.to_owned(),
            value: value.into(),
        }
    }
}

/// Log page that lists what changed by itself in a namespace, and the event that reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeListDescription {
    /// Log page.
    pub lid: LogPageId,
    /// Event that reports a change.
    pub event: AsyncEvent,
    /// Bit of the notice, in Asynchronous Event Configuration and in OAES.
    pub notice: AsyncEventConfiguration,
    /// Blocks from one identifier to the next: each is the LBA that a unit of so many blocks begins with.
    pub unit: u64,
}

/// Identify Namespace data structure of a command set, but for facts that only the function knows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdentifyNamespaceData {
    /// Data structure.
    pub structure: Structure,
    /// Facts that the function enters.
    pub facts: Vec<PlacedFact>,
}

impl IdentifyNamespaceData {
    /// Returns the first `len` bytes of the data structure, with the values of its facts.
    #[must_use]
    pub fn to_bytes<'a>(&self, len: usize, value: impl Fn(NamespaceFact) -> &'a [u8]) -> Vec<u8> {
        let mut structure = self.structure.to_bytes(len);
        for PlacedFact { offset, fact } in &self.facts {
            put(&mut structure, *offset, value(*fact));
        }
        structure
    }
}

/// Place of a fact in a data structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedFact {
    /// Offset of its first byte.
    pub offset: u16,
    /// The fact.
    pub fact: NamespaceFact,
}

/// Fact of a namespace that only the function knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NamespaceFact {
    /// Bytes in use, in 8 bytes.
    Used,
    /// Namespace Globally Unique Identifier.
    Nguid,
    /// IEEE Extended Unique Identifier.
    Eui64,
}

/// A data structure, as those of its bytes that are not zero.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Structure(Vec<Run>);

/// Bytes of a data structure that follow each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Run {
    offset: u16,
    bytes: Vec<u8>,
}

impl Structure {
    /// A data structure of at most 64 KiB.
    #[must_use]
    pub fn of(structure: &(impl IntoBytes + Immutable)) -> Self {
        let mut runs: Vec<Run> = Vec::new();
        for (offset, byte) in (0..=u16::MAX).zip(structure.as_bytes()) {
            match runs.last_mut() {
                _ if *byte == 0 => {}
                Some(run) if usize::from(run.offset) + run.bytes.len() == usize::from(offset) => {
                    run.bytes.push(*byte);
                }
                _ => runs.push(Run {
                    offset,
                    bytes: vec![*byte],
                }),
            }
        }
        Self(runs)
    }

    /// Returns its first `len` bytes.
    #[must_use]
    pub fn to_bytes(&self, len: usize) -> Vec<u8> {
        let mut structure = vec![0; len];
        for Run { offset, bytes } in &self.0 {
            put(&mut structure, *offset, bytes);
        }
        structure
    }
}

/// Copies bytes to a place of a data structure, as far as there is room.
fn put(structure: &mut [u8], offset: u16, bytes: &[u8]) {
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
        let structure = Structure::of(&bytes);
        let kept = serde_json::to_string(&structure).unwrap();
        let runs = r#"[{"offset":1,"bytes":[7,8]},{"offset":5,"bytes":[9]}]"#;
        assert_eq!(kept, runs);
        assert_eq!(structure.to_bytes(7), bytes);
        assert_eq!(
            structure.to_bytes(2),
            [0, 7],
            "bytes beyond it are left out"
        );
        assert_eq!(Structure::default().to_bytes(3), [0; 3]);
    }

    #[test]
    fn a_unit_of_no_blocks_has_no_capacity() {
        let contents = |unit, writable| Contents::Blocks { unit, writable };
        assert_eq!(Contents::BLOCKS.capacity(17), Some(17));
        assert_eq!(contents(8, 6).capacity(17), Some(12));
        assert_eq!(contents(0, 6).capacity(17), Some(0));
        assert_eq!(Contents::Other(String::new()).capacity(17), None);
    }
}
