//! Journal fields of a message: `FUNCTION`, `LEASE`, `QUEUE`, `DRIVE` and `THREAD`.
//!
//! A message has the fields given in the log call. If the logging thread serves a single function, `FUNCTION` and `LEASE` are
//! added.

use std::cell::RefCell;

use log::kv::{Error, Key, Source, Value, VisitSource};

thread_local! {
    static FUNCTION: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Sets the function that this thread serves, by the id of its lease.
pub fn set_function(id: &str) {
    FUNCTION.set(Some(id.to_owned()));
}

/// Returns the id of the function that this thread serves. Returns `None` in a thread that is ending.
pub(super) fn function() -> Option<String> {
    FUNCTION
        .try_with(|function| function.borrow().clone())
        .ok()
        .flatten()
}

/// Fields of a message.
pub(super) struct LogFields<'a> {
    /// Fields given in the log call.
    pub(super) record_fields: &'a dyn Source,
    /// Id of the function that the thread serves.
    pub(super) function: Option<&'a str>,
    pub(super) thread: &'a str,
}

impl Source for LogFields<'_> {
    fn visit<'kvs>(&'kvs self, visitor: &mut dyn VisitSource<'kvs>) -> Result<(), Error> {
        self.record_fields.visit(visitor)?;
        if let Some(id) = self.function {
            for key in ["function", "lease"] {
                if self.record_fields.get(Key::from(key)).is_none() {
                    visitor.visit_pair(Key::from(key), Value::from(id))?;
                }
            }
        }
        visitor.visit_pair(Key::from("thread"), Value::from(self.thread))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct SeenFields(Vec<(String, String)>);

    impl<'kvs> VisitSource<'kvs> for SeenFields {
        fn visit_pair(&mut self, key: Key<'kvs>, value: Value<'kvs>) -> Result<(), Error> {
            self.0.push((key.to_string(), value.to_string()));
            Ok(())
        }
    }

    fn collect_fields(own: &dyn Source) -> Vec<(String, String)> {
        let mut seen = SeenFields(Vec::new());
        let function = function();
        let fields = LogFields {
            record_fields: own,
            function: function.as_deref(),
            thread: "vm7",
        };
        fields.visit(&mut seen).unwrap();
        seen.0
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        pairs.iter().map(owned).collect()
    }

    #[test]
    fn a_message_has_its_own_fields_and_its_threads_fields() {
        let own = [("queue", Value::from(3_u16))];
        assert_eq!(
            collect_fields(&own),
            pairs(&[("queue", "3"), ("thread", "vm7")])
        );
        set_function("vm7");
        let of_thread = [("function", "vm7"), ("lease", "vm7"), ("thread", "vm7")];
        let expected = [&[("queue", "3")][..], &of_thread].concat();
        assert_eq!(collect_fields(&own), pairs(&expected));
        // A `lease` field of the message itself replaces the lease of the thread's function.
        let own = [("lease", Value::from("vm9"))];
        let expected = [("lease", "vm9"), ("function", "vm7"), ("thread", "vm7")];
        assert_eq!(collect_fields(&own), pairs(&expected));
    }
}
