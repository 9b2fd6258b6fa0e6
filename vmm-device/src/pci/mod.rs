//! The controller as a PCI function: configuration space, MSI-X and MSI.

pub(crate) mod capabilities;
pub(crate) mod config_space;
pub(crate) mod msi;
pub(crate) mod msix;
