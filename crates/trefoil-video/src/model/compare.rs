//! Whether unquantised weights are those that an artefact was packed from.

use super::{Model, Part, Weights};
use crate::VideoError;
use trefoil_kernels::FloatWeights;
use trefoil_weights::artefact::{Layout, StoredType};
use trefoil_weights::quantise::{MatrixSource, Orientation, quantise};
use trefoil_weights::tile::{TILE, TileShape};
use trefoil_weights::{Artefact, FloatType};

impl Model {
    /// The first tensor of this checkpoint in memory that is not what `packed` holds, and in what: its shape; the codes that the first,
    /// the middle and the last 32 outputs of a matrix quantise to; every value of whatever is stored as f32.
    pub(crate) fn difference(&self, packed: &Model) -> Result<Option<String>, VideoError> {
        for (floats, part) in self.parts.iter().zip(&packed.parts) {
            let (Weights::Float(tensors), Weights::Packed(artefact)) = (&floats.weights, &part.weights) else {
                continue;
            };
            let mut names: Vec<&String> = tensors.keys().collect();
            // Matrices first: they say most about what the other model is.
            let is_matrix =
                |name: &str| artefact.tensor(name).is_ok_and(|stored| stored.record.spec.layout == Layout::Tile32);
            names.sort_unstable_by_key(|name| (!is_matrix(name), name.as_str()));
            for name in names {
                if let Some(what) = floats.differs_in(name, artefact)? {
                    return Ok(Some(format!("`{name}` {what}")));
                }
            }
        }
        Ok(None)
    }
}

impl Part {
    /// In what a tensor is not the artefact's.
    fn differs_in(&self, name: &str, artefact: &Artefact) -> Result<Option<String>, VideoError> {
        // What no model reads (`alpha`, which became a factor) is not stored.
        let Ok(stored) = artefact.tensor(name) else { return Ok(None) };
        let spec = &stored.record.spec;
        let have = self.shape(name)?;
        let is_tiled = spec.layout == Layout::Tile32;
        let want: Vec<u64> = if is_tiled { spec.shape.iter().rev().copied().collect() } else { spec.shape.clone() };
        if have != want {
            return Ok(Some(format!("is {have:?} instead of {want:?}")));
        }
        if is_tiled {
            let tiled = artefact.matrix(name)?;
            let floats = self.matrix(name)?;
            let last = tiled.shape.tile_columns() - 1;
            for tile in [0, last / 2, last] {
                let first = tile * TILE;
                let end = tiled.shape.d_out.min(first + TILE);
                let Some((codes, scales)) = quantised(name, &floats, (first, end), tiled.shape.d_in)? else {
                    return Ok(Some("is no matrix of floats".to_string()));
                };
                let at = tile * tiled.shape.column_bytes();
                if tiled.codes.get(at..at + codes.len()) != Some(&codes)
                    || tiled.scales.get(first..first + scales.len()) != Some(&scales)
                {
                    return Ok(Some("quantises to other codes".to_string()));
                }
            }
            return Ok(None);
        }
        if spec.dtype != StoredType::F32 {
            return Ok(None);
        }
        let (Weights::Float(tensors), values) = (&self.weights, stored.f32_values()?) else { return Ok(None) };
        let floats = tensors.get(name).map_or(&[][..], |tensor| &tensor.values);
        // Biases are padded behind their values.
        let is_same = values.get(..floats.len()) == Some(floats);
        Ok((!is_same).then(|| "has other values".to_string()))
    }
}

/// Codes and scales of the outputs `first..end` of a matrix of floats.
#[allow(clippy::type_complexity, reason = "codes and scales, where there are any")]
fn quantised(
    name: &str,
    floats: &FloatWeights<'_>,
    (first, end): (usize, usize),
    inputs: usize,
) -> Result<Option<(Vec<i8>, Vec<f32>)>, VideoError> {
    let (FloatWeights::OutIn(rows), Some(shape)) = (floats, TileShape::new(inputs, end - first)) else {
        return Ok(None);
    };
    let bytes: Vec<u8> = (first..end).flat_map(|row| rows.row(row)).flat_map(|value| value.to_le_bytes()).collect();
    let source = MatrixSource::new(name, &bytes, FloatType::F32, shape, Orientation::OutIn)?;
    let made = quantise(&source, 1)?;
    Ok(Some((made.codes, made.scales)))
}
