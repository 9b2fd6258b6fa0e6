//! Draws `nvme-mpt top` on a screen.

use clap::ValueEnum;
use nvme_mpt_server::stats::SupervisorStatus;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Cell, Row as TableRow, Sparkline, Table};

use super::{PrefixedNumber, TopColumn, TopSubject, TopView};

/// Height in lines of the graph of the total, with its border.
const GRAPH_HEIGHT: u16 = 5;

/// Width in columns of a row's history.
const BARS_WIDTH: u16 = 20;

/// Title of the rows' history.
const HISTORY_TITLE: &str = "LAST IOPS";

/// Columns to leave out on a narrow screen, in this order, until the other columns fit.
const OMITTED: [TopColumn; 7] = [
    TopColumn::Exits,
    TopColumn::Interrupts,
    TopColumn::Errors,
    TopColumn::Depth,
    TopColumn::Processor,
    TopColumn::State,
    TopColumn::P99,
];

const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

const KEY_HELP: &str =
    "q quit  Tab functions or drives  ←→ sort  r reverse  ↑↓ scroll  Space pause";

/// Formats the latest values as bars, scaled to the largest of all values.
fn bars<'a>(values: impl DoubleEndedIterator<Item = &'a u64> + Clone) -> String {
    let most = values.clone().max().copied().unwrap_or(0).max(1);
    let last: Vec<&u64> = values.rev().take(BARS_WIDTH.into()).collect();
    let bar = |value: &u64| {
        let step = (u128::from(*value) * 8).div_ceil(u128::from(most)) as usize;
        match step.checked_sub(1) {
            None => ' ',
            Some(step) => BARS[step.min(BARS.len() - 1)],
        }
    };
    last.into_iter().rev().map(bar).collect()
}

impl TopView {
    pub(super) fn draw(&self, frame: &mut Frame<'_>) {
        let areas = Layout::vertical([
            Constraint::Length(1),
            Constraint::Length(GRAPH_HEIGHT),
            Constraint::Min(2),
            Constraint::Length(1),
        ]);
        let [head, graph, table, foot] = areas.areas(frame.area());
        frame.render_widget(Line::from(self.header_text()).style(Modifier::BOLD), head);
        self.draw_graph(frame, graph);
        self.draw_table(frame, table);
        frame.render_widget(Line::from(KEY_HELP).style(Modifier::DIM), foot);
    }

    fn header_text(&self) -> String {
        let mut head = "nvme-mpt".to_owned();
        if let Some(now) = &self.current {
            let connected = now.stats.functions.iter();
            let connected = connected.filter(|function| function.connected).count();
            head += &format!(
                "  {:.0}  {} functions, {connected} with a VMM",
                now.time,
                now.stats.functions.len()
            );
            if now.stats.supervisor == SupervisorStatus::Ended {
                head += ", supervisor has ended";
            }
            if !now.stats.failed.is_empty() {
                head += &format!(", {} failed", now.stats.failed.len());
            }
        }
        if self.is_paused {
            head += "  PAUSED";
        }
        match &self.sample_error {
            Some(failure) => failure.replace('\n', ";"),
            None => head,
        }
    }

    /// Returns the number of processors that pollers use; `None` before the second sample.
    fn pollers_text(&self) -> Option<String> {
        let busy = self.poller_seconds(|poller| poller.busy_seconds)?;
        let awake = self.poller_seconds(|poller| poller.life_seconds - poller.parked_seconds)?;
        Some(format!(
            " pollers: {busy:.2} processors busy, {:.2} spinning ",
            (awake - busy).max(0.0)
        ))
    }

    /// Returns the time that all pollers together spent on `of` between the last two samples, divided by the time between the
    /// samples. So 1.0 is one fully used processor.
    fn poller_seconds(&self, of: fn(&nvme_guest::stats::PollerStats) -> f64) -> Option<f64> {
        let (before, now) = (self.previous.as_ref()?, self.current.as_ref()?);
        let time = now.stats.pollers.iter().map(|poller| {
            let mut earlier = before.stats.pollers.iter();
            let earlier = earlier.find(|earlier| earlier.name == poller.name);
            (of(poller) - earlier.map_or(0.0, of)).max(0.0)
        });
        // Unlike `fold`, `sum` of an empty iterator would be -0.
        Some(time.fold(0.0, |sum, time| sum + time) / self.elapsed_seconds()?)
    }

