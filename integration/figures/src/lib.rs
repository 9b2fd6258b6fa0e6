//! Draws the figures of the documents: `docs/figures/NAME.svg` from `docs/figures/NAME.json`.
//!
//! - [`figure_directory`]: the figures of a folder, drawn or compared with their pictures;
//! - `picture`: layout of a figure, as SVG; `scale`: axis of values; `style`: colours and text.
//!
//! The schema of the data is that of the crate `figure-data`.

pub mod figure_directory;
mod picture;
mod scale;
mod style;
#[cfg(test)]
mod tests;

pub use picture::svg;
