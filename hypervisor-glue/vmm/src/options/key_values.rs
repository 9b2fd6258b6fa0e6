//! `key=value,key=value`: the syntax of option strings.
//!
//! A value that contains a comma is put in double quotes, as in `path="/a,b"`. A double quote inside a quoted value is written
//! twice. Cloud Hypervisor has the same syntax.

use std::error::Error as StdError;
use std::fmt;
use std::iter::Peekable;
use std::str::Chars;

use super::error::OptionError;

/// Keys and values of an option string. Keys are unique, and values are not empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct KeyValues(Vec<(String, String)>);

impl KeyValues {
    pub(super) fn parse(text: &str) -> Result<Self, OptionError> {
        let mut chars = text.chars().peekable();
        let mut keys = Self::default();
        loop {
            let (word, value) = parse_pair(&mut chars)?;
            let key = word.trim();
            if key != word && !key.is_empty() {
                let key = key.to_owned();
                return Err(OptionError::Blank { key });
            }
            let Some(value) = value else {
                return Err(OptionError::NoValue { word });
            };
            keys.push(word, value)?;
            // `parse_pair` stops at a comma or at the end of the string.
            if chars.next().is_none() {
                return Ok(keys);
            }
        }
    }

    /// Adds a key and its value. Refuses a key that is present already.
    pub(super) fn push(&mut self, key: String, value: String) -> Result<(), OptionError> {
        if value.is_empty() {
            return Err(OptionError::EmptyValue { key });
        }
        if self.get(&key).is_some() {
            return Err(OptionError::Duplicate { key });
        }
        self.0.push((key, value));
        Ok(())
    }

    /// Creates a list from unique keys.
    pub(super) fn from_pairs(pairs: Vec<(String, String)>) -> Self {
        Self(pairs)
    }

    /// Returns the keys.
    pub(super) fn keys(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(key, _)| key.as_str())
    }

    /// Returns the value of `key`.
    pub(super) fn get(&self, key: &str) -> Option<&str> {
        let (_, value) = self.0.iter().find(|(present, _)| present == key)?;
        Some(value)
    }

    pub(super) fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0
            .iter()
            .map(|(key, value)| (key.as_str(), value.as_str()))
    }

    pub(super) fn pairs_mut(&mut self) -> impl Iterator<Item = (&str, &mut String)> {
        self.0.iter_mut().map(|(key, value)| (key.as_str(), value))
    }

    /// Sets the value of `key`, or removes the key.
    pub(super) fn set(&mut self, key: &str, value: Option<&str>) {
        let place = self.0.iter().position(|(present, _)| present == key);
        match (place, value) {
            (Some(place), Some(value)) => value.clone_into(&mut self.0[place].1),
            (Some(place), None) => {
                self.0.remove(place);
            }
            (None, Some(value)) => self.0.push((key.to_owned(), value.to_owned())),
            (None, None) => {}
        }
    }

    /// Removes `key` and returns its value.
    pub(super) fn take(&mut self, key: &str) -> Option<String> {
        let index = self.0.iter().position(|(present, _)| present == key)?;
        Some(self.0.swap_remove(index).1)
    }

    /// Returns a key that no parser has taken; `None` if no key is left.
    pub(super) fn remaining_key(self) -> Option<String> {
        self.0.into_iter().next().map(|(key, _)| key)
    }
}

impl fmt::Display for KeyValues {
    /// Writes the option string, with quotes where values need them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (key, value)) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { "," };
            write!(f, "{separator}{key}=")?;
            match value.contains([',', '"']) {
                true => write!(f, "\"{}\"", value.replace('"', "\"\""))?,
                false => f.write_str(value)?,
            }
        }
        Ok(())
    }
}

/// Reads up to the next comma outside quotes. Returns the key, and the value if there is an equals sign.
fn parse_pair(chars: &mut Peekable<Chars<'_>>) -> Result<(String, Option<String>), OptionError> {
    let mut word = String::new();
    let mut value: Option<String> = None;
    while let Some(&next) = chars.peek() {
        if next == ',' {
            break;
        }
        chars.next();
        match (next, &mut value) {
            ('=', None) => value = Some(String::new()),
            ('"', Some(value)) => parse_quoted(chars, &word, value)?,
            (_, Some(value)) => value.push(next),
            (_, None) => word.push(next),
        }
    }
    Ok((word, value))
}

