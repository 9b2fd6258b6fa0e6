//! Joins the NVMe function to a VMM.
