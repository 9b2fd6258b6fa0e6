//! Sets of processors, and system calls for the CPU affinity of threads.
#![expect(
    unsafe_code,
    reason = "sched_getaffinity, sched_setaffinity and gettid have no safe interface in std"
)]

use std::fmt;
use std::io;

/// Number of processors that a [`ProcessorSet`] can represent (glibc, `CPU_SETSIZE`).
pub const PROCESSORS_MAX: usize = 1024;

/// A set of the host's processors.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct ProcessorSet([u64; PROCESSORS_MAX / 64]);

const _: () = assert!(size_of::<ProcessorSet>() == size_of::<libc::cpu_set_t>());
const _: () = assert!(align_of::<ProcessorSet>() == align_of::<libc::cpu_set_t>());

impl ProcessorSet {
    /// Returns the set of one processor; `None` for the number [`PROCESSORS_MAX`] or higher.
    #[must_use]
    pub fn from_processor(processor: usize) -> Option<Self> {
        let mut set = Self::default();
        *set.0.get_mut(processor / 64)? |= 1 << (processor % 64);
        Some(set)
    }

    /// Parses a list as the kernel prints it, such as `0-3,8` (Linux, `Documentation/admin-guide/cputopology.rst`). Ignores
    /// invalid parts, and the number [`PROCESSORS_MAX`] and higher.
    #[must_use]
    pub fn parse_list(list: &str) -> Self {
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let first: usize = first.trim().parse().ok()?;
            let last: usize = last.trim().parse().ok()?;
            Some(first..=last.min(PROCESSORS_MAX - 1))
        };
        let numbers = list.split(',').filter_map(range).flatten();
        numbers
            .filter_map(Self::from_processor)
            .fold(Self::default(), |set, one| set.union(&one))
    }

    /// Returns whether a processor is in the set.
    #[must_use]
    pub fn contains(&self, processor: usize) -> bool {
        let word = self.0.get(processor / 64);
        word.is_some_and(|word| word & 1 << (processor % 64) != 0)
    }

    /// Returns whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the processors in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        (0..PROCESSORS_MAX).filter(move |processor| self.contains(*processor))
    }

    /// Returns the intersection of both sets.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        self.combine(other, |own, other| own & other)
    }

    /// Returns the union of both sets.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        self.combine(other, |own, other| own | other)
    }

    /// Returns the processors of this set that are not in `other`.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Self {
        self.combine(other, |own, other| own & !other)
    }

    fn combine(&self, other: &Self, join: impl Fn(u64, u64) -> u64) -> Self {
        let mut joined = *self;
        for (word, other) in joined.0.iter_mut().zip(&other.0) {
            *word = join(*word, *other);
        }
        joined
    }

    fn as_raw(&self) -> *const libc::cpu_set_t {
        self.0.as_ptr().cast()
    }
}

impl fmt::Display for ProcessorSet {
    /// Formats the numbers, joined by `+` as in options.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, processor) in self.iter().enumerate() {
            let joint = if index == 0 { "" } else { "+" };
            write!(f, "{joint}{processor}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for ProcessorSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProcessorSet({self})")
    }
}

/// Id of a thread of this host (gettid(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadId(pub i32);

impl ThreadId {
    /// Returns the id of the calling thread.
    #[must_use]
    pub fn current() -> Self {
        #[cfg(simulation)]
        return Self(crate::simulation::actor() as i32);
        #[cfg(not(simulation))]
        // SAFETY: the call has no preconditions.
        Self(unsafe { libc::gettid() })
    }

    /// Returns the processors that the thread may run on.
    ///
    /// # Errors
    /// Returns the kernel's error; `ESRCH` if there is no such thread.
    pub fn processors(self) -> io::Result<ProcessorSet> {
        thread_processors(self.0)
    }
}

/// Returns the processors that the calling thread may run on.
///
/// # Errors
/// Returns the kernel's error; `EINVAL` on a host with more than [`PROCESSORS_MAX`] processors.
pub fn current_processors() -> io::Result<ProcessorSet> {
    thread_processors(0)
}

