//! Joins the NVMe function to a VMM.

pub mod vfio_user;
