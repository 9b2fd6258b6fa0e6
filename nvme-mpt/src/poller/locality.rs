//! Placement of a poller near the vCPU of its queue.
//!
//! A poller and its vCPU share rings, data and doorbells. So the poller runs where it shares a cache with the vCPU, without
//! taking time from it: never on the vCPU's processor, and on another hardware thread of the vCPU's core only if no other
//! processor is left.

use std::fs;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use log::{debug, warn};
use nvme_guest::interrupt::InterruptVector;
use nvme_mpt_memory::clock::{TickRate, Ticks};
use nvme_mpt_memory::processors::{ProcessorSet, ThreadId, current_processors, set_affinity};

/// Interval at which a poller beside a vCPU checks, while it is awake, on which processors the vCPU's thread may run. A
/// sleeping poller checks when it wakes up.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Hints for the processors of the poller of a queue.
#[derive(Clone, Debug, Default)]
pub(crate) struct PollerLocality {
    /// Interrupt vector of the queue. The poller runs beside the vCPU that receives its interrupts.
    pub(crate) vector: Option<Arc<InterruptVector>>,
    /// NUMA node of the drive, used if the vCPU is unknown.
    pub(crate) node: Option<u32>,
}

/// Processors of the host in groups that share a core, a cache or a NUMA node.
#[derive(Debug, Default)]
struct ProcessorTopology {
    /// Hardware threads of each core.
    cores: Vec<ProcessorSet>,
    /// Processors that share each last-level cache.
    caches: Vec<ProcessorSet>,
    nodes: Vec<(u32, ProcessorSet)>,
}

impl ProcessorTopology {
    /// Returns the topology of this host. Groups are missing if the kernel does not report them, as in a sandbox.
    fn of_this_host() -> &'static Self {
        static HOST: OnceLock<ProcessorTopology> = OnceLock::new();
        HOST.get_or_init(|| Self::read(Path::new("/sys/devices/system")))
    }

    /// Reads the topology from sysfs (Linux, `Documentation/admin-guide/cputopology.rst` and
    /// `Documentation/ABI/stable/sysfs-devices-node`).
    fn read(root: &Path) -> Self {
        let list =
            |path: &Path| fs::read_to_string(path).map(|list| ProcessorSet::parse_list(&list));
        let mut topology = Self::default();
        let online = list(&root.join("cpu/online")).unwrap_or_default();
        for processor in online.iter() {
            let dir = root.join(format!("cpu/cpu{processor}"));
            if let Ok(core) = list(&dir.join("topology/thread_siblings_list")) {
                add_group(&mut topology.cores, core);
            }
            let cache = |index: usize| {
                let dir = dir.join(format!("cache/index{index}"));
                let level = fs::read_to_string(dir.join("level")).ok()?;
                let level: u32 = level.trim().parse().ok()?;
                Some((level, list(&dir.join("shared_cpu_list")).ok()?))
            };
            let caches = (0..).map_while(cache);
            if let Some((_, last)) = caches.max_by_key(|(level, _)| *level) {
                add_group(&mut topology.caches, last);
            }
        }
        let entries = fs::read_dir(root.join("node")).into_iter().flatten();
        for entry in entries.flatten() {
            let name = entry.file_name();
            let number = name.to_str().and_then(|name| name.strip_prefix("node"));
            if let Some(number) = number.and_then(|number| number.parse().ok())
                && let Ok(node) = list(&entry.path().join("cpulist"))
            {
                topology.nodes.push((number, node));
            }
        }
        topology
    }

    /// Returns the processors among `allowed` for the poller of a vCPU that may run on `vcpu`. Returns `None` if the vCPU may
    /// run on all of `allowed`, because the poller then cannot avoid the vCPU's processor.
    fn processors_near(&self, vcpu: &ProcessorSet, allowed: &ProcessorSet) -> Option<ProcessorSet> {
        if vcpu.is_empty() || allowed.difference(vcpu).is_empty() {
            return None;
        }
        let core = expand_to_groups(vcpu, &self.cores);
        let nodes = self.nodes.iter().map(|(_, node)| node);
        [
            expand_to_groups(vcpu, &self.caches).difference(&core),
            core.difference(vcpu),
            expand_to_groups(vcpu, nodes).difference(&core),
            allowed.difference(&core),
        ]
        .into_iter()
        .map(|choice| choice.intersection(allowed))
        .find(|choice| !choice.is_empty())
    }

    fn node(&self, number: u32) -> Option<&ProcessorSet> {
        let mut nodes = self.nodes.iter();
        nodes.find(|(of, _)| *of == number).map(|(_, node)| node)
    }
}

/// Adds a group of processors if the list does not have it yet.
fn add_group(groups: &mut Vec<ProcessorSet>, group: ProcessorSet) {
    if !groups.contains(&group) {
        groups.push(group);
    }
}

/// Returns the union of `processors` and of all groups that contain any of them.
fn expand_to_groups<'a>(
    processors: &ProcessorSet,
    groups: impl IntoIterator<Item = &'a ProcessorSet>,
) -> ProcessorSet {
    let near = groups
        .into_iter()
        .filter(|group| !group.intersection(processors).is_empty());
    near.fold(*processors, |all, group| all.union(group))
}

/// Placement of a poller's thread beside a vCPU, which it follows when the vCPU moves. The value must stay on the poller's
/// thread.
#[derive(Debug)]
pub(super) struct VcpuAffinity {
    vector: Option<Arc<InterruptVector>>,
    topology: &'static ProcessorTopology,
    /// Processors that the thread was allowed to use at its start.
    allowed: ProcessorSet,
    /// Allowed processors to use if the vCPU is unknown, or if it may run on all of them.
    default_processors: ProcessorSet,
    /// Processors that the thread is placed on.
    current: ProcessorSet,
    /// Processors that the kernel reported after the last placement. If the kernel reports others later, a CPU set or the host
    /// has changed.
    reported: ProcessorSet,
    next_check: Ticks,
    period_ticks: u64,
    /// True if the kernel refused a placement, which was logged.
    is_refused: bool,
}

