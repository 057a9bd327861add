//! An encoder's weights: a checkpoint whose matrices are widened piece by piece, or a packed file whose INT8 tiles are multiplied as
//! they lie.

use super::TextError;
use super::config::TextConfig;
use super::encoder::TextEncoder;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;
use std::str::FromStr;
use trefoil_weights::artefact::{Layout as Stored, StoredType};
use trefoil_weights::checkpoint::{Checkpoint, SourceTensor, SourceType};
use trefoil_weights::rules::{Placement, Rule};
use trefoil_weights::{
    Artefact, FloatType, PackOptions, PackProgress, PackReport, RuleSet, TensorClass, TiledView, pack,
};

/// Key of the record in a packed file's metadata.
const RECORD_KEY: &str = "text_encoder";

/// What the weights of the layers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TextPath {
    /// As in the checkpoint, widened to f32.
    #[default]
    F32,
    /// INT8 with a scale per output, multiplied with f32 states.
    Int8,
}

impl TextPath {
    /// All paths.
    pub const ALL: [TextPath; 2] = [TextPath::F32, TextPath::Int8];

    /// The name used in commands and results.
    pub fn as_str(self) -> &'static str {
        match self {
            TextPath::F32 => "f32",
            TextPath::Int8 => "int8",
        }
    }
}

impl fmt::Display for TextPath {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.as_str())
    }
}

impl FromStr for TextPath {
    type Err = String;

    fn from_str(text: &str) -> Result<TextPath, String> {
        let found = TextPath::ALL.into_iter().find(|path| path.as_str() == text);
        found.ok_or_else(|| "choose f32 or int8".to_string())
    }
}

/// What a packed file says of its encoder.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) config: TextConfig,
    /// Whether the tensors have Wan's own names.
    pub(super) is_original: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) enum Weights {
    Checkpoint(Checkpoint),
    Packed(Artefact),
}

impl Weights {
    pub(super) fn path(&self) -> TextPath {
        match self {
            Weights::Checkpoint(_) => TextPath::F32,
            Weights::Packed(_) => TextPath::Int8,
        }
    }

    pub(super) fn has(&self, name: &str) -> bool {
        match self {
            Weights::Checkpoint(checkpoint) => checkpoint.tensor(name).is_some(),
            Weights::Packed(artefact) => artefact.tensor(name).is_ok(),
        }
    }

    /// Extents as in a checkpoint: `[outputs, inputs]` of a matrix.
    pub(super) fn shape(&self, name: &str) -> Result<Vec<usize>, TextError> {
        let (sides, is_tiled) = match self {
            Weights::Checkpoint(checkpoint) => (float_tensor(checkpoint, name)?.0.shape.clone(), false),
            Weights::Packed(artefact) => {
                let spec = &artefact.tensor(name)?.record.spec;
                (spec.shape.clone(), spec.layout == Stored::Tile32)
            }
        };
        let mut sides: Vec<usize> = sides.into_iter().map(|side| side as usize).collect();
        if is_tiled {
            sides.reverse();
        }
        Ok(sides)
    }

    /// Rows `first .. first + rows` of a tensor that is not quantised, widened.
    pub(super) fn read(
        &self,
        name: &str,
        (first, rows, columns): (usize, usize, usize),
        out: &mut [f32],
    ) -> Result<(), TextError> {
        let range = |dtype: &FloatType| {
            let row = columns * dtype.bytes();
            (first * row, rows * row)
        };
        match self {
            Weights::Checkpoint(checkpoint) => {
                let (tensor, dtype) = float_tensor(checkpoint, name)?;
                let (at, len) = range(&dtype);
                dtype.decode(checkpoint.window(tensor, at as u64, len as u64)?.bytes(), out);
            }
            Weights::Packed(artefact) => {
                let view = artefact.tensor(name)?;
                let fail = |reason: String| TextError::Tensor { name: name.to_string(), reason };
                let dtype = match view.record.spec.dtype {
                    StoredType::F32 => FloatType::F32,
                    StoredType::F16 => FloatType::F16,
                    StoredType::Bf16 => FloatType::Bf16,
                    ref other => return Err(fail(format!("holds {other}; it must hold f32, f16 or bf16"))),
                };
                let (at, len) = range(&dtype);
                let bytes = view.bytes.get(at..at + len);
                let bytes = bytes.ok_or_else(|| fail(format!("has {} bytes only", view.bytes.len())))?;
                dtype.decode(bytes, out);
            }
        }
        Ok(())
    }

