//! Records of a ledger in a memory file, for the successor process.
//!
//! The first word of the file has the offset of the valid records. A change writes the new records to another part of the
//! file, and then updates the word. So whenever the process ends, the file has either the old records or the new ones.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::ledger_store::{LedgerRecords, LedgerStoreError};

/// Offsets of the two parts of the file that can store the records. One part has the valid records, and the next change writes
/// to the other part.
const RECORD_OFFSETS: [u64; 2] = [4096, 4096 + BYTES_MAX as u64];

/// Size in bytes of a part: the maximum for the records with their length word. A lease takes some hundred bytes.
const BYTES_MAX: usize = 16 << 20;

/// Memory file with a ledger's records, which outlives the process.
#[derive(Debug)]
pub(super) struct LedgerMemoryFile {
    file: File,
    next: usize,
    /// True if the successor process has the file. Then this process must not write to it.
    is_handed_over: bool,
}

/// Content of the file.
#[derive(Serialize, Deserialize)]
struct LedgerMemoryContent<R> {
    salt: u64,
    records: R,
}

impl LedgerMemoryFile {
    /// Opens a file. Returns the salt (see `LedgerStorage`) and the records that the predecessor stored; `None` for a new file.
    pub(super) fn open(file: File) -> io::Result<(Self, Option<(u64, LedgerRecords)>)> {
        if file.metadata()?.len() < 8 {
            return Ok((Self::with_next(file, 0), None));
        }
        let place = read_word(&file, 0)?;
        let invalid = |text: &str| io::Error::new(io::ErrorKind::InvalidData, text);
        let place = RECORD_OFFSETS.iter().position(|other| *other == place);
        let place = place.ok_or_else(|| invalid("the stored ledger has another layout"))?;
        let len = usize::try_from(read_word(&file, RECORD_OFFSETS[place])?).ok();
        let len = len.filter(|len| *len <= BYTES_MAX - 8);
        let mut bytes = vec![0; len.ok_or_else(|| invalid("the stored ledger is too long"))?];
        file.read_exact_at(&mut bytes, RECORD_OFFSETS[place] + 8)?;
        let LedgerMemoryContent { salt, records } = serde_json::from_slice(&bytes)?;
        Ok((Self::with_next(file, 1 - place), Some((salt, records))))
    }

    fn with_next(file: File, next: usize) -> Self {
        Self {
            file,
            next,
            is_handed_over: false,
        }
    }

    /// Hands the file over to the successor. Later changes by this process are not written to it.
    pub(super) fn hand_over(&mut self) {
        self.is_handed_over = true;
    }

    /// Replaces the stored records and the salt. Does nothing after the file was handed over.
    pub(super) fn store(
        &mut self,
        salt: u64,
        records: &LedgerRecords,
    ) -> Result<(), LedgerStoreError> {
        if self.is_handed_over {
            return Ok(());
        }
        self.write(salt, records)
            .map_err(|source| LedgerStoreError::Io {
                action: "store the ledger in",
                path: PathBuf::from("a memory file"),
                source,
            })
    }

    fn write(&mut self, salt: u64, records: &LedgerRecords) -> io::Result<()> {
        let bytes = serde_json::to_vec(&LedgerMemoryContent { salt, records })?;
        if bytes.len() > BYTES_MAX - 8 {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let place = RECORD_OFFSETS[self.next];
        self.file.write_all_at(&bytes, place + 8)?;
        let len = bytes.len() as u64;
        self.file.write_all_at(&len.to_ne_bytes(), place)?;
        // A write of one word is atomic, so this store switches to the new records.
        self.file.write_all_at(&place.to_ne_bytes(), 0)?;
        self.next = 1 - self.next;
        Ok(())
    }
}

fn read_word(file: &File, at: u64) -> io::Result<u64> {
    let mut word = [0; 8];
    file.read_exact_at(&mut word, at)?;
    Ok(u64::from_ne_bytes(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_the_last_complete_change_are_read() {
        let file = tempfile::tempfile().expect("a file");
        let share = || file.try_clone().expect("a descriptor");
        let (mut memory_file, previous_contents) = LedgerMemoryFile::open(share()).expect("new");
        assert!(previous_contents.is_none());
        let records = |next_slot| {
            let mut records = LedgerRecords::default();
            records.next_slot = next_slot;
            records
        };
        for slot in 1..4 {
            memory_file.store(7, &records(slot)).expect("stored");
            let (_, found) = LedgerMemoryFile::open(share()).expect("kept");
            assert_eq!(found, Some((7, records(slot))));
        }
        // The process ends before it stores the word that switches to the new records.
        let place = RECORD_OFFSETS[memory_file.next];
        file.write_all_at(b"\xFF\xFF\xFF{\"", place)
            .expect("written");
        let (_, found) = LedgerMemoryFile::open(share()).expect("kept");
        assert_eq!(found, Some((7, records(3))));
        // The content of the file is untrusted.
        file.write_all_at(&5_u64.to_ne_bytes(), 0).expect("written");
        assert!(LedgerMemoryFile::open(share()).is_err());
    }
}