/// Reads a quoted value, from the character after the opening quote through the closing quote.
fn parse_quoted(
    chars: &mut Peekable<Chars<'_>>,
    key: &str,
    value: &mut String,
) -> Result<(), OptionError> {
    while let Some(next) = chars.next() {
        // A doubled quote is part of the value. A single quote closes it.
        if next == '"' && chars.next_if_eq(&'"').is_none() {
            return Ok(());
        }
        value.push(next);
    }
    Err(OptionError::Unclosed {
        key: key.to_owned(),
    })
}

/// Removes `key` from `keys`, and parses its value; `None` if the key is missing.
pub(super) fn take_value<T, E: Into<Box<dyn StdError + Send + Sync>>>(
    keys: &mut KeyValues,
    key: &'static str,
    parse: impl FnOnce(&str) -> Result<T, E>,
) -> Result<Option<T>, OptionError> {
    parse_value(key, keys.take(key), parse)
}

/// Parses the value of `key`, if it has a value.
pub(super) fn parse_value<T, E: Into<Box<dyn StdError + Send + Sync>>>(
    key: &'static str,
    value: Option<String>,
    parse: impl FnOnce(&str) -> Result<T, E>,
) -> Result<Option<T>, OptionError> {
    let Some(value) = value else {
        return Ok(None);
    };
    match parse(&value) {
        Ok(parsed) => Ok(Some(parsed)),
        Err(error) => Err(OptionError::Value {
            key,
            value,
            source: error.into(),
        }),
    }
}

/// Refuses a key that is left in `keys`, because no parser knows it. The error lists the `allowed` keys.
pub(super) fn reject_remaining<'a>(
    keys: KeyValues,
    allowed: impl Iterator<Item = &'a str>,
) -> Result<(), OptionError> {
    match keys.remaining_key() {
        None => Ok(()),
        Some(key) => Err(OptionError::Unknown {
            key,
            allowed: allowed.collect::<Vec<_>>().join(", "),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(text: &str) -> Vec<(String, String)> {
        KeyValues::parse(text).unwrap().0
    }

    fn owned_pair(key: &str, value: &str) -> (String, String) {
        (key.to_owned(), value.to_owned())
    }

    #[test]
    fn keys_have_values() {
        assert_eq!(
            pairs("a=1,b=x=y,c=/p+q"),
            [
                owned_pair("a", "1"),
                owned_pair("b", "x=y"),
                owned_pair("c", "/p+q")
            ]
        );
    }

    #[test]
    fn quotes_keep_commas() {
        for (text, value) in [
            (r#"a="x,y""#, "x,y"),
            (r#"a=x",",b=1"#, "x,"),
            (r#"a="x ""quoted"", y""#, r#"x "quoted", y"#),
            (r#"a="x=y""#, "x=y"),
            (r#"a="""""#, "\""),
        ] {
            assert_eq!(pairs(text)[0], owned_pair("a", value), "{text}");
        }
    }

    #[test]
    fn invalid_option_strings_are_refused() {
        for (text, message) in [
            (
                "",
                "An option is empty: write KEY=VALUE, separated by single commas",
            ),
            (
                "a=1,",
                "An option is empty: write KEY=VALUE, separated by single commas",
            ),
            (
                "a=1,,b=2",
                "An option is empty: write KEY=VALUE, separated by single commas",
            ),
            (
                "a=1, b=2",
                "Option \"b\" has a blank before or after its name: write KEY=VALUE,KEY=VALUE without blanks",
            ),
            (
                "a =1",
                "Option \"a\" has a blank before or after its name: write KEY=VALUE,KEY=VALUE without blanks",
            ),
            ("a", "Option \"a\" has no value: write a=VALUE"),
            ("a=1,b", "Option \"b\" has no value: write b=VALUE"),
            (
                "a=",
                "Option \"a\" has an empty value: give it one, or leave it out",
            ),
            (
                r#"a="""#,
                "Option \"a\" has an empty value: give it one, or leave it out",
            ),
            ("a=1,a=1", "Option \"a\" is given twice: keep one"),
            (
                r#"a="x,b=1"#,
                "Option \"a\" opens a quote that it does not close: add a \"",
            ),
        ] {
            assert_eq!(
                KeyValues::parse(text).unwrap_err().to_string(),
                message,
                "{text}"
            );
        }
    }
}
