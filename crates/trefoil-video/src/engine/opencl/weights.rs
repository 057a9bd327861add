//! Weights on a device as they lie: a buffer over each piece of memory that the model's weights are in, and nothing converted.

use crate::VideoError;
use crate::model::Model;
use crate::model::views::tiled;
use std::cell::OnceCell;
use std::ptr::NonNull;
use std::sync::Arc;
use trefoil_kernels::FloatWeights;
use trefoil_kernels::opencl::{Buffer, HostMemory, Kernels, Tiled, Vector};

/// Buffers over a model's weights. A device gets to know a piece of memory (a block's region, a section) when it is first used.
#[derive(Debug)]
pub struct WeightBuffers {
    kernels: Arc<Kernels>,
    /// By address.
    pieces: Vec<Piece>,
}

/// The same memory as codes and as floats.
type PieceBuffers = (Buffer<i8>, Buffer<f32>);

#[derive(Debug)]
struct Piece {
    memory: Arc<Mapped>,
    /// The same memory as codes and as floats.
    buffers: OnceCell<PieceBuffers>,
}

/// A piece of a model's mapping.
struct Mapped {
    pointer: NonNull<u8>,
    bytes: usize,
    /// Keeps the mapping.
    _model: Arc<Model>,
}

impl std::fmt::Debug for Mapped {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} bytes at {:p}", self.bytes, self.pointer)
    }
}

impl Mapped {
    fn address(&self) -> usize {
        self.pointer.addr().get()
    }
}

// SAFETY: memory that nobody writes may be read from any thread.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

// SAFETY: the pointer is into a read-only mapping that the model holds, and a model behind an `Arc` gives up none of its mappings.
unsafe impl HostMemory for Mapped {
    fn bytes(&self) -> (NonNull<u8>, usize) {
        (self.pointer, self.bytes)
    }

    fn is_writable(&self) -> bool {
        false
    }
}

impl WeightBuffers {
    /// Buffers for a packed model. Nothing is mapped yet.
    ///
    /// # Errors
    /// A region that cannot be read.
    pub fn new(kernels: &Arc<Kernels>, model: &Arc<Model>) -> Result<WeightBuffers, VideoError> {
        let mut pieces: Vec<Piece> = model
            .memory()?
            .into_iter()
            .map(|bytes| {
                let memory =
                    Mapped { pointer: NonNull::from(bytes).cast(), bytes: bytes.len(), _model: Arc::clone(model) };
                Piece { memory: Arc::new(memory), buffers: OnceCell::new() }
            })
            .collect();
        pieces.sort_unstable_by_key(|piece| piece.memory.address());
        Ok(WeightBuffers { kernels: Arc::clone(kernels), pieces })
    }

    /// A vector of the model.
    ///
    /// # Errors
    /// Values that are not the model's; memory that the device cannot use as it lies.
    pub fn floats(&self, values: &[f32]) -> Result<Vector<'_>, VideoError> {
        let ((_, floats), offset) = self.buffers(values.as_ptr().cast(), size_of_val(values))?;
        Ok(floats.slice("the values", offset / size_of::<f32>(), values.len())?)
    }

    /// A matrix of the model.
    ///
    /// # Errors
    /// As for [`WeightBuffers::floats`]; a matrix that is not quantised.
    pub fn tiled(&self, weights: &FloatWeights<'_>) -> Result<Tiled<'_>, VideoError> {
        let view = tiled(weights)?;
        let ((codes, _), first) = self.buffers(view.codes.as_ptr().cast(), view.codes.len())?;
        Ok(Tiled { shape: view.shape, codes, first, scales: self.floats(view.scales)? })
    }

    /// Pieces that the device knows by now, and their bytes.
    pub fn shared(&self) -> (usize, usize) {
        let known = self.pieces.iter().filter(|piece| piece.buffers.get().is_some());
        known.fold((0, 0), |(count, bytes), piece| (count + 1, bytes + piece.memory.bytes))
    }

    /// The buffers over the piece that `bytes` bytes at `pointer` lie in, and where in it they begin.
    fn buffers(&self, pointer: *const u8, bytes: usize) -> Result<(&PieceBuffers, usize), VideoError> {
        let address = pointer.addr();
        let behind = self.pieces.partition_point(|piece| piece.memory.address() <= address);
        let holds = |piece: &&Piece| address + bytes <= piece.memory.address() + piece.memory.bytes;
        let piece = self.pieces[..behind].last().filter(holds).ok_or_else(|| VideoError::Input {
            what: "the weights".to_string(),
            reason: "they do not lie in the artefact; pack the model with `trefoil video pack`".to_string(),
        })?;
        let buffers = if let Some(buffers) = piece.buffers.get() {
            buffers
        } else {
            let codes: Buffer<i8> = self.kernels.share(Arc::clone(&piece.memory))?;
            let floats = codes.viewed_as()?;
            piece.buffers.get_or_init(|| (codes, floats))
        };
        Ok((buffers, address - piece.memory.address()))
    }
}
