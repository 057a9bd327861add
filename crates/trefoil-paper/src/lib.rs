//! Recomputes what the published numbers of the two papers give, and puts it beside what they print.
//!
//! Published numbers are data (`data/*.json`), each with its place in the paper; a printed number stands for every number
//! that prints like it ([`Interval`]). [`heterovdiff`](heterovdiff::report) recomputes cuts, idle times, throughput and memory
//! from the paper's rates. [`bident`](bident::report) plans the ten model families and their 190 pairs on the simulated machine
//! `sim:lunar-lake`, with the cap that no pair search can pass beside each result.

pub mod bident;
pub mod heterovdiff;
mod interval;
mod report;

pub use interval::Interval;
pub use report::{PaperReport, Published, PublishedNumbers, Relation, Row, Section, Verdict};

use thiserror::Error;

/// What can go wrong.
#[derive(Debug, Error)]
pub enum PaperError {
    /// A data file of this crate is at fault.
    #[error("the published numbers are damaged: {reason}")]
    Data {
        /// What is wrong.
        reason: String,
    },
    /// Planning.
    #[error(transparent)]
    Plan(#[from] trefoil_plan::PlanError),
    /// The simulated machine.
    #[error(transparent)]
    Unit(#[from] trefoil_units::UnitError),
    /// A graph.
    #[error(transparent)]
    Core(#[from] trefoil_core::CoreError),
}
