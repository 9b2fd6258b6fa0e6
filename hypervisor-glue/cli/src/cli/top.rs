//! `nvme-mpt top`: shows rates in a terminal.

use std::error::Error;
use std::io;
use std::time::Duration;

use clap::Args;

use super::stats::parse_interval;
use super::{ControlSocketArgs, StateDirArgs};
use crate::top::{TopColumn, TopSubject, TopView, run, run_once};

/// Show rates of the functions or drives of a running server, the busiest first, until q is pressed
///
/// Left and right choose the column to sort by, Tab functions or drives. Rates and percentiles are those of the last
/// interval.
#[derive(Args, Debug)]
pub(super) struct TopArgs {
    /// Functions or drives
    #[arg(long, value_enum, value_name = "WHAT", default_value_t)]
    show: TopSubject,
    /// Column to sort by
    #[arg(long, value_enum, value_name = "COLUMN", default_value_t)]
    sort: TopColumn,
    /// Time between two updates
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = parse_interval)]
    interval: Duration,
    /// Print a table of one interval and end, for scripts
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    state: StateDirArgs,
    #[command(flatten)]
    control: ControlSocketArgs,
}

impl TopArgs {
    pub(super) fn run(self) -> Result<(), Box<dyn Error>> {
        let control = self.control.path(&self.state);
        let view = TopView::new(self.show, self.sort);
        match self.once {
            true => run_once(&control, view, self.interval, &mut io::stdout().lock())?,
            false => run(control, view, self.interval)?,
        }
        Ok(())
    }
}
