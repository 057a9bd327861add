//! Video diffusion of the Wan2.1 family: transformer, experts and sampler, text encoder, VAE decoder, engines and streams.
