//! Engines in processes of their own: descriptors are passed, never weights (DESIGN 6, 7).
//!
//! The owner starts one worker per engine with a Unix-domain socket as its standard input, and hands it the block regions of every
//! artefact and the clip's **slot** ([`slot`]) as descriptors ([`trefoil_weights::share`]). All processes map the same pages: one copy of
//! the weights, one copy of the state. Then orders and replies are short messages:
//!
//! | owner → worker | worker → owner |
//! |---|---|
//! | `setup`: engine, path, artefacts, sampler, scales, sizes | `ready`, or `failed` with a line |
//! | `run`: which state, from which execution to which | `blocks` and `step` as it goes, then `done` |
//!
//! The slot holds the state twice. A run reads one and writes the other at its end, so a worker that is killed at any moment leaves the
//! state before its run whole: the owner starts another and gives it the same order, with the same result.

mod channel;
mod owner;
pub mod slot;
mod worker;

pub use owner::{Worker, WorkerCommand, WorkerEvent, WorkerSetup, denoise_in_workers};
pub use worker::worker_main;

use crate::sampler::Sampler;
use crate::{NumericPath, VideoError};
use serde::{Deserialize, Serialize};
use slot::{SlotLayout, StateMark};
use std::path::PathBuf;

/// Version of the messages; both sides are the same program.
const PROTOCOL: u32 = 1;

/// What a worker must know before it runs anything.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Setup {
    protocol: u32,
    /// Engine as written on the command line.
    engine: String,
    path: NumericPath,
    /// One artefact, or the two of a joined model.
    artefacts: Vec<PathBuf>,
    /// Where `f32` finds the weights; the note beside the artefact where absent.
    checkpoint: Option<PathBuf>,
    sampler: Sampler,
    calibration: Option<crate::calibrate::CalibrationBits>,
    slot: SlotLayout,
}

/// Owner → worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Order {
    Setup(Box<Setup>),
    Run {
        /// Which of the two states to read; the other is written.
        state: usize,
        mark: StateMark,
        until: usize,
    },
}

/// Worker → owner.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Reply {
    Ready,
    Blocks { done: usize, ms: f64 },
    Step { step: usize },
    Done { mark: StateMark },
    Failed { message: String },
}

/// A message that the other side should not have sent.
fn unexpected(engine: &str, what: &str) -> VideoError {
    VideoError::Engine { engine: engine.to_string(), reason: format!("its process answered {what} out of turn") }
}
