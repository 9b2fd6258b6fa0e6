//! Help texts of options, made from the [table of options](super::option_table).

use super::config::STATE_DIR_HELP;
use super::option_table::{OPTIONS, OptionHelp, server_options};

/// Mandatory options.
const REQUIRED: [&str; 2] = ["socket", "path"];

/// Maximum line length of [`synopsis`] and [`help`], so that help with an indentation of 13 fits into 80 columns.
const LINE_MAX: usize = 67;

/// Returns the synopsis of a server function's option string, in several lines.
#[must_use]
pub fn synopsis() -> String {
    let is_required = |option: &&OptionHelp| REQUIRED.contains(&option.key);
    let required = server_options().filter(is_required);
    let others = server_options().filter(|option| !is_required(option));
    let mut text = String::new();
    let mut line = 0;
    for OptionHelp { key, value, .. } in required.chain(others) {
        let option = match REQUIRED.contains(key) {
            true if text.is_empty() => format!("{key}={value}"),
            true => format!(",{key}={value}"),
            false => format!("[,{key}={value}]"),
        };
        if line + option.len() > LINE_MAX {
            text.push('\n');
            line = 0;
        }
        line += option.len();
        text.push_str(&option);
    }
    text
}

/// Returns the help of all options of a server's function.
#[must_use]
pub fn help() -> String {
    wrapped_help(server_options())
}

/// Returns the help of all keys of a function in a VMM's own configuration, which are
/// [`FunctionConfig::KEYS`](super::FunctionConfig::KEYS).
#[must_use]
pub fn config_help() -> String {
    let options = OPTIONS.iter().map(|option| &option.help);
    let options = options.filter(|option| option.key != "id");
    wrapped_help(options.chain([&STATE_DIR_HELP]))
}

fn wrapped_help<'a>(options: impl Iterator<Item = &'a OptionHelp> + Clone) -> String {
    let width = options.clone().map(|option| option.key.len()).max();
    let width = width.unwrap_or(0);
    let mut text = String::new();
    for OptionHelp { key, help, .. } in options {
        let mut line = format!("  {key:width$} ");
        for word in help.split_whitespace() {
            if line.len() + 1 + word.len() > LINE_MAX {
                text.push_str(&line);
                text.push('\n');
                line = format!("  {:width$} ", "");
            }
            line.push(' ');
            line.push_str(word);
        }
        text.push_str(&line);
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::FunctionConfig;
    use super::*;

    #[test]
    fn help_has_a_line_of_bounded_length_for_every_option() {
        let (synopsis, help) = (synopsis(), help());
        assert!(synopsis.starts_with("socket=PATH,path=DRIVE[,mode=MODE][,owner=USER[:GROUP]]"));
        for OptionHelp { key, .. } in server_options() {
            assert!(synopsis.contains(&format!("{key}=")), "{key}");
            assert!(
                help.lines()
                    .any(|line| line.starts_with(&format!("  {key} "))),
                "{key}"
            );
        }
        for line in synopsis.lines().chain(help.lines()) {
            assert!(line.len() <= LINE_MAX, "{line}");
        }
    }

    #[test]
    fn help_of_a_configuration_has_a_line_for_every_key_and_no_other() {
        let help = config_help();
        let keys = help
            .lines()
            .filter(|line| !line.starts_with("   "))
            .filter_map(|line| line.split_whitespace().next());
        assert_eq!(keys.collect::<Vec<_>>(), FunctionConfig::KEYS);
    }
}
