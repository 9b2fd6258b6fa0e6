//! Script that a guest of the reference VMM runs in place of an init.

/// Mounts and installs the needs of a script.
const PROLOGUE: &str = r"#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/sbin:/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tmpfs tmpfs /tmp
";

/// Leaves the root in order, and turns the machine off.
const EPILOGUE: &str = r"
sync
mount -o remount,ro /
poweroff -f
";

/// Parameter of the kernel that names it. Scripts may look at registers that a driver has.
pub(crate) const COMMAND_LINE: &str =
    "console=ttyS0 loglevel=5 root=/dev/nvme0n1 rw init=/check panic=-1 iomem=relaxed";

/// An init that runs `body` and turns the machine off.
pub(crate) fn script(body: &str) -> String {
    format!("{PROLOGUE}{body}{EPILOGUE}")
}