impl VcpuAffinity {
    /// Creates the placement, on the poller's thread. Returns `None` if the kernel does not report the thread's processors,
    /// which is logged.
    pub(super) fn start(neighbours: PollerLocality, name: &str) -> Option<Self> {
        let PollerLocality { vector, node } = neighbours;
        let allowed = match current_processors() {
            Ok(allowed) => allowed,
            Err(error) => {
                warn!("Poller {name} follows no vCPU: its own processors are not known: {error}");
                return None;
            }
        };
        let topology = ProcessorTopology::of_this_host();
        let node = node.and_then(|number| topology.node(number));
        let local = node.map(|node| node.intersection(&allowed));
        let mut near = Self {
            vector,
            topology,
            allowed,
            default_processors: local.filter(|local| !local.is_empty()).unwrap_or(allowed),
            current: allowed,
            reported: allowed,
            next_check: Ticks::now(),
            period_ticks: TickRate::measured().ticks(CHECK_INTERVAL),
            is_refused: false,
        };
        near.follow_vcpu(near.next_check, name);
        Some(near)
    }

    /// Moves the thread near the vCPU again if the check interval has passed and the vCPU has moved.
    #[cold]
    pub(super) fn follow_vcpu(&mut self, now: Ticks, name: &str) {
        if now < self.next_check {
            return;
        }
        self.next_check = Ticks(now.0.saturating_add(self.period_ticks));
        let thread = self.vector.as_ref().and_then(|vector| vector.vcpu_thread());
        let processors = |thread: ThreadId| thread.processors().ok();
        let near = thread
            .and_then(processors)
            .and_then(|vcpu| self.topology.processors_near(&vcpu, &self.allowed));
        let place = near.unwrap_or(self.default_processors);
        let is_moved = current_processors().is_ok_and(|own| own != self.reported);
        if place == self.current && !is_moved {
            return;
        }
        let placed = set_affinity(&place);
        self.reported = current_processors().unwrap_or(self.reported);
        match placed {
            Ok(()) => {
                self.current = place;
                // Logged at debug level, because a guest determines how often its interrupt moves to another vCPU.
                match (near, thread) {
                    (Some(_), Some(ThreadId(thread))) => {
                        debug!("Poller {name} runs on {place} now, beside thread {thread}");
                    }
                    _ => debug!("Poller {name} runs on {place} now: its vCPU has no place"),
                }
            }
            Err(error) => {
                if !self.is_refused {
                    self.is_refused = true;
                    warn!("Poller {name} cannot run on {place}: {error}");
                }
                // The vCPU may be on the poller's current processors.
                if self.current != self.default_processors
                    && set_affinity(&self.default_processors).is_ok()
                {
                    self.current = self.default_processors;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the topology of a host of two NUMA nodes. Each node has four cores with two hardware threads each, and two cores
    /// share a last-level cache. Thread N + 8 is the second thread of core N.
    fn host() -> ProcessorTopology {
        let root = tempfile::tempdir().expect("a folder");
        let write = |path: String, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
        };
        write("cpu/online".to_owned(), "0-15\n");
        for processor in 0..16 {
            let core = processor % 8;
            let cpu = format!("cpu/cpu{processor}");
            let siblings = format!("{core},{}\n", core + 8);
            write(format!("{cpu}/topology/thread_siblings_list"), &siblings);
            write(format!("{cpu}/cache/index0/level"), "1\n");
            write(format!("{cpu}/cache/index0/shared_cpu_list"), &siblings);
            let first = core / 2 * 2;
            let shared = format!("{first}-{},{}-{}\n", first + 1, first + 8, first + 9);
            write(format!("{cpu}/cache/index1/level"), "3\n");
            write(format!("{cpu}/cache/index1/shared_cpu_list"), &shared);
        }
        write("node/node0/cpulist".to_owned(), "0-3,8-11\n");
        write("node/node1/cpulist".to_owned(), "4-7,12-15\n");
        write("node/possible".to_owned(), "0-1\n");
        ProcessorTopology::read(root.path())
    }

    #[test]
    fn a_poller_shares_the_cache_of_its_vcpu_and_leaves_its_core_alone() {
        let host = host();
        for (vcpu, allowed, near) in [
            ("0", "0-15", Some("1,9")),
            ("13", "0-15", Some("4,12")),
            ("0-1", "0-15", Some("8-9")),
            // The core's second thread, if the other core of the cache is not allowed.
            ("0", "0,8,4", Some("8")),
            ("0", "0,2", Some("2")),
            ("0", "0,5", Some("5")),
            ("3", "0-3", Some("2")),
            ("0,8", "8", None),
            ("0-15", "0-15", None),
            ("0-3", "0-3", None),
            ("", "0-15", None),
        ] {
            let [set, among] = [vcpu, allowed].map(ProcessorSet::parse_list);
            let wanted = near.map(ProcessorSet::parse_list);
            assert_eq!(
                host.processors_near(&set, &among),
                wanted,
                "{vcpu:?} of {allowed:?}"
            );
        }
        assert_eq!(host.node(1), Some(&ProcessorSet::parse_list("4-7,12-15")));
        assert_eq!(host.node(2), None);
        // A kernel without topology information.
        let bare = ProcessorTopology::default();
        let [vcpu, allowed] = ["1", "0-2"].map(ProcessorSet::parse_list);
        let near = bare.processors_near(&vcpu, &allowed);
        assert_eq!(near, Some(ProcessorSet::parse_list("0,2")));
    }
}
