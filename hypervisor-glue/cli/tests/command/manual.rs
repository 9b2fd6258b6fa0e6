//! Manual pages and completions.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use crate::support::Bench;

fn nvme_mpt(bench: &Bench, arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvme-mpt"));
    let output = command.args(arguments).current_dir(bench.path(""));
    let output = output.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the commands that a help text lists, or the long options that it explains.
fn listed(help: &str, heading: &str) -> Vec<String> {
    let section = help.lines().skip_while(|line| *line != heading).skip(1);
    let section = section.take_while(|line| !line.ends_with(':') || line.starts_with(' '));
    // Other lines continue a description.
    let entries = section.filter_map(|line| line.strip_prefix("  "));
    let entries = entries.filter(|line| !line.starts_with(' '));
    let first_words = entries.filter_map(|line| line.split_whitespace().next());
    let first_words = first_words.filter(|word| word.chars().all(|c| c.is_ascii_lowercase()));
    first_words
        .filter(|word| *word != "help")
        .map(str::to_owned)
        .collect()
}

#[test]
fn each_command_has_a_page_with_its_options() {
    let bench = Bench::new();
    nvme_mpt(&bench, &["man", "man/man1"]);
    let commands = listed(&nvme_mpt(&bench, &["-h"]), "Commands:");
    assert!(commands.len() > 15, "{commands:?}");
    let page = |name: &str| fs::read_to_string(bench.path("man/man1").join(name)).unwrap();
    let all = page("nvme-mpt.1");
    for command in &commands {
        assert!(
            all.contains(&format!("nvme\\-mpt\\-{command}(1)")),
            "{command}"
        );
        let text = page(&format!("nvme-mpt-{command}.1")).replace("\\-", "-");
        let help = nvme_mpt(&bench, &[command, "--help"]);
        let options = help.split([' ', ',', '\n']);
        let options: BTreeSet<&str> = options.filter(|word| word.starts_with("--")).collect();
        for option in options {
            let option = option.trim_end_matches(|c: char| !c.is_ascii_lowercase());
            assert!(text.contains(option), "{command}: {option}");
        }
    }
    assert!(page("nvme-mpt-leases-give.1").contains("user"));
    assert!(all.contains("RUST_LOG"));
}

#[test]
fn a_directory_that_cannot_be_made_is_named() {
    let bench = Bench::new();
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvme-mpt"));
    let command = command
        .args(["man", "drive.img/man"])
        .current_dir(bench.path(""));
    let output = command.output().unwrap();
    assert!(!output.status.success());
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(
        stderr.contains("manual pages into drive.img/man"),
        "{stderr}"
    );
}

#[test]
fn a_shell_completes_commands_and_options() {
    let bench = Bench::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = nvme_mpt(&bench, &["completions", shell]);
        for word in ["serve", "leases", "metrics-file"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
    let script = nvme_mpt(&bench, &["completions", "bash"]);
    fs::write(bench.path("completions"), script).unwrap();
    let complete = |words: &str, last: &str| {
        let bash = format!(
            "source ./completions; COMP_WORDS=({words} {last}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _nvme__mpt nvme-mpt {last} x; printf '%s\n' \"${{COMPREPLY[@]}}\""
        );
        let mut command = Command::new("bash");
        let command = command.args(["-c", &bash]).current_dir(bench.path(""));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(complete("nvme-mpt", "rel"), "reload\n");
    assert_eq!(
        complete("nvme-mpt serve", "--metrics-f"),
        "--metrics-file\n"
    );
    assert_eq!(complete("nvme-mpt leases", "giv"), "give\n");
}
