//! Measures an operator graph on units and writes the profile that planners read.
//!
//! 1. [`prepare_model`] fixes shapes, runs the model once on a reference backend with every value as an output (the
//!    **traced run**), and keeps shapes, sample data and reference values in the cache ([`cache`]).
//! 2. [`profile()`] measures each distinct operator on each unit at its real shapes with its real data, compares what it
//!    computes with the trace, and adds whole models, in-situ node times, transfers, slowdowns and power.
//! 3. [`measure_segments`] measures convex sets of operators whole; [`refine`] does so for what a planner proposes,
//!    until its plan is all measured, and has that plan timed as it will be run ([`Lineup`]).
//!
//! All compiling and running happens in worker processes ([`worker_main`], [`protocol`]), so that a crash, a hang or a
//! memory blow-up is a record in the profile. Finished measurements go to a journal at once: an interrupted profile
//! resumes, and other models with the same operators need not measure them again.

mod backend_groups;
pub mod cache;
mod client;
mod clock;
mod corun;
mod error;
pub mod file;
mod journal;
mod options;
mod pairs;
mod power;
mod prepare;
mod probe;
mod profiler;
pub mod protocol;
mod refine;
pub mod sample_data;
pub mod sampling;
mod session;
mod settle;
mod simulated;
mod store;
pub mod tolerance;
mod trace;
mod typing;
mod worker;

pub use client::{CallError, Launcher, WORKER_VARIABLE, WorkerSlot};
pub use clock::now_utc;
pub use corun::{CoRunning, CoRuns, append_measurements};
pub use error::ProfileError;
pub use file::{check_machine, load_profile, save_profile};
pub use options::{ProfileOptions, Progress};
pub use power::power_is_metered;
pub use prepare::{PrepareOptions, PreparedModel, Reference, prepare_model};
pub use profiler::profile;
pub use refine::{Audit, Refinement, Round, measure_segments, refine};
pub use settle::{Lineup, LineupTimer, LineupTimes, Remeasured, remeasure, settle_whole};
pub use store::{StoreWriter, TraceStore};
pub use worker::{MISBEHAVE_VARIABLE, worker_main};
