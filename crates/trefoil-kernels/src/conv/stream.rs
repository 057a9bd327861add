//! Filters that are not kept: packed when they are used, from weights that are read then, in memory that the next one uses again.

use super::FilterShape;
use super::weights::{ConvWeights, check_shape, direct_products, pack_column};
use crate::workspace::at_least;
use crate::{KernelError, Kernels, Workspace};
use std::sync::{Mutex, PoisonError};
use trefoil_weights::tile::TILE;

impl Kernels {
    /// [`ConvWeights::direct`] of weights that are read while they are packed, 32 outputs at a time on each thread, in the memory of
    /// `old`. `read(first, values)` fills in the weights of outputs `first ..`, in the order of a checkpoint.
    ///
    /// # Errors
    /// As [`ConvWeights::direct`]; the first that `read` returns.
    pub fn pack_direct<E: From<KernelError> + Send>(
        &self,
        shape: FilterShape,
        bias: &[f32],
        old: Option<ConvWeights>,
        read: impl Fn(usize, &mut [f32]) -> Result<(), E> + Sync,
        workspace: &mut Workspace,
    ) -> Result<ConvWeights, E> {
        check_shape(shape, bias)?;
        let (products, columns) = (direct_products(shape), shape.outputs.div_ceil(TILE));
        let mut panels = old.map_or_else(Vec::new, ConvWeights::into_panels);
        let len = columns * products * TILE;
        panels.reserve_exact(len.saturating_sub(panels.len()));
        panels.resize(len, 0.0);
        let mut rest = panels.as_mut_slice();
        let failure: Mutex<Option<E>> = Mutex::new(None);
        self.run_grains(
            columns,
            1,
            workspace,
            |count| rest.split_off_mut(..count * products * TILE).unwrap_or_default(),
            |part| {
                let weight = at_least(&mut part.slot.floats, TILE * products);
                for (column, panel) in part.sink.chunks_exact_mut(products * TILE).enumerate() {
                    let first = (part.first + column) * TILE;
                    let weight = &mut weight[..TILE.min(shape.outputs - first) * products];
                    match read(first, weight) {
                        Ok(()) => pack_column(shape, weight, panel),
                        Err(error) => {
                            failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                            return;
                        }
                    }
                }
            },
        );
        match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(ConvWeights::from_direct(shape, panels, bias)),
        }
    }
}

impl ConvWeights {
    /// Bytes of scratch of each thread in [`Kernels::pack_direct`].
    pub fn pack_scratch_bytes(shape: FilterShape) -> usize {
        TILE * direct_products(shape) * size_of::<f32>()
    }

    /// Bytes of a filter that [`ConvWeights::direct`] or [`Kernels::pack_direct`] packs.
    pub fn direct_bytes(shape: FilterShape) -> usize {
        shape.outputs.next_multiple_of(TILE) * (direct_products(shape) + 1) * size_of::<f32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv::weights::Form;
    use crate::{Isa, Pool};

    fn panels(weights: &ConvWeights) -> &[f32] {
        match &weights.form {
            Form::Direct(phases) => &phases[0].panels,
            form => panic!("{form:?}"),
        }
    }

    #[test]
    fn a_filter_packed_while_it_is_read_is_the_one_packed_at_once() {
        let kernels = Kernels::new(Isa::Scalar, Pool::on_caller()).unwrap();
        let mut workspace = Workspace::new();
        let mut old = None;
        // Larger and smaller than the one before, with outputs that are no multiple of a tile.
        for (outputs, inputs, frames, side) in
            [(40, 5, 3, 3), (64, 9, 1, 1), (3, 2, 1, 3), (33, 40, 3, 3), (32, 3, 3, 1)]
        {
            let shape = FilterShape { outputs, inputs, frames, height: side, width: side };
            let weight: Vec<f32> = (0..shape.elements()).map(|n| (n * 7919 % 1009) as f32 - 500.0).collect();
            let bias: Vec<f32> = (0..outputs).map(|n| n as f32).collect();
            let read = |first: usize, values: &mut [f32]| -> Result<(), KernelError> {
                values.copy_from_slice(&weight[first * direct_products(shape)..][..values.len()]);
                Ok(())
            };
            let streamed = kernels.pack_direct(shape, &bias, old.take(), read, &mut workspace).unwrap();
            let at_once = ConvWeights::direct(shape, &weight, &bias).unwrap();
            assert_eq!(panels(&streamed), panels(&at_once), "{shape}");
            assert_eq!(at_once.bytes(), ConvWeights::direct_bytes(shape));
            // By the definition: input and tap of every output.
            let taps = frames * side * side;
            for (index, lanes) in panels(&at_once).chunks_exact(TILE).enumerate() {
                let (column, row) = (index / (taps * inputs), index % (taps * inputs));
                for (lane, &value) in lanes.iter().enumerate() {
                    let output = column * TILE + lane;
                    let want = if output < outputs {
                        weight[(output * inputs + row % inputs) * taps + row / inputs]
                    } else {
                        0.0
                    };
                    assert_eq!(value.to_bits(), want.to_bits(), "{shape} {index} {lane}");
                }
            }
            old = Some(streamed);
        }
        let shape = FilterShape { outputs: 70, inputs: 2, frames: 1, height: 1, width: 1 };
        let fail = |first: usize, _: &mut [f32]| -> Result<(), KernelError> {
            if first == 0 { Ok(()) } else { Err(KernelError::value("read", "output", first, "no")) }
        };
        let error = kernels.pack_direct(shape, &[0.0; 70], old, fail, &mut workspace).unwrap_err();
        assert!(error.to_string().contains("32"), "{error}");
    }
}
