//! The guest-visible NVMe PCI function.
