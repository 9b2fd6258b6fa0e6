//! Axis of values.

use plotters::coord::combinators::{IntoLogRange, LogCoord};
use plotters::coord::ranged1d::Ranged;
use plotters::coord::types::RangedCoordf64;

use figure_data::FigurePanel;

/// Maximum number of marks on a linear axis.
const MARKS: usize = 8;

/// Mapping of values to pixels.
pub(super) enum ValueScale {
    Linear(RangedCoordf64),
    Logarithmic(LogCoord<f64>),
}

impl ValueScale {
    /// Returns the scale for all values of a panel. A linear scale includes zero.
    pub(super) fn for_panel(panel: &FigurePanel) -> Self {
        let points = panel.series.iter().flat_map(|series| &series.points);
        let ranges: Vec<(f64, f64)> = points.filter_map(|point| point.range()).collect();
        let least = ranges
            .iter()
            .map(|range| range.0)
            .fold(f64::INFINITY, f64::min);
        let most = ranges
            .iter()
            .map(|range| range.1)
            .fold(f64::NEG_INFINITY, f64::max);
        if panel.log {
            // The axis starts below the lowest value, so that its bar has a length, too.
            let start = 10_f64.powf((least * 0.8).log10().floor());
            let end = (most * 1.05).max(start * 10.0);
            return Self::Logarithmic((start..end).log_scale().into());
        }
        let (start, mut end) = (least.min(0.0), most.max(0.0) * 1.05);
        if start >= end {
            end = start + 1.0;
        }
        Self::Linear((start..end).into())
    }

    /// Returns the position of a value, in pixels.
    pub(super) fn map(&self, value: f64, pixels: (i32, i32)) -> i32 {
        match self {
            Self::Linear(scale) => scale.map(&value, pixels),
            Self::Logarithmic(scale) => scale.map(&value, pixels),
        }
    }

    /// Returns the value at which bars start.
    pub(super) fn base(&self) -> f64 {
        match self {
            Self::Linear(_) => 0.0,
            Self::Logarithmic(scale) => scale.range().start,
        }
    }

    /// Returns the values at which the axis has marks. A logarithmic axis has marks at powers of ten; if these are few,
    /// also at multiples of them.
    pub(super) fn marks(&self) -> Vec<f64> {
        let range = match self {
            Self::Linear(scale) => return scale.key_points(MARKS),
            Self::Logarithmic(scale) => scale.range(),
        };
        let exponents = range.start.log10().round() as i32..=range.end.log10().floor() as i32;
        let is_few = exponents.clone().count() <= 3;
        let parts: &[f64] = if is_few { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let marks = exponents.flat_map(|exponent| {
            let power = 10_f64.powi(exponent);
            parts.iter().map(move |part| part * power)
        });
        marks.filter(|mark| *mark <= range.end).collect()
    }
}
