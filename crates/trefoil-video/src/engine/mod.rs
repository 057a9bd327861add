//! Engines: units whose tasks are runs of blocks (DESIGN 7).
//!
//! An engine computes blocks and nothing else; patch embedding, head and sampler update run on the CPU in place
//! ([`crate::dit::Host`]). What an engine needs besides weights is in the [`Clip`], what it changes is the hidden state, so an
//! implementation on a device or in another process maps both and needs nothing else from here.

mod cpu;
mod decoding;
mod opencl;
mod shaped;
mod spec;

pub use cpu::CpuEngine;
pub use decoding::{DecoderEngine, EngineDecoder, OnCores};
pub use opencl::{HeteroTensorEngine, OpenClEngine, WeightBuffers, choose_device, is_on_cores};
pub use shaped::{Shape, ShapedEngine, stand_in};
pub use spec::{EngineKind, EngineList, EngineSpec, allowed_cores, parse_engines};

use crate::denoise::Clip;
use crate::schedule::Piece;
use crate::{NumericPath, VideoError};

/// What runs blocks.
pub trait Engine: Send {
    /// Its address, like `cpu@0`.
    fn name(&self) -> &str;

    /// Numeric path.
    fn path(&self) -> NumericPath;

    /// CPU cores that it keeps busy or waits on; no two engines that run at once share one.
    fn cores(&self) -> &[usize];

    /// Runs the blocks of `piece` in order, in place on `hidden` (tokens × d, f32).
    ///
    /// Between calls the state is complete: any engine may go on from it. The result must not depend on how blocks are grouped into
    /// calls.
    ///
    /// # Errors
    /// What the engine cannot compute; `hidden` is then unspecified.
    fn run_blocks(&mut self, clip: &Clip, piece: &Piece, hidden: &mut [f32]) -> Result<(), VideoError>;

    /// Bytes that it holds beside weights and the state given to it (scratch, packed operands, a state of its own).
    fn scratch_bytes(&self) -> usize;

    /// Exchanges between units inside the engine so far, and the bytes that crossed; none in an engine of one unit.
    fn exchanges(&self) -> (usize, usize) {
        (0, 0)
    }

    /// What a reader of its results should know about where they come from, such as the device.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }
}
