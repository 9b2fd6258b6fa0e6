//! Options of a function together with their text.

use std::env;
use std::str::FromStr;

use super::error::OptionError;
use super::function::FunctionOptions;
use super::server_options::OptionText;

/// Options of a function in parsed form and as an option string.
///
/// A VMM uses the parsed form to open a drive itself. If a drive server has the drive, the VMM sends the string to that server.
#[derive(Clone, Debug, PartialEq)]
pub struct ParsedFunctionOptions {
    options: FunctionOptions,
    text: OptionText,
}

impl ParsedFunctionOptions {
    /// Parses options. Relative paths start at this process's working directory.
    ///
    /// # Errors
    /// Any [`OptionError`] that values can cause.
    pub fn from_text(text: OptionText) -> Result<Self, OptionError> {
        let options = text.to_string().parse()?;
        // If the working directory was removed, relative paths stay as they are and fail later.
        let text = match env::current_dir() {
            Ok(folder) => text.with_absolute_paths(&folder),
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
