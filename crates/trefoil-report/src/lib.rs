//! What Trefoil shows: aligned and Markdown tables, a self-contained HTML report, and Chrome traces.
//!
//! Pure functions from the vocabulary of [`trefoil_core`] and small plain rows ([`rows`]) to text. Honesty is built in:
//! a number carries its [`Origin`](trefoil_core::Origin), and the renderers put the origin's word into the heading or the
//! cell; parts that are listed beside a total add up to it, with an `other` row for what nobody recorded.

pub mod chrome;
pub mod collect;
pub mod format;
pub mod html;
pub mod picture;
pub mod planned;
pub mod rows;
pub mod table;
pub mod tables;
pub mod totals;

pub use chrome::{TraceCheckError, TraceMeta, check_chrome_trace, chrome_trace};
pub use collect::{HeatCell, HeatRow, HeatTable, OperatorRow, UnitTotal, operator_rows, unit_totals};
pub use html::pairs::{PairRow, PairsInput, geometric_mean, pairs_csv, pairs_html};
pub use html::{ModelReport, ReportInput, html};
pub use picture::{PictureError, pairs_png};
pub use planned::{PlanSummary, SegmentRow, TaskDetail, TransferRow, segment_rows, task_details, transfer_rows};
pub use rows::{ContenderKind, ContenderRow, MemoryRow, ModelRow, Ratio, UnitRow, Verdict, VerdictKind};
pub use table::{Table, TableFormat, TableFormatError};
pub use tables::{
    contenders_table, memory_table, model_table, operators_table, plan_table, profile_table, summary_table, text_table,
    totals_table, transfers_table, unit_totals_table, units_table,
};
pub use totals::{TotalRow, Totals, lane_origin, timeline_origin};
