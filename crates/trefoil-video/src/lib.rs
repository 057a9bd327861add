//! Video diffusion of the Wan2.1 family: transformer, experts and sampler, text encoder, VAE decoder, engines and streams.
//!
//! [`pack_video`] turns a checkpoint ([`checkpoint`]) into an artefact; [`Model`] opens it. A [`Clip`] is a prompt and a starting
//! latent; [`denoise()`] carries its [`ClipState`] along the flattened [`Trajectory`] on one [`Lane`] or, cut anywhere, on two.
//! Lanes are [`engine`]s with the CPU work around their blocks, on a [`NumericPath`] of their own each.

pub mod calibrate;
pub mod checkpoint;
pub mod config;
pub mod denoise;
pub mod dit;
pub mod engine;
mod error;
pub mod job;
pub mod model;
pub mod noise;
pub mod output;
pub mod pack;
pub mod process;
pub mod quality;
pub mod rates;
pub mod sampler;
pub mod schedule;
pub mod stream;
pub mod synthetic;
pub mod tensors;
pub mod text;
mod threads;
pub mod vae;

pub use calibrate::{Calibration, CalibrationClip};
pub use config::DitConfig;
pub use denoise::{Clip, ClipState, DenoiseReport, Event, Handoff, Lane, MAX_TOKENS, denoise};
pub use dit::NumericPath;
pub use engine::{Engine, EngineSpec};
pub use error::VideoError;
pub use model::Model;
pub use pack::{VideoPackOptions, open_reference, pack_video};
pub use sampler::Sampler;
pub use schedule::Trajectory;
pub use tensors::{Tensor, TensorPath};
