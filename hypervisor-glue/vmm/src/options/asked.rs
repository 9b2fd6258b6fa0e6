//! A function as it is asked for: parsed, and in text for a drive server.

use std::env;
use std::str::FromStr;

use super::error::OptionError;
use super::function::FunctionOptions;
use super::served::OptionText;

/// Options of a function, and their text.
///
/// A VMM parses options to open a drive itself. It sends the text if a drive server has the drive.
#[derive(Clone, Debug, PartialEq)]
pub struct ParsedFunctionOptions {
    options: FunctionOptions,
    text: OptionText,
}

impl ParsedFunctionOptions {
    /// From options that are in text. Relative paths are those of this process.
    ///
    /// # Errors
    /// All of [`OptionError`] that values can cause.
    pub fn read(text: OptionText) -> Result<Self, OptionError> {
        let options = text.to_string().parse()?;
        // A process whose folder is gone has no relative paths either.
        let text = match env::current_dir() {
            Ok(folder) => text.absolute(&folder),
            Err(_) => text,
        };
        Ok(Self { options, text })
    }

    /// The options.
    #[must_use]
    pub fn options(&self) -> &FunctionOptions {
        &self.options
    }

    /// Their text, with absolute paths.
    #[must_use]
    pub fn text(&self) -> &OptionText {
        &self.text
    }
}

impl FromStr for ParsedFunctionOptions {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<Self, OptionError> {
        Self::read(text.parse()?)
    }
}
