//! Git's blob ids of file contents.

use std::fmt;
use std::str::FromStr;

/// Id of a blob in a git repository that uses SHA-1.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct BlobId([u8; 20]);

impl BlobId {
    /// Returns the id of a file with this content.
    #[must_use]
    pub fn from_content(content: &[u8]) -> Self {
        let mut blob = format!("blob {}\0", content.len()).into_bytes();
        blob.extend(content);
        Self(sha1(blob))
    }

    /// Returns whether this id stands for a missing file: it is all zeros.
    pub(crate) fn is_missing(self) -> bool {
        self.0 == [0; 20]
    }
}

impl FromStr for BlobId {
    type Err = ();

    /// Parses an id of 40 hexadecimal digits.
    fn from_str(text: &str) -> Result<Self, ()> {
        let mut id = [0; 20];
        let digits = text.as_bytes();
        if digits.len() != 2 * id.len() || !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err(());
        }
        for (byte, digits) in id.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let digits = std::str::from_utf8(digits).map_err(|_| ())?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| ())?;
        }
        Ok(Self(id))
    }
}

impl fmt::Display for BlobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for BlobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// SHA-1 (FIPS 180-4, section 6.1).
fn sha1(mut message: Vec<u8>) -> [u8; 20] {
    let bits = message.len() as u64 * 8;
    message.push(0x80);
    message.resize(message.len().next_multiple_of(64), 0);
    if message.len() as u64 * 8 - 64 < bits + 8 {
        message.resize(message.len() + 64, 0);
    }
    let end = message.len() - 8;
    message[end..].copy_from_slice(&bits.to_be_bytes());
    let mut state = [
        0x6745_2301_u32,
        0xEFCD_AB89,
        0x98BA_DCFE,
        0x1032_5476,
        0xC3D2_E1F0,
    ];
    for block in message.chunks_exact(64) {
        let mut words = [0_u32; 80];
        for (word, bytes) in words.iter_mut().zip(block.chunks_exact(4)) {
            *word = bytes
                .iter()
                .fold(0, |word, byte| word << 8 | u32::from(*byte));
        }
        for t in 16..80 {
            let word = words[t - 3] ^ words[t - 8] ^ words[t - 14] ^ words[t - 16];
            words[t] = word.rotate_left(1);
        }
        let [mut a, mut b, mut c, mut d, mut e] = state;
        for (t, word) in words.iter().enumerate() {
            let (mix, constant) = match t / 20 {
                0 => ((b & c) | (!b & d), 0x5A82_7999),
                1 => (b ^ c ^ d, 0x6ED9_EBA1),
                2 => ((b & c) | (b & d) | (c & d), 0x8F1B_BCDC),
                _ => (b ^ c ^ d, 0xCA62_C1D6_u32),
            };
            let next = a
                .rotate_left(5)
                .wrapping_add(mix)
                .wrapping_add(e)
                .wrapping_add(constant)
                .wrapping_add(*word);
            (e, d, c, b, a) = (d, c, b.rotate_left(30), a, next);
        }
        for (word, change) in state.iter_mut().zip([a, b, c, d, e]) {
            *word = word.wrapping_add(change);
        }
    }
    let mut digest = [0; 20];
    for (bytes, word) in digest.chunks_exact_mut(4).zip(state) {
        bytes.copy_from_slice(&word.to_be_bytes());
    }
    digest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blob_ids_match_git() {
        // Output of `git hash-object --stdin`.
        for (content, id) in [
            (String::new(), "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"),
            (
                "hello\n".to_owned(),
                "ce013625030ba8dba906f756967f9e9ca394464a",
            ),
        ] {
            assert_eq!(BlobId::from_content(content.as_bytes()).to_string(), id);
        }
    }

    #[test]
    fn digests_of_all_lengths_are_right() {
        // Digests of the specification's examples, and of a million times `a`.
        let digest = |message: &[u8]| BlobId(sha1(message.to_vec())).to_string();
        assert_eq!(digest(b"abc"), "a9993e364706816aba3e25717850c26c9cd0d89d");
        assert_eq!(
            digest(b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "84983e441c3bd26ebaae4aa1f95129e5e54670f1"
        );
        let million = vec![b'a'; 1_000_000];
        assert_eq!(digest(&million), "34aa973cd4c4daa4f61eeb2bdbad27316534016f");
    }

    #[test]
    fn ids_have_forty_digits() {
        let id = "ce013625030ba8dba906f756967f9e9ca394464a";
        assert_eq!(
            id.parse::<BlobId>().map(|id| id.to_string()),
            Ok(id.to_owned())
        );
        for text in [
            "",
            "ce013625",
            &id[1..],
            "+e013625030ba8dba906f756967f9e9ca394464a",
        ] {
            assert_eq!(text.parse::<BlobId>(), Err(()), "{text}");
        }
    }
}
