//! Video diffusion of the Wan2.1 family: transformer, experts and sampler, text encoder, VAE decoder, engines and streams.

pub mod output;
pub mod quality;
pub mod text;
pub mod vae;
