//! Leases: which part of a drive belongs to which guest controller.
//!
//! A [`Lease`] is a list of extents of one namespace of one drive. Its holder names one range, or a size for which
//! the ledger finds extents. Two leases of one namespace never overlap, in one process or in two: every lease is
//! entered in a [`Ledger`] before it is given out.
//!
//! * [`extents`]: the parts of a drive that a lease has, in its order.
//! * [`ledger`]: who holds which parts of which drive.
//! * `request`, `area`: what is asked for, and of which drive.
//! * `admit`: the rules, i.e. who gets a range and who is refused. `outcome`: what they decide.
//! * `by_size`: the extents of a lease by size: those that its id left, and free ones.
//! * `allocate`: the choice among free extents.
//! * `store`: the file that holds the ledger, changed so that a crash at any point leaves
//!   either the old or the new state.
//! * `returns`: leases that are given back at the same time.
//! * `kept`: the ledger of private drives in a memory file, for the process after this one.
//! * `holder`: how one process sees whether the holder of a lease, another process, lives.
//! * `tenants`: which id last held a range, and what becomes of its data.
//! * `marks`: blocks that Write Uncorrectable made unreadable.
//! * `room`: the ids that have parts of a drive, and what is free of it.
//! * `earlier`: leases of drives that had a name until a boot of the host, and the names that a drive had.
//! * `known`: the rules by which another drive, or other content, is told from what was leased. `facts`: what is kept for that.
//! * `terms`: the owner and the limits of an id. `claim`: the right by which a lease is asked for.
//! * [`identity`]: the names (serial number, NGUID, EUI-64, UUID) that a guest sees for its lease.

mod admit;
mod allocate;
mod area;
mod by_size;
mod claim;
mod earlier;
mod entry;
mod error;
pub mod extents;
mod facts;
mod holder;
pub mod identity;
mod kept;
mod known;
pub mod ledger;
mod marks;
mod outcome;
mod private;
mod request;
mod returns;
mod room;
mod store;
mod tenants;
mod terms;

pub use by_size::MIN_UNIT;
pub use claim::Claim;
pub use entry::{LeaseEntry, LeaseState};
pub use error::{ChangedDriveError, EarlierNameError, ExchangedDriveError, LeaseError, Likeness};
pub use extents::Extents;
pub use identity::LeaseIdentity;
pub use ledger::{Lease, LeaseMarks, Ledger};
pub use private::PrivateError;
pub use request::{LeaseRequest, Wanted};
pub use room::{Room, RoomUse};
pub use store::{CONTROL_SOCKET, SERVER_SOCKETS, StoreError, make_state_folder, open_state_folder};
pub use tenants::{FormerData, Left};
pub use terms::LeaseTerms;
