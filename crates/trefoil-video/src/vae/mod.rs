//! The VAE decoder: latents to video frames (Wan2.1's causal 3-D VAE), one latent frame at a time.
//!
//! [`VaeDecoder::open`] reads a checkpoint, [`VaeDecoder::session`] starts a clip, [`DecoderSession::push`] decodes one latent
//! frame. No step needs a 3-D convolution: a causal one is a 2-D convolution over the frame and the two before it, which the
//! session remembers. [`VaeDecoder::memory`] says beforehand what a clip of a size takes.

mod bands;
mod build;
mod compute;
mod config;
mod decoder;
mod error;
mod latent;
mod layers;
mod load;
mod map;
mod session;
mod streamed;
mod tiles;

pub use compute::DecoderKernels;
pub use config::VaeConfig;
pub use decoder::{DecoderPath, VaeDecoder};
pub use error::VaeError;
pub use latent::Latent;
pub use load::Layout;
pub use session::{DecoderMemory, DecoderSession};
pub use tiles::TileLayout;

use crate::output::VideoFrame;

impl VaeDecoder {
    /// Decodes a whole clip. `latent` is as the decoder takes it ([`Latent::denormalise`]).
    ///
    /// # Errors
    /// A latent that does not fit the VAE.
    pub fn decode<'k>(
        &self,
        kernels: impl Into<DecoderKernels<'k>>,
        latent: &Latent,
    ) -> Result<Vec<VideoFrame>, VaeError> {
        let mut frames = Vec::with_capacity(self.config().frames(latent.frames()));
        self.decode_clip(kernels, latent, &mut |_| Ok(()), &mut |frame| {
            frames.push(frame);
            Ok::<(), VaeError>(())
        })?;
        Ok(frames)
    }
}