    /// The tiles of a quantised matrix; `None` where matrices are not quantised.
    pub(super) fn tiles(&self, name: &str) -> Result<Option<TiledView<'_>>, TextError> {
        match self {
            Weights::Checkpoint(_) => Ok(None),
            Weights::Packed(artefact) => Ok(Some(artefact.matrix(name)?)),
        }
    }

    /// The largest layer of a packed file, bytes.
    pub(super) fn layer_bytes(&self) -> usize {
        match self {
            Weights::Checkpoint(_) => 0,
            Weights::Packed(artefact) => {
                let layers = artefact.sections().iter().filter(|section| section.block.is_some());
                layers.map(|section| section.bytes as usize).max().unwrap_or(0)
            }
        }
    }

    /// A layer is done with for now: its pages are given back.
    pub(super) fn release(&self, layer: usize) {
        if let Weights::Packed(artefact) = self {
            artefact.release(layer as u32);
        }
    }
}

/// A tensor of floats of a checkpoint.
pub(super) fn float_tensor<'c>(
    checkpoint: &'c Checkpoint,
    name: &str,
) -> Result<(&'c SourceTensor, FloatType), TextError> {
    let fail = |reason: String| TextError::Tensor { name: name.to_string(), reason };
    let tensor = checkpoint.tensor(name).ok_or_else(|| fail("is missing; the checkpoint is not whole".to_string()))?;
    match &tensor.dtype {
        SourceType::Float(dtype) if tensor.bytes == tensor.elements() * dtype.bytes() as u64 => Ok((tensor, *dtype)),
        other => Err(fail(format!("has {} bytes of {other:?}; it must hold f32, f16 or bf16", tensor.bytes))),
    }
}

/// The record of a packed file.
pub(super) fn record(artefact: &Artefact) -> Result<Record, TextError> {
    let fail = |reason: String| TextError::config(artefact.path(), reason);
    let value = artefact.metadata().get(RECORD_KEY);
    let value = value.ok_or_else(|| fail("it is no packed text encoder; `--text-path int8` makes one".to_string()))?;
    let record: Record = serde_json::from_value(value.clone())
        .map_err(|error| fail(format!("it describes no umt5 encoder ({error}); pack it again")))?;
    record.config.check().map_err(fail)?;
    Ok(record)
}

/// The matrices of every layer are quantised; the token table, norms and biases are kept as they are, under their names.
fn rules() -> RuleSet {
    let rule = |pattern: &str, class, place| Rule { pattern: pattern.to_string(), class, place };
    let (attention, wide) = (TensorClass::AttentionBase, TensorClass::Ffn);
    RuleSet {
        name: "umt5".to_string(),
        renames: Vec::new(),
        rules: vec![
            rule("encoder.block.{block}.layer.0.SelfAttention.q|k|v|o.weight", attention, Placement::Region),
            rule("encoder.block.{block}.layer.1.DenseReluDense.wi_0|wi_1|wo.weight", wide, Placement::Region),
            rule("blocks.{block}.attn.q|k|v|o.weight", attention, Placement::Region),
            rule("blocks.{block}.ffn.gate.0.weight", wide, Placement::Region),
            rule("blocks.{block}.ffn.fc1|fc2.weight", wide, Placement::Region),
            rule("shared|token_embedding.weight", TensorClass::Embedder, Placement::Plain),
            rule("encoder.embed_tokens.weight", TensorClass::Embedder, Placement::Plain),
            rule("**", TensorClass::Other, Placement::Plain),
        ],
    }
}

/// Packs a text encoder: the matrices of its layers in INT8 with a scale per output, everything else as it is.
///
/// # Errors
/// What [`TextEncoder::open`] and [`trefoil_weights::pack()`] refuse; an encoder that is packed already.
pub fn pack_text(
    source: &Path,
    output: &Path,
    progress: impl FnMut(PackProgress<'_>),
) -> Result<PackReport, TextError> {
    let encoder = TextEncoder::open(source)?;
    if encoder.text_path() == TextPath::Int8 {
        return Err(TextError::config(encoder.path(), "it is packed already"));
    }
    let record = Record { config: encoder.config().clone(), is_original: encoder.is_original() };
    let json = serde_json::to_value(&record).map_err(|error| TextError::config(encoder.path(), error.to_string()))?;
    let options = PackOptions {
        rules: Some(rules()),
        metadata: serde_json::Map::from_iter([(RECORD_KEY.to_string(), json)]),
        ..PackOptions::default()
    };
    Ok(pack(encoder.path(), output, &options, progress)?)
}
