//! Filters that stay in the checkpoint's file. A wide filter of the middle and the coarsest level is 16 MB beside frames of a few, and is
//! used once for a latent frame: reading and packing it again each time costs time and spares the memory of all of them. Those of the next
//! level are used twice for a latent frame and again in every band, and are held.

use super::VaeError;
use std::sync::Arc;
use trefoil_kernels::{ConvWeights, FilterShape, Kernels, Workspace};
use trefoil_weights::FloatType;
use trefoil_weights::checkpoint::{Checkpoint, SourceTensor};

/// Which filters stay in their file, of those that are not transformed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Streaming {
    /// Weights from which on one does.
    pub(super) from: usize,
    /// Levels, coarsest first, whose filters may; those of the middle may anyway.
    pub(super) levels: usize,
}

impl Streaming {
    /// What decoders do.
    pub(super) const WIDE: Streaming = Streaming { from: 1 << 20, levels: 1 };
}

/// A filter in a file.
#[derive(Debug)]
pub(super) struct Streamed {
    checkpoint: Arc<Checkpoint>,
    tensor: SourceTensor,
    dtype: FloatType,
    shape: FilterShape,
    bias: Vec<f32>,
}

impl Streamed {
    /// The weights of a tensor whose shape and values were checked.
    pub(super) fn new(
        checkpoint: Arc<Checkpoint>,
        (tensor, dtype): (SourceTensor, FloatType),
        shape: FilterShape,
        bias: Vec<f32>,
    ) -> Streamed {
        Streamed { checkpoint, tensor, dtype, shape, bias }
    }

    pub(super) fn shape(&self) -> FilterShape {
        self.shape
    }

    /// Bytes held all the time.
    pub(super) fn bytes(&self) -> usize {
        self.bias.capacity() * size_of::<f32>()
    }

    /// Bytes of the packed filter.
    pub(super) fn packed_bytes(&self) -> usize {
        ConvWeights::direct_bytes(self.shape)
    }

    /// Bytes of scratch of each thread: what it reads at a time, and the mapping that it reads.
    pub(super) fn scratch_bytes(&self) -> usize {
        2 * ConvWeights::pack_scratch_bytes(self.shape)
    }

    /// Packs it in the memory of `old`.
    pub(super) fn pack(
        &self,
        kernels: &Kernels,
        old: Option<ConvWeights>,
        workspace: &mut Workspace,
    ) -> Result<ConvWeights, VaeError> {
        let per_output = (self.shape.elements() / self.shape.outputs * self.dtype.bytes()) as u64;
        let read = |first: usize, values: &mut [f32]| -> Result<(), VaeError> {
            let bytes = (values.len() * self.dtype.bytes()) as u64;
            let window = self.checkpoint.window(&self.tensor, first as u64 * per_output, bytes)?;
            self.dtype.decode(window.bytes(), values);
            Ok(())
        };
        kernels.pack_direct(self.shape, &self.bias, old, read, workspace)
    }
}

#[cfg(test)]
mod tests {
    use super::Streaming;
    use crate::synthetic::write_vae_decoder;
    use crate::vae::compute::Target;
    use crate::vae::{DecoderPath, Latent, VaeConfig, VaeDecoder, VaeError};
    use std::path::Path;
    use trefoil_kernels::{ConvWeights, FilterShape, Isa, Kernels, Pool};
    use trefoil_weights::checkpoint::Checkpoint;

    /// A small decoder written into the folder, all its filters in memory, and all of them left in their file.
    fn held_and_streamed(folder: &Path) -> (VaeDecoder, VaeDecoder) {
        let config = VaeConfig {
            base_dim: 16,
            dim_mult: vec![1, 2],
            num_res_blocks: 1,
            temporal_downsample: vec![true],
            ..VaeConfig::default()
        };
        write_vae_decoder(folder, &config, 1).unwrap();
        let checkpoint = Checkpoint::open(folder, &[]).unwrap();
        let load = |from: usize| {
            let target = (Target::Cpu, Streaming { from, levels: usize::MAX });
            VaeDecoder::load_streaming(&checkpoint, config.clone(), (folder, DecoderPath::F32), target).unwrap()
        };
        (load(usize::MAX), load(0))
    }

