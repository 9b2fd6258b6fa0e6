//! Sorted map with cheap copies: a copy shares all entries, and a change copies only a few of them.

use std::sync::Arc;

/// Maximum number of entries of a chunk. Inserting or removing an entry copies one or two chunks, and the list of chunks.
const CHUNK_MAX: usize = 64;

/// Two neighbouring chunks with at most this number of entries together are merged, so that there are few small chunks.
const MERGE_MAX: usize = CHUNK_MAX / 2;

/// Sorted map whose copies share the chunks that are equal. A copy with one change costs little.
#[derive(Clone, Debug)]
pub(super) struct SharedSortedMap<V> {
    /// Chunks in order of ascending keys. No chunk is empty.
    chunks: Vec<SortedMapChunk<V>>,
    len: usize,
}

#[derive(Clone, Debug)]
struct SortedMapChunk<V> {
    /// Smallest key of the chunk.
    first: u64,
    entries: Arc<Vec<(u64, V)>>,
}

impl<V> Default for SharedSortedMap<V> {
    fn default() -> Self {
        Self {
            chunks: Vec::new(),
            len: 0,
        }
    }
}

impl<V> SharedSortedMap<V> {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Returns the index of the chunk, and in the chunk the index of the entry, with the largest key that is not above `key`.
    fn position(&self, key: u64) -> Option<(usize, usize)> {
        let after = self.chunks.partition_point(|chunk| chunk.first <= key);
        let chunk = after.checked_sub(1)?;
        let entries = &self.chunks[chunk].entries;
        let after = entries.partition_point(|(other, _)| *other <= key);
        Some((chunk, after.checked_sub(1)?))
    }

    /// Returns the value of the largest key that is not above `key`.
    pub(super) fn get_at_or_before(&self, key: u64) -> Option<&V> {
        let (chunk, place) = self.position(key)?;
        Some(&self.chunks[chunk].entries[place].1)
    }

    /// Returns the value of a key.
    pub(super) fn get(&self, key: u64) -> Option<&V> {
        let (chunk, place) = self.position(key)?;
        let (found, value) = &self.chunks[chunk].entries[place];
        (*found == key).then_some(value)
    }

    /// Returns all values in order of ascending keys.
    pub(super) fn values(&self) -> impl Iterator<Item = &V> {
        let entries = self.chunks.iter().flat_map(|chunk| chunk.entries.iter());
        entries.map(|(_, value)| value)
    }

    /// Returns values in order of ascending keys, starting with the largest key that is not above `key`.
    pub(super) fn values_from(&self, key: u64) -> impl Iterator<Item = &V> {
        let (chunk, place) = self.position(key).unwrap_or_default();
        let chunks = self.chunks.get(chunk..).unwrap_or_default();
        let entries = chunks.iter().flat_map(|chunk| chunk.entries.iter());
        entries.skip(place).map(|(_, value)| value)
    }
}

impl<V: Clone> SharedSortedMap<V> {
    /// Inserts an entry, replacing the entry of the same key.
    pub(super) fn insert(&mut self, key: u64, value: V) {
        let index = match self.chunks.partition_point(|chunk| chunk.first <= key) {
            0 if self.chunks.is_empty() => {
                self.chunks.push(SortedMapChunk::new(vec![(key, value)]));
                self.len = 1;
                return;
            }
            after => after.saturating_sub(1),
        };
        let chunk = &mut self.chunks[index];
        let entries = Arc::make_mut(&mut chunk.entries);
        match entries.binary_search_by_key(&key, |(other, _)| *other) {
            Ok(place) => entries[place].1 = value,
            Err(place) => {
                entries.insert(place, (key, value));
                self.len += 1;
            }
        }
        chunk.first = chunk.first.min(key);
        if entries.len() > CHUNK_MAX {
            let second = SortedMapChunk::new(entries.split_off(CHUNK_MAX / 2));
            self.chunks.insert(index + 1, second);
        }
    }

    /// Removes the entry of a key, if there is one.
    pub(super) fn remove(&mut self, key: u64) -> Option<V> {
        let (index, place) = self.position(key)?;
        let chunk = &mut self.chunks[index];
        if chunk.entries[place].0 != key {
            return None;
        }
        let entries = Arc::make_mut(&mut chunk.entries);
        let (_, value) = entries.remove(place);
        self.len -= 1;
        match entries.first() {
            Some((first, _)) => {
                chunk.first = *first;
                self.merge_chunk(index);
            }
            None => drop(self.chunks.remove(index)),
        }
        Some(value)
    }

    /// Merges a chunk with one of its neighbours if they have at most [`MERGE_MAX`] entries together.
    fn merge_chunk(&mut self, index: usize) {
        let len = |index: usize| self.chunks.get(index).map(|chunk| chunk.entries.len());
        let fits = |first: usize| match (len(first), len(first + 1)) {
            (Some(one), Some(other)) => one + other <= MERGE_MAX,
            _ => false,
        };
        let candidates = [Some(index), index.checked_sub(1)];
        let Some(first) = candidates.into_iter().flatten().find(|first| fits(*first)) else {
            return;
        };
        let second = self.chunks.remove(first + 1);
        let entries = Arc::make_mut(&mut self.chunks[first].entries);
        entries.extend(second.entries.iter().cloned());
    }
}

impl<V> SortedMapChunk<V> {
    /// Creates a chunk from entries, at least one.
    fn new(entries: Vec<(u64, V)>) -> Self {
        let first = entries.first().map_or(0, |(key, _)| *key);
        let entries = Arc::new(entries);
        Self { first, entries }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const KEYS: u64 = 2000;

    fn check(map: &SharedSortedMap<u64>, model: &BTreeMap<u64, u64>) {
        assert_eq!(map.len(), model.len());
        assert!(map.values().eq(model.values()));
        for key in (0..KEYS).step_by(37) {
            let before = model.range(..=key).next_back();
            assert_eq!(map.get_at_or_before(key), before.map(|(_, value)| value));
            assert_eq!(map.get(key), model.get(&key));
            let from = before.map_or(0, |(key, _)| *key);
            assert!(
                map.values_from(key)
                    .eq(model.range(from..).map(|(_, value)| value))
            );
        }
        assert!(map.chunks.iter().all(|chunk| {
            chunk.first == chunk.entries[0].0 && (1..=CHUNK_MAX).contains(&chunk.entries.len())
        }));
        let small = map.chunks.windows(2).filter(|pair| match pair {
            [one, other] => one.entries.len() + other.entries.len() <= MERGE_MAX,
            _ => false,
        });
        assert_eq!(small.count(), 0);
    }

    proptest! {
        #[test]
        fn it_is_a_map_and_copies_do_not_change(
            steps in prop::collection::vec((0..KEYS, 0..200_u64, any::<bool>()), 1..60),
        ) {
            let (mut map, mut model) = (SharedSortedMap::default(), BTreeMap::new());
            let mut copies = Vec::new();
            for (number, (start, count, inserts)) in (0..).zip(steps) {
                copies.push((map.clone(), model.clone()));
                for key in (start..KEYS).step_by(1 + start as usize % 3).take(count as usize) {
                    if inserts {
                        map.insert(key, number);
                        model.insert(key, number);
                    } else {
                        prop_assert_eq!(map.remove(key), model.remove(&key));
                    }
                }
                check(&map, &model);
            }
            for (map, model) in copies {
                check(&map, &model);
            }
        }
    }
}
