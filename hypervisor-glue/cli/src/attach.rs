//! The arguments with which a VMM attaches a function that a server offers, ready to be pasted.

use std::path::Path;

use serde_json::json;

/// Memory of the guest in the examples. Whatever its size, it must be shared with the server.
const EXAMPLE_MEMORY: &str = "2G";

/// Arguments for a stock Cloud Hypervisor.
#[must_use]
pub fn cloud_hypervisor(id: &str, socket: &Path) -> String {
    let socket = socket.to_string_lossy();
    // Its option parser splits at commas outside double quotes.
    let socket = if socket.contains(',') {
        format!("\"{socket}\"")
    } else {
        socket.into_owned()
    };
    format!(
        "--memory size={EXAMPLE_MEMORY},shared=on --user-device {}",
        shell_word(&format!("socket={socket},id={id}"))
    )
}

/// Arguments for QEMU 10.1 or newer.
#[must_use]
pub fn qemu(id: &str, socket: &Path) -> String {
    let device = json!({
        "driver": "vfio-user-pci",
        "id": id,
        "socket": { "type": "unix", "path": socket.to_string_lossy() },
    });
    format!(
        "-machine q35,memory-backend=mem0 \
         -object memory-backend-memfd,id=mem0,size={EXAMPLE_MEMORY},share=on \
         -m {EXAMPLE_MEMORY} -device {}",
        shell_word(&device.to_string())
    )
}

/// `text` as one word of a shell command.
fn shell_word(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-+=:,@%".contains(&byte);
    if !text.is_empty() && text.bytes().all(is_plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_case_reads_as_in_the_manuals() {
        let socket = Path::new("/run/nvme-mpt/a.sock");
        assert_eq!(
            cloud_hypervisor("vm-1", socket),
            "--memory size=2G,shared=on --user-device socket=/run/nvme-mpt/a.sock,id=vm-1"
        );
        assert_eq!(
            qemu("vm-1", socket),
            "-machine q35,memory-backend=mem0 -object memory-backend-memfd,id=mem0,size=2G,share=on -m 2G \
             -device '{\"driver\":\"vfio-user-pci\",\"id\":\"vm-1\",\"socket\":{\"path\":\"/run/nvme-mpt/a.sock\",\"type\":\"unix\"}}'"
        );
    }
}
