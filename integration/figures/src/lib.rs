//! Draws the figures of the documents: `docs/figures/NAME.svg` from `docs/figures/NAME.json`.
//!
//! - [`figure_directory`]: the figures of a directory, which are drawn or compared with their pictures;
//! - `picture`: layout of a figure, as SVG; `scale`: axis of values; `style`: colours and text.
//!
//! The crate `figure-data` defines the schema of the data.

pub mod figure_directory;
mod picture;
mod scale;
mod style;
#[cfg(test)]
mod tests;

pub use picture::svg;
