//! What the profiler and its worker processes say to each other: JSON, one message a line, over stdin and stdout.
//!
//! 1. The worker starts with one [`Hello`] line: `{"trefoil_worker":2,"pid":4711}`.
//! 2. The parent writes [`Request`] lines: `{"id":7,"job":{"do":"measure",…}}`.
//! 3. The worker answers each with one [`Reply`] line of the same id: `{"id":7,"answer":{"got":"measured",…}}`, or
//!    `{"id":7,"failure":{"stage":"compile","reason":"…"}}`. Requests are served in order, one at a time.
//! 4. End of file on stdin ends the worker. So does the death of its parent.
//!
//! Tensors never travel in messages: inputs, references and traced outputs lie in tensor stores
//! ([`crate::TraceStore`]), which messages name by folder. Whatever libraries print goes to stderr, because the worker
//! moves the protocol to a private copy of file descriptor 1 before it touches a backend.

use crate::tolerance::{Deviation, Leniency};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use trefoil_core::{NodeTime, Samples, Timing, Unit};
use trefoil_units::{CompileOptions, SubModel};

/// Version of this protocol; parent and worker must agree.
pub const PROTOCOL_VERSION: u32 = 2;

/// First line of a worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL_VERSION`] of the worker.
    pub trefoil_worker: u32,
    /// Process id.
    pub pid: u32,
}

/// One line to a worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Request {
    /// Repeated in the reply.
    pub id: u64,
    /// What to do.
    pub job: Job,
}

/// One line from a worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Reply {
    /// Id of the request.
    pub id: u64,
    /// What came of it, if it went well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<Answer>,
    /// Why it did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<Failure>,
}

/// Why a job has no answer; becomes [`trefoil_core::Outcome::Failed`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Where: `extract`, `compile`, `bind`, `run`, `crash`, `timeout`, `limit`.
    pub stage: String,
    /// One line.
    pub reason: String,
}

impl Failure {
    /// From its parts; the reason is folded into one line.
    pub fn new(stage: &str, reason: &str) -> Self {
        Self { stage: stage.to_owned(), reason: trefoil_units::one_line(reason) }
    }
}

/// How many samples to take, and in how many batches.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// Executions before the first sample (fewer if they alone would use up the cap; at least one).
    pub warmup: u32,
    /// Samples over all batches.
    pub runs: u32,
    /// Batches that the samples are split into; see [`crate::sampling`].
    pub batches: u32,
    /// Wall-clock cap of one measurement in milliseconds.
    pub cap_ms: f64,
}

/// A sub-model to run on a unit, with the data to run it on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Item {
    /// What to compile.
    pub model: SubModel,
    /// Where.
    pub unit: Unit,
    /// How.
    pub options: CompileOptions,
    /// Tensor stores that hold its inputs and reference outputs by name; the first that has a name wins.
    pub stores: Vec<PathBuf>,
    /// How far outputs may be from the reference; `None` does not compare.
    pub compare: Option<Leniency>,
    /// Name under which the worker keeps the compiled sub-model for later jobs; `None` drops it after the job.
    pub keep: Option<String>,
}

/// What a worker can do.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub enum Job {
    /// Answer [`Answer::Done`].
    Ping,
    /// Run an item once and write its outputs into a store.
    Evaluate {
        /// The item.
        item: Item,
        /// Folder of the store to write; must not exist.
        into: PathBuf,
    },
    /// Compile, check and time items. Several items are timed in alternating batches in this one process.
    Measure {
        /// The items.
        items: Vec<Item>,
        /// Samples per item.
        sampling: Sampling,
    },
    /// Compile one item with the backend's profiling on and report its nodes' times.
    NodeTimes {
        /// The item.
        item: Item,
        /// Executions, about; fewer if they take longer than the cap.
        runs: u32,
        /// Wall-clock cap in milliseconds, about.
        cap_ms: f64,
    },
    /// Hand a buffer back and forth between two units.
    Transfer {
        /// A trivial operator over the tensor, compiled for the first unit.
        first: Item,
        /// The same operator for the second unit.
        second: Item,
        /// Samples per direction.
        sampling: Sampling,
    },
    /// Time the first item alone and while the second loops on another unit.
    Slowdown {
        /// The item that is timed.
        slowed: Item,
        /// The item that interferes.
        interfering: Item,
        /// Samples alone and samples together.
        sampling: Sampling,
    },
    /// Loop one item for a while and read the power meters before and after. Without an item: sleep.
    Load {
        /// The item.
        item: Option<Item>,
        /// For how long.
        seconds: f64,
    },
    /// Time a fixed spin loop, to tell how quiet the machine is.
    Spin {
        /// Samples.
        runs: u32,
    },
    /// Misbehave on purpose. Refused unless `TREFOIL_WORKER_MISBEHAVE` is set: it exists for tests.
    Misbehave {
        /// `abort`, `hang`, `garbage`, `exit`, `allocate` or `chatter`.
        how: String,
    },
}

/// What came of one item.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ItemResult {
    /// Time parts.
    pub timing: Timing,
    /// Comparison with the reference, if one was asked for and anything could be compared.
    pub deviation: Option<Deviation>,
    /// Whether the last execution gave the same bytes as the first.
    pub repeatable: bool,
}

/// One item's fate: exactly one of the two is set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ItemAnswer {
    /// It ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<ItemResult>,
    /// It did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<Failure>,
}

impl ItemAnswer {
    /// As a `Result`.
    pub fn into_result(self) -> Result<ItemResult, Failure> {
        match (self.result, self.failure) {
            (Some(result), _) => Ok(result),
            (None, Some(failure)) => Err(failure),
            (None, None) => Err(Failure::new("run", "the worker said nothing about this item")),
        }
    }
}

impl From<Result<ItemResult, Failure>> for ItemAnswer {
    fn from(result: Result<ItemResult, Failure>) -> Self {
        match result {
            Ok(result) => Self { result: Some(result), failure: None },
            Err(failure) => Self { result: None, failure: Some(failure) },
        }
    }
}

/// What a worker answers.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "got", rename_all = "kebab-case")]
pub enum Answer {
    /// Nothing to tell.
    Done,
    /// [`Job::Evaluate`] wrote the store.
    Evaluated,
    /// [`Job::Measure`]: one entry per item, in order.
    Measured {
        /// Per item.
        items: Vec<ItemAnswer>,
    },
    /// [`Job::NodeTimes`]; `None` when the backend reports none.
    Nodes {
        /// Nodes in the backend's order.
        nodes: Option<Vec<NodeTime>>,
    },
    /// [`Job::Transfer`]: extra milliseconds of a hand-over, never below 0.
    Transferred {
        /// From the first unit to the second.
        forward: Samples,
        /// From the second unit to the first.
        backward: Samples,
    },
    /// [`Job::Slowdown`]: time together over time alone.
    Slowed {
        /// The factor.
        factor: Samples,
    },
    /// [`Job::Load`] ended.
    Loaded {
        /// Executions done.
        executions: u64,
        /// For how long, in seconds.
        seconds: f64,
        /// Mean package power meanwhile, if a meter could be read.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        watts: Option<f64>,
    },
    /// [`Job::Spin`]: milliseconds of the loop.
    Spun {
        /// The samples.
        samples: Samples,
    },
}
