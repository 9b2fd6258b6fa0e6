//! The lab from outside: it returns output, files and status, and reports failures at once.

use std::fs;
use std::time::{Duration, Instant};

use integration::lab::LabDrive;
use integration::process;

use crate::Group;
use crate::fixture::{Failure, TIMEOUT, expect, with_path};
use crate::harness::Suite;

pub(crate) const GROUP: Group = Group::Around {
    name: "around",
    checks: &[
        ("status_output_and_files_come_back", check_results_return),
        ("a_panic_is_an_error_with_its_console", panic),
        ("a_command_without_end_is_an_error", check_timeout),
        ("images_are_kept", images_are_kept),
    ],
};

fn check_results_return(suite: &Suite) -> Result<(), Failure> {
    let dir = tempfile::tempdir().map_err(with_path(std::env::temp_dir()))?;
    suite.with_lab(Vec::new(), |lab| {
        let mut text = Vec::new();
        let script = "echo to stdout; echo to stderr >&2; \
                      head -c 5000000 /dev/urandom >/tmp/bytes; head -c 1 /dev/zero >/tmp/zero; \
                      md5sum </tmp/bytes; exit 7";
        let status = lab.stream(script, TIMEOUT, &mut text)?;
        expect(status == 7, || format!("The status is {status}, not 7"))?;
        let text = String::from_utf8_lossy(&text).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        expect(lines[..2] == ["to stdout", "to stderr"], || text.clone())?;
        let output = lab.run("exit 3", TIMEOUT)?;
        expect(output.status == 3, || format!("{output:?}"))?;

        let first = ["/tmp/bytes".to_owned(), "/tmp/zero".to_owned()];
        let files = lab.fetch(&first, dir.path())?;
        expect(files.len() == 2, || format!("{files:?}"))?;
        let sum = process::run(std::process::Command::new("md5sum").arg(&files[0]))?;
        expect(sum.split(' ').next() == lines[2].split(' ').next(), || {
            format!("{sum} is not {}", lines[2])
        })?;
        let zero = fs::read(&files[1]).unwrap_or_default();
        expect(zero == [0], || format!("{zero:?}"))?;

        // A failed command returns the files that exist. A successful command must return all.
        let none = lab.fetch(&["/tmp/absent".to_owned()], dir.path())?;
        expect(none.is_empty(), || format!("{none:?}"))?;
        let second = ["/tmp/absent".to_owned(), "/tmp/zero".to_owned()];
        let files = lab.fetch(&second, dir.path())?;
        expect(files.len() == 1, || format!("{files:?}"))?;
        expect(lab.finish(0, &second, dir.path()).is_err(), || {
            "A file that is not there was brought back".to_owned()
        })
    })
}

fn panic(suite: &Suite) -> Result<(), Failure> {
    suite.with_lab(Vec::new(), |lab| {
        let started = Instant::now();
        let result = lab.stream(
            "echo c >/proc/sysrq-trigger; sleep 100",
            TIMEOUT,
            &mut Vec::new(),
        );
        let error = result.err().map(|error| error.to_string());
        expect(
            error
                .as_ref()
                .is_some_and(|text| text.contains("Kernel panic")),
            || format!("A panic, but: {error:?}"),
        )?;
        expect(started.elapsed() < TIMEOUT, || {
            "It was waited for to the end".to_owned()
        })
    })
}

fn check_timeout(suite: &Suite) -> Result<(), Failure> {
    suite.with_lab(Vec::new(), |lab| {
        let result = lab.stream("sleep 1000", Duration::from_secs(1), &mut Vec::new());
        expect(result.is_err(), || "It has ended".to_owned())?;
        // The lab itself still runs.
        lab.check("true", TIMEOUT)?;
        Ok(())
    })
}

fn images_are_kept(suite: &Suite) -> Result<(), Failure> {
    let dir = tempfile::tempdir().map_err(with_path(std::env::temp_dir()))?;
    let image = dir.path().join("kept.img");
    let drive = LabDrive::new("a", 16 << 20).image(&image);
    suite.with_lab(vec![drive.clone()], |lab| {
        lab.check(
            "echo hello | dd of=/dev/nvme0n1 bs=512 seek=9 conv=sync oflag=direct",
            TIMEOUT,
        )?;
        lab.finish(0, &[], dir.path())?;
        Ok(())
    })?;
    let bytes = fs::read(&image).map_err(with_path(&image))?;
    expect(bytes.len() == 16 << 20, || format!("{} bytes", bytes.len()))?;
    expect(bytes[9 * 512..].starts_with(b"hello\n"), || {
        "What was written is not in the image".to_owned()
    })?;
    suite.with_lab(vec![drive], |lab| {
        lab.check(
            "dd if=/dev/nvme0n1 bs=512 skip=9 count=1 | grep -q hello",
            TIMEOUT,
        )?;
        Ok(())
    })
}
