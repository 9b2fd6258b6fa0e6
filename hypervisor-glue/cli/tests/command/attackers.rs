//! Runs `cargo attackers` for a short time.

use std::path::Path;

use clap::Parser;
use nvme_load::attackers::{self, AttackerOptions};

#[test]
fn victims_of_attackers_have_no_errors() {
    let arguments = [
        "attackers",
        "--rounds=1",
        "--seconds=0.1",
        "--cpus=any",
        "--only=eventfd-full,log",
    ];
    let options = AttackerOptions::try_parse_from(arguments).unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_nvme-mpt"));
    let mut rows = Vec::new();
    let report = attackers::run(program, &options, |row| rows.push(row.to_string())).unwrap();
    assert!(report.has_no_errors(), "{rows:#?}");
    let columns = |row: &String| row.matches(" | ").count();
    assert_eq!(
        rows.iter().map(columns).collect::<Vec<_>>(),
        [4, 4],
        "{rows:#?}"
    );
}
