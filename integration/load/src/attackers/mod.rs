//! Guests that attack their neighbours. Measures the effect of a fifth guest on four others, whose functions share a poller
//! of `nvme-mpt serve` with it.
//!
//! - `client`: a guest driver for one function; `victims`: guests that read, and their latencies;
//! - `attack_kind`: names of attackers; `attacks`: their implementations; `server`: the server with its functions;
//! - `report`: the table; `error`: errors.

mod attack_kind;
mod attacks;
mod client;
mod error;
mod report;
mod server;
mod victims;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use clap::Parser;

pub use attack_kind::AttackKind;
pub use error::AttackError;
pub use report::{AttackReport, AttackRow};

use attacks::Attack;
use report::{AttackRound, VictimLatencies};
use server::{AttackedServer, VICTIMS};
use victims::Victims;

/// Measures what guests notice of a neighbour that attacks, and prints a table with ratios
#[derive(Clone, Debug, Parser)]
#[command(name = "attackers", version)]
pub struct AttackerOptions {
    /// Attackers to measure; by default all of them
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME,…")]
    pub only: Vec<AttackKind>,

    /// Rounds, each with a quiet neighbour and then an attacker; the table has the medians
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,

    /// Duration of each half of a round
    #[arg(long, default_value_t = 1.0, value_parser = parse_seconds)]
    pub seconds: f64,

    /// Processor of the poller that all functions share
    #[arg(long, default_value_t = 1, value_name = "CPU")]
    pub poller_cpu: usize,

    /// Processors for the guests, in turn; `any` leaves the choice to the kernel
    #[arg(long, default_value = "0", value_name = "CPU,…|any", value_parser = parse_cpus)]
    pub cpus: GuestCpus,

    /// The `nvme-mpt` program; by default it is built
    #[arg(long, value_name = "PROGRAM")]
    pub server: Option<PathBuf>,
}

/// Processors for the guests' threads; empty for no binding.
#[derive(Clone, Debug, Default)]
pub struct GuestCpus(Vec<usize>);

impl GuestCpus {
    /// Binds the calling thread, which has this number, to a processor.
    fn pin(&self, number: usize) -> Result<(), AttackError> {
        if self.0.is_empty() {
            return Ok(());
        }
        let cpu = self.0[number % self.0.len()];
        crate::clock::pin(cpu).map_err(|source| AttackError::Processor { cpu, source })
    }
}

fn parse_cpus(text: &str) -> Result<GuestCpus, String> {
    if text == "any" {
        return Ok(GuestCpus::default());
    }
    let cpus: Result<_, _> = text.split(',').map(str::parse).collect();
    cpus.map(GuestCpus)
        .map_err(|_| format!("'{text}' is neither `any` nor a list such as 0,2"))
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|seconds| (0.01..=3600.0).contains(seconds))
        .ok_or_else(|| format!("'{text}' is not a number of seconds from 0.01 to 3600"))
}

/// Measures each attacker on a separate server. Calls `on_row` with each complete row of the table.
///
/// # Errors
/// A server does not start, or a victim cannot connect. Later errors are in the report.
pub fn run(
    program: &Path,
    options: &AttackerOptions,
    mut on_row: impl FnMut(&AttackRow),
) -> Result<AttackReport, AttackError> {
    let kinds = match &options.only[..] {
        [] => AttackKind::ALL,
        only => only,
    };
    let mut report = AttackReport::default();
    for &kind in kinds {
        let row = measure(kind, program, options)?;
        on_row(&row);
        report.rows.push(row);
    }
    Ok(report)
}

fn measure(
    kind: AttackKind,
    program: &Path,
    options: &AttackerOptions,
) -> Result<AttackRow, AttackError> {
    let server = AttackedServer::start(program, kind, options.poller_cpu)?;
    let mut victims = Victims::connect(&server)?;
    let mut attack = match attacks::prepare(kind, &server) {
        Ok(attack) => attack,
        Err(error) => return Ok(AttackRow::unmeasured(kind, &error)),
    };
    let mut rounds = Vec::new();
    for _ in 0..options.rounds {
        let (undisturbed, _) = measure_half(&mut victims, None, options)?;
        let (attacked, attempts) = measure_half(&mut victims, Some(attack.as_mut()), options)?;
        let round = match (undisturbed, attacked, attempts) {
            (_, _, Err(error)) => return Ok(AttackRow::unmeasured(kind, &error)),
            (Ok(undisturbed), Ok(attacked), Ok(attempts)) => AttackRound {
                undisturbed,
                attacked,
                attempts,
            },
            (Err(error), _, _) | (_, Err(error), _) => {
                return Ok(AttackRow::from_failure(kind, &error));
            }
        };
        rounds.push(round);
    }
    Ok(AttackRow::from_rounds(kind, &rounds))
}

/// Latencies of the victims, or the error of one of them.
type Measured = Result<VictimLatencies, AttackError>;
/// Operations per second of the attacker, or the reason why it could not attack.
type Attempts = Result<f64, AttackError>;

/// Measures the victims for a limited time, concurrently with an attack. The victims continue until the attack has ended.
fn measure_half(
    victims: &mut Victims,
    attack: Option<&mut (dyn Attack + '_)>,
    options: &AttackerOptions,
) -> Result<(Measured, Attempts), AttackError> {
    let (stop_victims, stop_attack) = (AtomicBool::new(false), AtomicBool::new(false));
    let seconds = Duration::from_secs_f64(options.seconds);
    thread::scope(|scope| {
        let measured = scope.spawn(|| victims.read_until(&stop_victims, &options.cpus));
        let attacker = attack.map(|attack| {
            let stop = &stop_attack;
            scope.spawn(move || {
                options.cpus.pin(VICTIMS)?;
                attack.attack(stop)
            })
        });
        thread::sleep(seconds);
        stop_attack.store(true, Ordering::Relaxed);
        let attempts = attacker.map_or(Ok(Ok(0)), |thread| thread.join());
        stop_victims.store(true, Ordering::Relaxed);
        let measured = measured.join().map_err(|_| AttackError::Panicked)?;
        let attempts = attempts.map_err(|_| AttackError::Panicked)?;
        Ok((
            measured,
            attempts.map(|count| count as f64 / options.seconds),
        ))
    })
}
