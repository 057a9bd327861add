//! Several models on one machine: executed together, verified, and compared with what everybody does.
//!
//! * [`Rounds`] and [`closed_loop`]: one inference (or several) of every model, again and again.
//! * [`Server`]: requests at fixed rates, with priorities and deadlines.
//! * [`adapting_loop`]: rounds on an arrangement that changes when a unit becomes slow or fails.
//! * [`contest`]: arrangements against each other in fresh processes, interleaved; [`crate::guard()`] decides between them.

mod adapt;
mod contest;
mod latencies;
mod linked;
mod rounds;
mod serve;
mod slowdown;
mod split;
mod watch;
mod worker;

pub use adapt::{AdaptReport, AdaptRule, Adaptation, Compiling, Situation, adapting_loop};
pub use contest::{Contest, ContestOptions, Entrant, EntrantResult, Measure, ProcessFigures, contest, slowdown};
pub use latencies::{Latencies, LatencySummary};
pub use linked::sequential_outputs;
pub use rounds::{Equality, LoopLimit, LoopMeter, LoopReport, Outputs, Rounds, closed_loop, solo_outputs};
pub use serve::{Arrivals, ServeOptions, ServeReport, Server, StreamReport};
pub use slowdown::SlowdownReport;
pub use watch::{Watch, WatchRule};
pub use worker::{Activity, TOGETHER_VERSION, TogetherJob, TogetherResult, run_together_worker_main};

use serde::{Deserialize, Serialize};
use trefoil_core::{HostTensor, Plan};

/// Inputs of one model, by name.
pub type ModelInputs<'a> = Vec<&'a HostTensor>;

/// How several models share the machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Arrangement {
    /// Where each inference runs.
    pub plan: Plan,
    /// Whether the plan's order is kept. Otherwise every model runs whenever it can, beside all others.
    pub ordered: bool,
}