    #[test]
    fn a_checkpoint_that_is_written_to_is_noticed_at_the_end_of_the_clip() {
        let folder = tempfile::tempdir().unwrap();
        let (resident, streamed) = held_and_streamed(folder.path());
        let path = folder.path().join("diffusion_pytorch_model.safetensors");
        let latent = Latent::new(16, 2, 1, 8, (0..16 * 16).map(|n| n as f32 / 300.0).collect()).unwrap();
        let kernels = Kernels::new(Isa::Scalar, Pool::on_caller()).unwrap();
        let decode = |decoder: &VaeDecoder, bands: usize, change: &dyn Fn()| {
            // The change comes while the last latent frame is decoded.
            let mut before = |frame: usize| {
                if frame == 1 {
                    change();
                }
                Ok::<(), VaeError>(())
            };
            decoder.decode_in_bands(&kernels, &latent, bands, &mut before, &mut |_| Ok(()))
        };
        let writer = std::fs::File::options().write(true).open(&path).unwrap();
        let touch = |seconds: u64| {
            writer.set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds)).unwrap();
        };
        decode(&streamed, 2, &|| ()).unwrap();
        let want = format!(
            "{} was written to while it was read; leave it as it is until the command ends, and start again",
            path.display()
        );
        for bands in [1, 2] {
            assert_eq!(decode(&streamed, bands, &|| touch(5)).unwrap_err().to_string(), want);
        }
        let tiles = crate::vae::TileLayout::new(1, 8, 8, 8).unwrap();
        assert_eq!(streamed.decode_tiled(&kernels, &latent, &tiles, &|| true).unwrap_err().to_string(), want);
        decode(&resident, 2, &|| touch(6)).unwrap();
        // Cut short while it is read: an error, where a mapping would end the process.
        let message = decode(&streamed, 1, &|| writer.set_len(1000).unwrap()).unwrap_err().to_string();
        assert!(message.contains("became shorter"), "{message}");
    }

    #[test]
    fn filters_that_stay_in_their_file_change_no_bit() {
        let folder = tempfile::tempdir().unwrap();
        let (resident, streamed) = held_and_streamed(folder.path());
        // The decoder has handles of its own: the folder may go.
        folder.close().unwrap();
        let values = (0..16 * 3 * 4 * 5).map(|n| ((n * 37 % 101) as f32 - 50.0) / 30.0).collect();
        let latent = Latent::new(16, 3, 4, 5, values).unwrap();
        let kernels = Kernels::new(Isa::Scalar, Pool::on_caller()).unwrap();
        let want = resident.decode(&kernels, &latent).unwrap();
        assert!(want.len() == 5 && want.iter().all(|frame| frame.values().iter().all(|value| value.is_finite())));
        assert_eq!(streamed.decode(&kernels, &latent).unwrap(), want);
        let (all, some) = (resident.weight_bytes(), streamed.weight_bytes());
        // 16 × 16 and 16 × 32 channels are packed as they are; the middle's 32 × 32 are transformed and held.
        let wide = FilterShape { outputs: 16, inputs: 16, frames: 3, height: 3, width: 3 };
        assert!(some + 2 * 2 * ConvWeights::direct_bytes(wide) <= all, "{some} of {all} bytes held");
        let predicted = streamed.memory(4, 5, 1).unwrap();
        let mut session = streamed.session(4, 5).unwrap();
        for frame in 0..3 {
            session.push(&kernels, &latent, frame).unwrap();
        }
        let held = session.memory();
        assert_eq!((held.weights, held.history), (predicted.weights, predicted.history));
        assert!(held.working <= predicted.working + (1 << 20), "{held:?} {predicted:?}");
    }
}
