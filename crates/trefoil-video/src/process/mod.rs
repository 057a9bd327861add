//! Engines in processes of their own: descriptors are passed, never weights (DESIGN 6, 7).
//!
//! The owner starts one worker per engine with a Unix-domain socket as its standard input, and hands it the block regions of every
//! artefact and the clip's **slot** ([`slot`]) as descriptors ([`trefoil_weights::share`]). All processes map the same pages: one copy of
//! the weights, one copy of the state. Then orders and replies are short messages:
//!
//! | owner → worker | worker → owner |
//! |---|---|
//! | `setup`: engine, path, artefacts, sampler, scales, sizes | `ready` with notes, or `failed` with a line |
//! | `run`: which state, from which execution to which | `blocks` and `step` as it goes, then `done` |
//!
//! | `clip`: a clip's conditions, as a region | `taken` |
//! | `blocks`: which | `ran`, the hidden state changed in place |
//!
//! A worker **carries a clip** (`run`: host work included, [`denoise_in_workers`]) or **is an engine** (`clip` and `blocks`:
//! [`ProcessEngine`], for streams, where the owner's lanes do the host work and decide what runs next).
//!
//! The slot of a carried clip holds the state twice. A run reads one and writes the other at its end, so a worker that is killed at any moment leaves the
//! state before its run whole: the owner starts another and gives it the same order, with the same result. The owner of an engine keeps
//! the hidden state itself until a piece is done, so it can give the same piece to another process too.

mod channel;
mod engine;
mod owner;
pub mod slot;
mod start;
mod worker;

pub use engine::{Death, ProcessEngine, ProcessStatus};
pub use owner::{SharedModel, Worker, WorkerCommand, WorkerEvent, WorkerSetup, denoise_in_workers};
pub use worker::worker_main;

use crate::denoise::ClipOutline;
use crate::sampler::Sampler;
use crate::{NumericPath, VideoError};
use serde::{Deserialize, Serialize};
use slot::{SlotLayout, StateMark};
use std::path::PathBuf;

/// Version of the messages; both sides are the same program.
const PROTOCOL: u32 = 3;

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
    /// Of the clip to carry; absent where the worker is an engine.
    slot: Option<SlotLayout>,
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
    /// Conditions of the clip that the next blocks belong to; their region follows.
    Clip(ClipOutline),
    /// Blocks to run on the hidden state in the clip's region.
    Blocks {
        step: usize,
        branch: usize,
        first: usize,
        end: usize,
    },
}

/// Worker → owner.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Reply {
    /// It is set up; what a reader of its results should know.
    Ready {
        notes: Vec<String>,
    },
    Taken,
    Blocks {
        done: usize,
        ms: f64,
    },
    Step {
        step: usize,
    },
    Done {
        mark: StateMark,
    },
    Ran,
    Failed {
        message: String,
    },
}

/// A message that the other side should not have sent.
fn unexpected(engine: &str, what: &str) -> VideoError {
    VideoError::Engine { engine: engine.to_string(), reason: format!("its process answered {what} out of turn") }
}
