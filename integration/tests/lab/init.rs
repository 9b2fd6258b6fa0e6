//! Init script of a guest of the reference VMM.

/// Mounts file systems, and installs the commands that scripts use.
const PROLOGUE: &str = r"#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/sbin:/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tmpfs tmpfs /tmp
";

/// Remounts the root read-only, and turns the machine off.
const EPILOGUE: &str = r"
sync
mount -o remount,ro /
poweroff -f
";

/// Kernel command line that starts the script. With `iomem=relaxed`, scripts may read registers that a driver uses.
pub(crate) const COMMAND_LINE: &str =
    "console=ttyS0 loglevel=5 root=/dev/nvme0n1 rw init=/check panic=-1 iomem=relaxed";

/// Returns an init script that runs `body` and turns the machine off.
pub(crate) fn script(body: &str) -> String {
    format!("{PROLOGUE}{body}{EPILOGUE}")
}
