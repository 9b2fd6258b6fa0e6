//! Leases: the assignment of parts of a drive to guest controllers.
//!
//! A [`Lease`] is a list of extents of one namespace of one drive. Its holder requests one range, or a size for which
//! the ledger finds extents. Two leases of one namespace never overlap, also across processes: every lease is entered
//! in a [`Ledger`] before it is granted.
//!
//! * [`extents`]: the parts of a drive that a lease has, in the lease's order.
//! * [`ledger`]: the record of all leases of all drives.
//! * `request`, `lease_target`: the request for a lease, and the namespace that it is for.
//! * `admission`: the rules that grant or refuse a lease. `outcome`: their results.
//! * `by_size`: the extents of a lease by size: those that its id already has, and free ones.
//! * `allocation`: the choice among free extents.
//! * `ledger_store`: the ledger's file, with crash-safe updates.
//! * `pending_returns`: batching of leases that are returned at the same time.
//! * `memory_file`: the ledger of drives that exist only in this process, in a memory file for the successor process.
//! * `holder`: liveness of the process that holds a lease.
//! * `range_owners`: the id that last held each range, and the decision about its data.
//! * `uncorrectable`: blocks that Write Uncorrectable made unreadable.
//! * `capacity`: the use of a drive by ids, and its free capacity.
//! * `earlier_drive`: drives that the ledger knows under another name, such as that of an earlier boot of the host.
//! * `exchanged_drives`: detection of exchanged drives and changed content. `known_drives`: the stored facts for this.
//! * `lease_settings`: the owner and the limits of an id. `claim`: the right by which a lease is requested.
//! * [`identity`]: the names (serial number, NGUID, EUI-64, UUID) that a guest sees for its lease.
//! * [`label`]: names that an operator writes on drives without a persistent name.
//! * [`backing_id`]: the identity of a drive's bytes, which does not depend on the path to them.
//! * [`range_lock`]: locks of ranges of files, against other processes.
//! * [`range`]: sizes and ranges, and their text forms.
//!
//! The crate opens no drive and does no I/O on drives. A caller passes a drive's names and size.
//!
//! # Example
//!
//! A drive of 512 GiB has 64 GiB for one VM, which a second VM cannot have:
//!
//! ```
//! use nvme_lease::{LeaseError, LeaseRequest, Ledger, PreviousDataPolicy, RequestedBytes};
//! use nvme_spec::ids::Nsid;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let ledger = Ledger::in_process();
//! let request = LeaseRequest {
//!     id: "vm-1",
//!     drive: "file:/drive".into(),
//!     nsid: Nsid(1),
//!     wanted: RequestedBytes::Range("64G+64G".parse()?),
//!     lba_shift: 9,
//!     blocks: 1 << 30,
//!     previous_data: PreviousDataPolicy::Kept,
//! };
//! let lease = ledger.acquire(&request)?;
//! assert_eq!(lease.blocks()[0].start.0, 64 << 21);
//!
//! let second = ledger.acquire(&LeaseRequest { id: "vm-2", ..request });
//! assert!(matches!(second, Err(LeaseError::Overlap { .. })));
//! # Ok(())
//! # }
//! ```

#![cfg_attr(
    test,
    expect(
        clippy::disallowed_methods,
        reason = "tests have threads and real time of their own"
    )
)]
#![forbid(unsafe_code)]

mod admission;
mod allocation;
pub mod backing_id;
mod by_size;
mod capacity;
mod claim;
mod earlier_drive;
mod error;
mod exchanged_drives;
pub mod extents;
mod holder;
pub mod identity;
mod known_drives;
pub mod label;
mod lease_entry;
mod lease_settings;
mod lease_target;
pub mod ledger;
mod ledger_store;
mod memory_file;
mod outcome;
mod pending_returns;
mod private_files;
pub mod range;
pub mod range_lock;
mod range_owners;
mod request;
mod uncorrectable;

pub use by_size::MIN_UNIT;
pub use capacity::{CapacityUse, NamespaceCapacity};
pub use claim::LeaseClaim;
pub use error::{
    ChangedDriveError, DriveMatchReason, EarlierNameError, ExchangedDriveError, LeaseError,
};
pub use extents::LeaseExtents;
pub use identity::LeaseIdentity;
pub use lease_entry::{LeaseEntry, LeaseHolderState};
pub use lease_settings::LeaseSettings;
pub use ledger::{Lease, Ledger, LedgerUncorrectableMarks};
pub use ledger_store::{
    CONTROL_SOCKET, LedgerStoreError, SERVER_SOCKETS, make_searchable_state_dir, make_state_dir,
};
pub use private_files::PrivateFileError;
pub use range_owners::{LeftoverData, PreviousDataPolicy};
pub use request::{LeaseRequest, RequestedBytes};
