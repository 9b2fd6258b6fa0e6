//! Guests, end-to-end tests and load for nvme-mpt.
