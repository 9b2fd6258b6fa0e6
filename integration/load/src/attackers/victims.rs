//! Guests that read one block at a time. Their latencies show the effect of an attack.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nvme_mpt_tests::COMMAND_TIMEOUT;
use nvme_mpt_tests::interrupt::Interrupt;
use nvme_mpt_tests::memory::DmaBuffer;
use nvme_mpt_tests::prp::{self, PreparedPointer};
use nvme_mpt_tests::queue::QueuePair;

use super::client::GuestClient;
use super::error::AttackError;
use super::report::VictimLatencies;
use super::server::{AttackedServer, VICTIMS};
use super::{GuestCpus, report};

/// Size of a read in bytes.
const PIECE: u64 = 4096;
/// Maximum wait for an interrupt, after which the queue is checked.
const INTERRUPT_TIMEOUT: Duration = Duration::from_secs(1);

/// Victims of a server.
pub(super) struct Victims(Vec<Victim>);

impl Victims {
    pub(super) fn connect(server: &AttackedServer) -> Result<Self, AttackError> {
        let victims = (0..VICTIMS).map(|number| Victim::connect(server, number));
        Ok(Self(victims.collect::<Result<_, _>>()?))
    }

    /// Makes all victims read until `stop` is set. Returns their combined latencies.
    pub(super) fn read_until(
        &mut self,
        stop: &AtomicBool,
        cpus: &GuestCpus,
    ) -> Result<VictimLatencies, AttackError> {
        let latencies: Result<Vec<_>, _> = thread::scope(|scope| {
            let victims = self.0.iter_mut().enumerate();
            let threads: Vec<_> = victims
                .map(|(number, victim)| {
                    scope.spawn(move || {
                        cpus.pin(number)?;
                        victim.read_until(stop)
                    })
                })
                .collect();
            let ends = threads.into_iter().map(thread::ScopedJoinHandle::join);
            ends.map(|end| end.unwrap_or(Err(AttackError::Panicked)))
                .collect()
        });
        let mut all = report::histogram();
        for latencies in latencies? {
            // Cannot fail, since both histograms have the same bounds.
            let _ = all.add(latencies);
        }
        Ok(VictimLatencies::from_histogram(&all))
    }
}

struct Victim {
    client: GuestClient,
    queue: QueuePair,
    prepared: PreparedPointer,
    _data: DmaBuffer,
    reads: u64,
}

impl Victim {
    fn connect(server: &AttackedServer, number: usize) -> Result<Self, AttackError> {
        let vector = Interrupt::new().map_err(AttackError::system_error("Making an eventfd"))?;
        let socket = server.socket(&format!("victim-{number}"));
        let mut client = GuestClient::connect(&socket, 2 << 20, 1, vector)?;
        let queue = client.queue(1, true)?;
        let data = client.memory.alloc(PIECE as usize)?;
        Ok(Self {
            queue,
            prepared: prp::buffer(&data, 0, PIECE as usize)?,
            _data: data,
            reads: 0,
            client,
        })
    }

    fn read_until(&mut self, stop: &AtomicBool) -> Result<report::Latencies, AttackError> {
        let mut latencies = report::histogram();
        while !stop.load(Ordering::Relaxed) {
            let start = Instant::now();
            self.read()?;
            let nanoseconds = start.elapsed().as_nanos();
            latencies.saturating_record(u64::try_from(nanoseconds).unwrap_or(u64::MAX));
        }
        Ok(latencies)
    }

    /// Reads once. Sleeps until the interrupt.
    fn read(&mut self) -> Result<(), AttackError> {
        let failed = |source| AttackError::Driver {
            who: self.client.name.clone(),
            source,
        };
        let sqe = self.client.read(self.reads, PIECE);
        self.reads += 1;
        let sqe = sqe.with_data(self.prepared.pointer);
        let cid = self.queue.submit(sqe).map_err(&failed)?;
        self.queue.ring();
        let deadline = Instant::now() + COMMAND_TIMEOUT;
        let cqe = loop {
            if let Some(cqe) = self.queue.poll() {
                break cqe;
            }
            if Instant::now() > deadline {
                return Err(failed(nvme_mpt_tests::Error::Timeout {
                    cid,
                    queue: self.queue.id(),
                    after: COMMAND_TIMEOUT,
                }));
            }
            let interrupt = &self.client.vectors[1];
            let waited = interrupt.wait(INTERRUPT_TIMEOUT);
            waited.map_err(AttackError::system_error("Waiting for an interrupt"))?;
        };
        self.queue.ring();
        match cqe.cid() == cid && cqe.status().is_success() {
            true => Ok(()),
            false => Err(failed(nvme_mpt_tests::Error::Status {
                opcode: sqe.opcode(),
                cqe,
            })),
        }
    }
}
