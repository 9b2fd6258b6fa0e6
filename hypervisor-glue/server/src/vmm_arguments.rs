//! VMM arguments that attach a served function, ready to paste.

use std::path::Path;

use serde_json::json;

/// Size of the guest's memory in the printed examples of VMM arguments. They share the memory with the server, as vfio-user
/// requires.
const EXAMPLE_MEMORY: &str = "2G";

/// Returns the arguments for Cloud Hypervisor.
#[must_use]
pub fn cloud_hypervisor_arguments(id: &str, socket: &Path) -> String {
    let socket = socket.to_string_lossy();
    // Cloud Hypervisor splits options at commas outside double quotes.
    let socket = if socket.contains(',') {
        format!("\"{socket}\"")
    } else {
        socket.into_owned()
    };
    format!(
        "--memory size={EXAMPLE_MEMORY},shared=on --user-device {}",
        quote_shell_word(&format!("socket={socket},id={id}"))
    )
}

/// Returns the arguments for QEMU 10.1 or newer.
#[must_use]
pub fn qemu_arguments(id: &str, socket: &Path) -> String {
    let device = json!({
        "driver": "vfio-user-pci",
        "id": id,
        "socket": { "type": "unix", "path": socket.to_string_lossy() },
    });
    format!(
        "-machine q35,memory-backend=mem0 \
         -object memory-backend-memfd,id=mem0,size={EXAMPLE_MEMORY},share=on \
         -m {EXAMPLE_MEMORY} -device {}",
        quote_shell_word(&device.to_string())
    )
}

/// Quotes `text` as one shell word, if necessary.
fn quote_shell_word(text: &str) -> String {
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
    fn the_default_attach_arguments_match_the_manuals() {
        let socket = Path::new("/run/nvme-mpt/a.sock");
        assert_eq!(
            cloud_hypervisor_arguments("vm-1", socket),
            "--memory size=2G,shared=on --user-device socket=/run/nvme-mpt/a.sock,id=vm-1"
        );
        assert_eq!(
            qemu_arguments("vm-1", socket),
            "-machine q35,memory-backend=mem0 -object memory-backend-memfd,id=mem0,size=2G,share=on -m 2G \
             -device '{\"driver\":\"vfio-user-pci\",\"id\":\"vm-1\",\"socket\":{\"path\":\"/run/nvme-mpt/a.sock\",\"type\":\"unix\"}}'"
        );
    }
}
