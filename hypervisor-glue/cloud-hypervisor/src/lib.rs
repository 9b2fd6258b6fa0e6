//! Makes a branch of commits in a git checkout of Cloud Hypervisor.
//!
//! The commits are described by files, a series: `series/nvme-mpt` adds NVMe functions in the process of Cloud Hypervisor,
//! `series/vfio-user` mends its vfio-user devices and does not need this project. The files hold no lines of Cloud Hypervisor,
//! neither context nor removed ones: an edit inserts lines at an anchor, which names symbols of the source. Each anchor must
//! be found exactly once. Else nothing is changed.
//!
//! # Files of a series
//! - `versions.toml`: an entry `[[version]]` for each known version, with `name`, `commit` and `date`.
//! - `NN-NAME/message`: message of a commit. The commits have the order of their directories' names.
//! - `NN-NAME/tree/PATH`: a new file. `NN-NAME/tree.VERSION/PATH` is one for a single version.
//! - `NN-NAME/edits.toml`: an entry `[[edit]]` for each edit, with `file`, `text`, optionally `versions`, and an anchor.
//!
//! # Anchors
//! `in` names the enclosing items, outermost first. One of these keys names the place in there:
//!
//! | key | place |
//! |---|---|
//! | `after`, `before` | beside the innermost element that mentions a name |
//! | `start`, `end` | first or last |
//! | `imports` | behind the last import (Rust) |
//! | `rename` | the item's name, which is replaced in its definition (Rust) |
//!
//! In Rust sources, a name is an identifier, a sequence of tokens such as `Kind::Name`, `object.field` or `fn name`, or a whole
//! string literal. Elements are items, fields, variants, match arms, statements, and elements of arrays. Enclosing items are
//! `mod`, `enum`, `struct`, `trait`, `fn`, `const`, `static`, `impl TYPE` and `impl TRAIT for TYPE`. These name parts of a
//! function, at any depth:
//!
//! | enclosing item | what it encloses |
//! |---|---|
//! | `match NAME` | arms, if the matched expression mentions NAME |
//! | `arm NAME` | body of the arm whose pattern mentions NAME |
//! | `literal NAME` | fields of a struct literal of this type |
//! | `call NAME` | arguments of a call of this function or method |
//! | `closure NAME` | body of a closure that is an argument of such a call |
//! | `macro NAME` | arguments of this macro |
//! | `if NAME`, `else NAME` | blocks of an `if` whose condition mentions NAME |
//! | `let NAME` | value of a variable |
//! | `for NAME`, `while NAME` | body of a loop whose header mentions NAME |
//! | `array NAME` | innermost array or `vec!` with an element that mentions NAME |
//!
//! If several parts have the name of an enclosing item, the next name must be found in exactly one of them.
//!
//! YAML files have keys as enclosing items and names, TOML files tables and keys, and other files headings and words.

#![forbid(unsafe_code)]

pub mod anchor;
pub mod branch;
pub mod checkout;
pub mod edit;
mod lines;
mod lock;
pub mod plan;
pub mod program;
mod rust_anchor;
mod rust_container;
mod rust_source;
mod rustfmt;
pub mod series;
mod text_anchor;
mod toml_anchor;
mod worktree;
mod yaml_anchor;
