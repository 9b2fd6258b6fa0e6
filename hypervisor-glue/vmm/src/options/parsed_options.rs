//! Options of a function together with their text.

use std::env;
use std::str::FromStr;

use super::error::OptionError;
use super::function::FunctionOptions;
use super::option_text::OptionText;

/// Options of a function in parsed form and as an option string.
///
/// A VMM that opens the drive itself uses the parsed form. If a drive server has the drive, the VMM sends the string to this
/// server.
#[derive(Clone, Debug, PartialEq)]
pub struct ParsedFunctionOptions {
    options: FunctionOptions,
    text: OptionText,
}

impl ParsedFunctionOptions {
    /// Parses options. Makes relative paths absolute, starting at this process's working directory.
    ///
    /// # Errors
    /// Any [`OptionError`] that the options' values can cause.
    pub fn from_text(text: OptionText) -> Result<Self, OptionError> {
        let options = FunctionOptions::from_text(text.clone())?;
        // If the working directory was removed, relative paths stay relative, and opening them fails.
        let text = match env::current_dir() {
            Ok(dir) => text.with_absolute_paths(&dir),
            Err(_) => text,
        };
        Ok(Self { options, text })
    }

    /// Returns the parsed options.
    #[must_use]
    pub fn options(&self) -> &FunctionOptions {
        &self.options
    }

    /// Returns the text, with absolute paths.
    #[must_use]
    pub fn text(&self) -> &OptionText {
        &self.text
    }
}

impl FromStr for ParsedFunctionOptions {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<Self, OptionError> {
        Self::from_text(text.parse()?)
    }
}
