//! Tests that a shell passes the printed VMM arguments unchanged. These are integration tests, because a program started
//! from a unit test would hold open descriptors that other unit tests count.

use std::path::Path;
use std::process::Command;

use nvme_mpt_server::vmm_arguments::{cloud_hypervisor_arguments, qemu_arguments};

#[test]
fn a_shell_takes_odd_paths_as_they_are() {
    for path in [
        "/a b", "/a,b", "/it's", "/$HOME", "/a\"b", "/ä", "/a\\b", "/*",
    ] {
        let words = |arguments: &str| {
            let output = Command::new("sh")
                .args(["-c", &format!("printf '%s\\n' {arguments}")])
                .output()
                .unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            text.lines().map(str::to_owned).collect::<Vec<_>>()
        };
        let socket = Path::new(path);
        let device = words(&qemu_arguments("a", socket)).pop().unwrap();
        let device: serde_json::Value = serde_json::from_str(&device).unwrap();
        assert_eq!(device["socket"]["path"], path);

        let option = words(&cloud_hypervisor_arguments("a", socket))
            .pop()
            .unwrap();
        let expected = if path.contains(',') {
            format!("socket=\"{path}\",id=a")
        } else {
            format!("socket={path},id=a")
        };
        assert_eq!(option, expected);
    }
}
