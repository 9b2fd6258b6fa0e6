//! Tests of limits that an operator sets for functions in VMMs.

use std::time::Instant;

use crate::support::Bench;
use crate::vmms::{PIECE, RANGE, TestVmm, await_leases, server};

const FIRST: &str = "path=drive.img,range=0+16M,id=first";

fn limits(bench: &Bench) -> String {
    let listed = bench.ask("list", &["--json"]).unwrap();
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    listed[0]["limits"].as_str().unwrap().to_owned()
}

/// Makes the guest write and read its range once. Returns whether it had at most `iops` commands per second.
fn is_limited(vmm: &mut TestVmm, iops: u64) -> bool {
    let begun = Instant::now();
    assert_eq!(vmm.pass(), "passed");
    let commands = 2 * RANGE / PIECE as u64;
    // The first commands may pass as a burst, and the limiter has credit after idle times, so 80 % of the time is enough.
    begun.elapsed().as_secs_f64() >= 0.8 * commands as f64 / iops as f64
}

#[test]
fn the_limits_of_a_vmms_function_hold_until_it_is_released() {
    for signal in ["TERM", "KILL"] {
        let bench = Bench::new();
        let server = server(&bench);
        let options = format!("{FIRST},bandwidth=1G,iops=300000");
        let mut vmm = TestVmm::start(&bench, &options, 1);
        assert_eq!(vmm.report(), "attached");
        assert_eq!(limits(&bench), "iops=300000,bandwidth=1G");
        bench.ask("limit", &["first", "iops=500"]).unwrap();
        assert_eq!(limits(&bench), "iops=500,bandwidth=1G");
        // The operator's limits override the VMM's.
        assert_eq!(vmm.order("unlimit"), "unlimited");
        assert_eq!(limits(&bench), "iops=500");
        assert!(is_limited(&mut vmm, 500));

        match signal {
            "TERM" => drop(server.signal("TERM")),
            _ => server.kill(),
        }
        let server = self::server(&bench);
        assert!(is_limited(&mut vmm, 500));
        assert_eq!(limits(&bench), "iops=500");
        vmm.end();
        await_leases(&bench, &[]);

        // The limits belong to the lease, so the next VMM with this lease has them, too.
        let mut vmm = TestVmm::start(&bench, FIRST, 1);
        assert_eq!(vmm.report(), "attached");
        assert_eq!(limits(&bench), "iops=500");
        bench.ask("limit", &["first", "bandwidth=2G"]).unwrap();
        bench.ask("limit", &["first", "iops=none"]).unwrap();
        vmm.end();
        await_leases(&bench, &[]);
        let mut vmm = TestVmm::start(&bench, &options, 1);
        assert_eq!(vmm.report(), "attached");
        assert_eq!(limits(&bench), "bandwidth=2G");
        vmm.end();
        await_leases(&bench, &[]);
        let released = bench.run("leases", &["release", "first"]);
        assert!(released.status.success(), "{released:?}");
        let mut vmm = TestVmm::start(&bench, &options, 1);
        assert_eq!(vmm.report(), "attached");
        assert_eq!(limits(&bench), "iops=300000,bandwidth=1G");
        vmm.end();
        server.stop();
    }
}

#[test]
fn limits_that_cannot_be_recorded_are_not_set() {
    let bench = Bench::new();
    let server = server(&bench);
    let mut vmm = TestVmm::start(&bench, FIRST, 1);
    assert_eq!(vmm.report(), "attached");
    bench.ask("limit", &["first", "iops=500"]).unwrap();
    // The operator removes the lease from the ledger (`--force`), while its VMM is attached.
    let forced = bench.run("leases", &["release", "--force", "first"]);
    assert!(forced.status.success(), "{forced:?}");
    let message = bench.ask("limit", &["first", "iops=600"]).unwrap_err();
    assert!(
        message.contains("Cannot change the limits of function first")
            && message.contains("taken out of the ledger"),
        "{message}"
    );
    assert_eq!(limits(&bench), "iops=500");
    vmm.end();
    server.stop();
}
