//! Pauses of functions whose clients have little memory, when their server is killed and another of its clients has much
//! memory. Long pauses show that the next server pins the memory of all clients before the first client continues.

use std::fs;
use std::sync::Arc;

use integration::lab::inside;
use integration::progress::print_line;
use integration::server::{FunctionArgument, ServerReplacement};
use nvme_mpt_tests::bar::Bar;
use nvme_mpt_tests::controller::{Config, Controller};
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::vfio_user::VfioUserBar;

use crate::client::{Client, ClientWork};
use crate::fixture::{CheckEnvironment, Failure, await_that, expect, iommu_faults, with_path};

/// Functions whose clients have little memory.
const SMALL: [&str; 7] = ["s1", "s2", "s3", "s4", "s5", "s6", "s7"];
/// Length of each function's range.
const RANGE: u64 = 4 << 20;
/// Number of regions of the large memory. Between them are holes of [`REGION`] bytes, so each region is a mapping of its own.
const REGIONS: u64 = 64;
/// Size of a region in bytes.
const REGION: u64 = 16 << 20;
/// Part of the log line that a server writes when a client of its predecessor continues.
const PAUSE: &str = "it had no server for ";

/// Kills `servers` servers one after the other, and prints the pauses of the small functions. A server is killed when all small
/// functions have continued on it. Their clients may see delays, but no errors.
pub(crate) fn beside_large_memory(bench: &CheckEnvironment, servers: usize) -> Result<(), Failure> {
    inside::bind("a", "vfio-pci")?;
    let a = inside::address("a")?;
    let mut functions =
        vec![FunctionArgument::new("large", &a, format!("0+{RANGE}")).option("memory-limit=2G")];
    for (number, id) in (1..).zip(SMALL) {
        functions.push(FunctionArgument::new(
            id,
            &a,
            format!("{}+{RANGE}", number * RANGE),
        ));
    }
    let mut server = bench.serve_supervised(&functions)?;
    let faults = iommu_faults()?;

    let regions: Vec<_> = (0..REGIONS).map(|i| (2 * i * REGION, REGION)).collect();
    let memory = GuestMemory::new(&regions)?;
    let bar: Arc<dyn Bar> = Arc::new(VfioUserBar::attach(&server.socket("large"), &memory)?);
    let _large = Controller::attach(bar, memory, Config::default(), 1)?;
    let clients = (1..).zip(SMALL).map(|(seed, id)| {
        let client = Client::start(id, &server.socket(id), ClientWork::new(seed))?;
        client.advance()?;
        Ok(client)
    });
    let clients = clients.collect::<Result<Vec<_>, Failure>>()?;

    let log = bench.dir().join("serve.log");
    let mut pauses = Vec::new();
    for killed in 1..=servers {
        server.replace(ServerReplacement::Kill)?;
        await_that("the small functions to continue", || {
            let log = fs::read_to_string(&log).map_err(with_path(&log))?;
            pauses = log.lines().filter_map(small_pause).collect();
            Ok(pauses.len() >= killed * SMALL.len())
        })?;
        for client in &clients {
            client.advance()?;
        }
    }

    for client in clients {
        let counts = client.finish()?.counts;
        let anomalies = counts.anomalies();
        expect(anomalies == 0, || {
            format!("A client saw more than delays: {counts:?}")
        })?;
    }
    server.expect_alive()?;
    server.stop()?;
    let refused = iommu_faults()? - faults;
    expect(refused == 0, || {
        format!("The IOMMU has refused {refused} accesses")
    })?;
    pauses.sort_by(f64::total_cmp);
    let percentile = |percent: usize| pauses[(pauses.len() - 1) * percent / 100];
    print_line(&format!(
        "        {servers} servers killed: pauses of the small functions in ms: median {:.0}, 90 % {:.0}, longest {:.0}",
        percentile(50),
        percentile(90),
        percentile(100)
    ));
    Ok(inside::bind("a", "nvme")?)
}

/// Returns the pause in milliseconds that a line of a server's log reports for a small function; `None` for any other line.
fn small_pause(line: &str) -> Option<f64> {
    let (client, pause) = line.split_once(PAUSE)?;
    let is_small = SMALL
        .iter()
        .any(|id| client.contains(&format!("/{id}.sock ")));
    let (milliseconds, _) = pause.split_once(" ms")?;
    is_small.then(|| milliseconds.parse().ok()).flatten()
}