fn thread_processors(thread: libc::pid_t) -> io::Result<ProcessorSet> {
    let mut set = ProcessorSet::default();
    let raw = set.0.as_mut_ptr().cast::<libc::cpu_set_t>();
    // SAFETY: the set has the size and alignment of a `cpu_set_t`, as asserted above, and any bits are valid.
    let answer = unsafe { libc::sched_getaffinity(thread, size_of::<ProcessorSet>(), raw) };
    if answer < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(set)
}

/// Restricts the calling thread to the given processors.
///
/// # Errors
/// Returns the kernel's error; `EINVAL` if the process may use none of them.
pub fn set_affinity(processors: &ProcessorSet) -> io::Result<()> {
    let raw = processors.as_raw();
    // SAFETY: the set has the size and alignment of a `cpu_set_t`; thread 0 is the calling thread.
    if unsafe { libc::sched_setaffinity(0, size_of::<ProcessorSet>(), raw) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Restricts the calling thread to one processor.
///
/// # Errors
/// Returns the kernel's error; `InvalidInput` for an invalid number.
pub fn pin_current_thread(processor: usize) -> io::Result<()> {
    let set = ProcessorSet::from_processor(processor).ok_or(io::ErrorKind::InvalidInput)?;
    set_affinity(&set)
}

/// Returns whether this is a virtual machine: hypervisors set bit 31 of ECX in CPUID leaf 1 (AMD64 APM, volume 3,
/// section E.3.2). Returns `false` on architectures without this bit.
#[must_use]
pub fn is_virtual_machine() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__cpuid, CpuidResult};
        // Older compilers declare this function unsafe, newer ones safe. Both kinds have this type.
        let cpuid: unsafe fn(u32) -> CpuidResult = __cpuid;
        // SAFETY: all x86-64 processors have the instruction CPUID, and leaf 1.
        unsafe { cpuid(1) }.ecx & 1 << 31 != 0
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtual_processors_are_those_that_the_kernel_says_are() {
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let flags = text.lines().find(|line| line.starts_with("flags"));
        let has_flag = flags.is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor"));
        assert_eq!(is_virtual_machine(), has_flag);
    }

    #[test]
    fn lists_of_the_kernel_are_read() {
        for (list, processors) in [
            ("", &[][..]),
            ("0", &[0]),
            ("0-3,8\n", &[0, 1, 2, 3, 8]),
            ("63-64, 1023-2000", &[63, 64, 1023]),
            ("3-1,x,7", &[7]),
        ] {
            let set = ProcessorSet::parse_list(list);
            assert_eq!(set.iter().collect::<Vec<_>>(), processors, "{list:?}");
            assert_eq!(set.is_empty(), processors.is_empty(), "{list:?}");
        }
        assert_eq!(ProcessorSet::parse_list("0-1,65").to_string(), "0+1+65");
        assert_eq!(ProcessorSet::from_processor(PROCESSORS_MAX), None);
    }

    #[test]
    fn sets_are_joined() {
        let [left, right] = ["0-4,100", "3-6"].map(ProcessorSet::parse_list);
        assert_eq!(left.intersection(&right), ProcessorSet::parse_list("3-4"));
        assert_eq!(left.union(&right), ProcessorSet::parse_list("0-6,100"));
        assert_eq!(left.difference(&right), ProcessorSet::parse_list("0-2,100"));
    }

    #[test]
    fn a_thread_runs_on_processors_that_there_are() {
        let first = current_processors().expect("there are fewer").iter().next();
        let first = first.expect("it runs on one");
        let pinned = std::thread::spawn(move || {
            pin_current_thread(first).expect("it may run there");
            let by_number = ThreadId::current().processors();
            assert_eq!(
                by_number.expect("it lives"),
                current_processors().expect("it lives")
            );
            current_processors().expect("it lives")
        });
        assert_eq!(
            Some(pinned.join().expect("no panic")),
            ProcessorSet::from_processor(first)
        );
        let pin = std::thread::spawn(|| pin_current_thread(1 << 20)).join();
        let error = pin.expect("a thread").expect_err("no such bit");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        let gone = std::thread::spawn(ThreadId::current).join();
        let gone = gone.expect("a thread");
        // The kernel reports the end of a thread before it removes the thread from its table.
        let error = loop {
            match gone.processors() {
                Ok(_) => std::thread::sleep(std::time::Duration::from_millis(1)),
                Err(error) => break error,
            }
        };
        assert_eq!(error.raw_os_error(), Some(libc::ESRCH));
    }
}
