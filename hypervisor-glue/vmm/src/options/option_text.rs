//! `key=value,key=value`: the syntax of option strings.
//!
//! A value that contains a comma is put in double quotes, as in `path="/a,b"`. A double quote inside a quoted value is written
//! twice. Cloud Hypervisor has the same syntax.

use std::error::Error as StdError;
use std::fmt;
use std::iter::Peekable;
use std::str::{Chars, FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::error::OptionError;

/// An option string whose values are not parsed yet. Keys are unique, and values are not empty.
///
/// Functions and drives are stored in files and sent to servers in this form. `Display` and serde write the option string.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OptionText(Vec<(String, String)>);

impl OptionText {
    /// Creates the options from keys and values.
    ///
    /// # Errors
    /// [`OptionError::EmptyValue`], [`OptionError::Duplicate`].
    pub fn from_pairs(
        pairs: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, OptionError> {
        let mut text = Self::default();
        for (key, value) in pairs {
            text.push(key, value)?;
        }
        Ok(text)
    }

    /// Removes the options whose keys are in `keys`, and returns them; `None` if there are none of these keys.
    pub(super) fn split_off(&mut self, keys: &[&str]) -> Option<Self> {
        let all = std::mem::take(&mut self.0).into_iter();
        let (some, others): (Vec<_>, _) = all.partition(|(key, _)| keys.contains(&key.as_str()));
        self.0 = others;
        (!some.is_empty()).then_some(Self(some))
    }

    /// Returns the value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        let (_, value) = self.0.iter().find(|(present, _)| present == key)?;
        Some(value)
    }

    /// Returns the keys and their values.
    pub fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0
            .iter()
            .map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// Sets the value of a key, or removes the key.
    #[must_use]
    pub fn with_value(mut self, key: &str, value: Option<&str>) -> Self {
        let place = self.0.iter().position(|(present, _)| present == key);
        match (place, value) {
            (Some(place), Some(value)) => value.clone_into(&mut self.0[place].1),
            (Some(place), None) => {
                self.0.remove(place);
            }
            (None, Some(value)) => self.0.push((key.to_owned(), value.to_owned())),
            (None, None) => {}
        }
        self
    }

    /// Sets the value of each key of `other`.
    #[must_use]
    pub fn with_all(self, other: &Self) -> Self {
        let pairs = other.pairs();
        pairs.fold(self, |text, (key, value)| text.with_value(key, Some(value)))
    }

    /// Adds a key and its value. Refuses a key that is present already.
    fn push(&mut self, key: String, value: String) -> Result<(), OptionError> {
        if value.is_empty() {
            return Err(OptionError::EmptyValue { key });
        }
        if self.get(&key).is_some() {
            return Err(OptionError::Duplicate { key });
        }
        self.0.push((key, value));
        Ok(())
    }

    /// Removes `key` and returns its value.
    fn take(&mut self, key: &str) -> Option<String> {
        let index = self.0.iter().position(|(present, _)| present == key)?;
        Some(self.0.swap_remove(index).1)
    }

    /// Removes `key`, and parses its value; `None` if the key is missing.
    pub(super) fn take_value<T, E: Into<Box<dyn StdError + Send + Sync>>>(
        &mut self,
        key: &'static str,
        parse: impl FnOnce(&str) -> Result<T, E>,
    ) -> Result<Option<T>, OptionError> {
        let Some(value) = self.take(key) else {
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

    /// Refuses a key that is not one of the `known` keys.
    pub(super) fn reject_unknown<'a>(
        &self,
        known: impl Iterator<Item = &'a str> + Clone,
    ) -> Result<(), OptionError> {
        let mut keys = self.pairs().map(|(key, _)| key);
        match keys.find(|key| known.clone().all(|other| other != *key)) {
            None => Ok(()),
            Some(key) => Err(OptionError::Unknown {
                key: key.to_owned(),
                allowed: known.collect::<Vec<_>>().join(", "),
            }),
        }
    }
}

impl FromStr for OptionText {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<Self, OptionError> {
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
}

impl fmt::Display for OptionText {
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

impl Serialize for OptionText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for OptionText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(text: &str) -> Vec<(String, String)> {
        text.parse::<OptionText>().unwrap().0
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
                text.parse::<OptionText>().unwrap_err().to_string(),
                message,
                "{text}"
            );
        }
    }

    #[test]
    fn values_of_any_kind_survive_as_text() {
        for value in ["a", "a,b", "\"", "a\"\"b", "=", " ", "a=\"b\",c"] {
            let pairs = [owned_pair("id", value)];
            let text = OptionText::from_pairs(pairs).unwrap();
            let again: OptionText = text.to_string().parse().unwrap();
            assert_eq!(again.get("id"), Some(value), "{text}");
        }
        let twice = [owned_pair("id", "a"), owned_pair("id", "b")];
        assert!(OptionText::from_pairs(twice).is_err());
    }
}