    fn draw_graph(&self, frame: &mut Frame<'_>, area: Rect) {
        let last = self.total.back().copied().unwrap_or(0);
        let most = self.total.iter().max().copied().unwrap_or(0);
        let (read, written) = self.rows.iter().fold((0.0, 0.0), |(read, written), row| {
            (read + row.read, written + row.written)
        });
        let title = format!(
            " {} IOPS, at most {}; {}B/s read, {}B/s written ",
            PrefixedNumber(last as f64),
            PrefixedNumber(most as f64),
            PrefixedNumber(read),
            PrefixedNumber(written)
        );
        // Align the newest value to the right.
        let width = usize::from(area.width.saturating_sub(2));
        let shown = self.total.len().min(width);
        let padding = std::iter::repeat_n(0, width - shown);
        let values = self.total.iter().skip(self.total.len() - shown).copied();
        let values: Vec<u64> = padding.chain(values).collect();
        let pollers = self.pollers_text().unwrap_or_default();
        let block = Block::bordered().title(title).title_bottom(pollers);
        let graph = Sparkline::default().data(&values).block(block);
        frame.render_widget(graph, area);
    }

    /// Returns the width of a column. In the narrow form (`spacing` of 1), only the sorted column has space for the mark of the
    /// sort order.
    fn column_width(&self, column: TopColumn, spacing: u16) -> u16 {
        let cells = self
            .rows
            .iter()
            .map(|row| row.format_cell(column).chars().count());
        let has_mark = spacing > 1 || column == self.sort;
        let title = column.title().len() + usize::from(has_mark);
        cells.max().unwrap_or(0).max(title) as u16
    }

    fn table_width(&self, columns: &[TopColumn], spacing: u16) -> u16 {
        let widths = columns
            .iter()
            .map(|column| self.column_width(*column, spacing) + spacing);
        widths.sum::<u16>().saturating_sub(spacing)
    }

    /// Returns the columns that fit into `width`, and the blanks between them. On a narrow screen, columns stand closer
    /// together. Then those of [`OMITTED`] are left out, but never the sorted one.
    fn columns_within(&self, width: u16) -> (Vec<TopColumn>, u16) {
        let mut columns = TopColumn::value_variants().to_vec();
        if self.table_width(&columns, 2) <= width {
            return (columns, 2);
        }
        for omitted in OMITTED {
            if self.table_width(&columns, 1) <= width {
                break;
            }
            columns.retain(|column| *column != omitted || omitted == self.sort);
        }
        (columns, 1)
    }

    fn draw_table(&self, frame: &mut Frame<'_>, area: Rect) {
        let (columns, spacing) = self.columns_within(area.width);
        let is_text = |column: TopColumn| matches!(column, TopColumn::Name | TopColumn::State);
        let used = self.table_width(&columns, spacing);
        // On a narrow screen, there is no history.
        let has_history = area.width >= used + spacing + HISTORY_TITLE.len() as u16;
        let titles = columns.iter().map(|column| {
            let mark = match (*column == self.sort, self.is_reversed) {
                (false, _) => "",
                (true, false) => "▼",
                (true, true) => "▲",
            };
            let title = Line::from(format!("{}{mark}", column.title()));
            Cell::from(if is_text(*column) {
                title
            } else {
                title.right_aligned()
            })
        });
        let titles = titles.chain(has_history.then(|| Cell::from(HISTORY_TITLE)));
        let rows = self.rows.iter().skip(self.first_row).map(|row| {
            let cells = columns.iter().map(|column| {
                let cell = Line::from(row.format_cell(*column));
                Cell::from(if is_text(*column) {
                    cell
                } else {
                    cell.right_aligned()
                })
            });
            let history = self.history.get(&row.name);
            let history = history.map_or(String::new(), |history| bars(history.iter()));
            TableRow::new(cells.chain(has_history.then(|| Cell::from(history))))
        });
        let widths = columns
            .iter()
            .map(|column| Constraint::Length(self.column_width(*column, spacing)));
        let widths = widths.chain(has_history.then_some(Constraint::Fill(1)));
        let style = Style::new().add_modifier(Modifier::REVERSED);
        let table = Table::new(rows, widths)
            .header(TableRow::new(titles).style(style))
            .column_spacing(spacing);
        frame.render_widget(table, area);
        if self.rows.is_empty() {
            let what = match (self.elapsed_seconds(), self.subject) {
                (None, _) => "Counting …",
                (_, TopSubject::Functions) => "The server has no functions",
                (_, TopSubject::Drives) => "The server has no drives open",
            };
            let below = Rect {
                y: area.y + 1,
                height: 1.min(area.height.saturating_sub(1)),
                ..area
            };
            frame.render_widget(Line::from(what), below);
        }
    }
}
