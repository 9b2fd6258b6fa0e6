//! The controller as a PCI function: configuration space and MSI-X.

pub(crate) mod capabilities;
pub(crate) mod config_space;
pub(crate) mod msix;
