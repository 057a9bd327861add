//! The index of an artefact: sections, tensors, and the checks that make its numbers safe to use.

use super::{HEADER_BYTES, SECTION_ALIGNMENT, TENSOR_ALIGNMENT};
use crate::tile::TILE;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::fmt;

/// `format` field of every index.
pub(super) const FORMAT_NAME: &str = "trefoil-weights";
/// Most dimensions of a stored tensor.
const MAX_DIMS: usize = 8;

/// Memory class of a tensor, for accounting and for its section.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TensorClass {
    /// Attention projections shared by every expert.
    AttentionBase,
    /// Feed-forward matrices.
    Ffn,
    /// Column scales of base matrices.
    Scales,
    /// Bias of a linear layer.
    Bias,
    /// Gains and biases of norms.
    Norm,
    /// Low-rank factors with their own column scales.
    Adapter,
    /// Embedders and heads outside the blocks.
    Embedder,
    /// What depends on the denoising step: modulation tables, schedules, expert choice, activation scales.
    Step,
    /// Anything else.
    Other,
}

impl TensorClass {
    /// All classes, in the order they are listed.
    pub const ALL: [TensorClass; 9] = [
        TensorClass::AttentionBase,
        TensorClass::Ffn,
        TensorClass::Scales,
        TensorClass::Bias,
        TensorClass::Norm,
        TensorClass::Adapter,
        TensorClass::Embedder,
        TensorClass::Step,
        TensorClass::Other,
    ];

    /// The name used in files and tables.
    pub fn as_str(self) -> &'static str {
        match self {
            TensorClass::AttentionBase => "attention-base",
            TensorClass::Ffn => "ffn",
            TensorClass::Scales => "scales",
            TensorClass::Bias => "bias",
            TensorClass::Norm => "norm",
            TensorClass::Adapter => "adapter",
            TensorClass::Embedder => "embedder",
            TensorClass::Step => "step",
            TensorClass::Other => "other",
        }
    }
}

impl fmt::Display for TensorClass {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.as_str())
    }
}

/// Element type of a stored tensor, with its safetensors spelling in lowercase.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StoredType {
    /// INT8 codes.
    I8,
    /// Unsigned bytes.
    U8,
    /// Signed 32-bit.
    I32,
    /// Signed 64-bit.
    I64,
    /// Binary32.
    F32,
    /// Binary16.
    F16,
    /// Bfloat16.
    Bf16,
    /// Binary64.
    F64,
    /// A type that is stored as it came; the element size is the tensor's bytes over its elements.
    #[serde(untagged)]
    Opaque(String),
}

impl StoredType {
    /// Bytes of an element, where the type tells it.
    pub fn bytes(&self) -> Option<u64> {
        match self {
            StoredType::I8 | StoredType::U8 => Some(1),
            StoredType::F16 | StoredType::Bf16 => Some(2),
            StoredType::I32 | StoredType::F32 => Some(4),
            StoredType::I64 | StoredType::F64 => Some(8),
            StoredType::Opaque(_) => None,
        }
    }

    /// The type of a safetensors spelling.
    pub fn from_name(name: &str) -> StoredType {
        match name {
            "i8" => StoredType::I8,
            "u8" => StoredType::U8,
            "i32" => StoredType::I32,
            "i64" => StoredType::I64,
            "f32" => StoredType::F32,
            "f16" => StoredType::F16,
            "bf16" => StoredType::Bf16,
            "f64" => StoredType::F64,
            other => StoredType::Opaque(other.to_string()),
        }
    }
}

impl fmt::Display for StoredType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            StoredType::I8 => "i8",
            StoredType::U8 => "u8",
            StoredType::I32 => "i32",
            StoredType::I64 => "i64",
            StoredType::F32 => "f32",
            StoredType::F16 => "f16",
            StoredType::Bf16 => "bf16",
            StoredType::F64 => "f64",
            StoredType::Opaque(name) => name,
        })
    }
}

/// Order of the elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Layout {
    /// Last dimension fastest.
    #[serde(rename = "row-major")]
    RowMajor,
    /// 32 × 32 tiles of INT8 codes, see [`crate::tile`].
    #[serde(rename = "tile32")]
    Tile32,
}

/// What a tensor is, apart from where it lies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorSpec {
    /// Canonical name, unique in the artefact.
    pub name: String,
    /// Memory class.
    pub class: TensorClass,
    /// The matrix this scale, bias or adapter factor belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// The block it belongs to, whether it lies in that block's region or outside.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block: Option<u32>,
    /// Element type.
    pub dtype: StoredType,
    /// Element order.
    pub layout: Layout,
    /// Logical shape; `[d_in, d_out]` for tiled matrices.
    pub shape: Vec<u64>,
    /// Shape as stored.
    pub padded_shape: Vec<u64>,
    /// Name in the checkpoint, where it differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
}

impl TensorSpec {
    /// A row-major tensor without padding, owner, block or source.
    pub fn plain(name: impl Into<String>, class: TensorClass, dtype: StoredType, shape: &[u64]) -> TensorSpec {
        TensorSpec {
            name: name.into(),
            class,
            owner: None,
            block: None,
            dtype,
            layout: Layout::RowMajor,
            shape: shape.to_vec(),
            padded_shape: shape.to_vec(),
            source: None,
        }
    }

    /// Stored bytes by padded shape and type; `None` where they overflow or the type does not tell.
    pub fn stored_bytes(&self) -> Option<u64> {
        self.padded_shape.iter().try_fold(self.dtype.bytes()?, |bytes, &side| bytes.checked_mul(side))
    }

    /// Why the record is impossible, if it is.
    pub(super) fn problem(&self, bytes: u64) -> Option<String> {
        let dims = self.shape.len();
        if self.name.is_empty() {
            return Some("a tensor has no name".to_string());
        }
        if dims > MAX_DIMS || dims != self.padded_shape.len() {
            return Some(format!("shape {:?} and padded shape {:?} do not go together", self.shape, self.padded_shape));
        }
        if self.shape.iter().zip(&self.padded_shape).any(|(side, padded)| side > padded) {
            return Some(format!("shape {:?} is larger than padded shape {:?}", self.shape, self.padded_shape));
        }
        if self.dtype.bytes().is_some() && self.stored_bytes() != Some(bytes) {
            return Some(format!("{} {:?} does not have {bytes} bytes", self.dtype, self.padded_shape));
        }
        let is_matrix = || {
            self.dtype == StoredType::I8
                && dims == 2
                && self
                    .shape
                    .iter()
                    .zip(&self.padded_shape)
                    .all(|(&side, &padded)| side > 0 && side.checked_next_multiple_of(TILE as u64) == Some(padded))
        };
        (self.layout == Layout::Tile32 && !is_matrix()).then(|| {
            format!("{} {:?} stored as {:?} is no tiled INT8 matrix", self.dtype, self.shape, self.padded_shape)
        })
    }
}

/// A tensor and its place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorRecord {
    /// What it is.
    #[serde(flatten)]
    pub spec: TensorSpec,
    /// Index into the sections.
    pub section: usize,
    /// Bytes from the start of the section.
    pub offset: u64,
    /// Stored bytes.
    pub bytes: u64,
}

/// A section: a region or a memory class.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SectionRecord {
    /// `region 3` or the name of a class.
    pub name: String,
    /// The block, where the section is a region.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block: Option<u32>,
    /// Where the block's tensors come from (`blocks.3`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// Bytes from the start of the file, a multiple of the alignment.
    pub offset: u64,
    /// Used bytes; the file holds zeros up to the next multiple of the alignment.
    pub bytes: u64,
    /// SHA-256 of bytes and padding, hexadecimal.
    pub sha256: String,
}

impl SectionRecord {
    /// Bytes with padding.
    pub fn padded_bytes(&self) -> u64 {
        self.bytes.next_multiple_of(SECTION_ALIGNMENT)
    }
}

/// The JSON index.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Index {
    pub format: String,
    pub metadata: serde_json::Map<String, serde_json::Value>,
    pub sections: Vec<SectionRecord>,
    pub tensors: Vec<TensorRecord>,
}

impl Index {
    /// Checks every number, so that readers may slice without further checks: sections tile the file between header and
    /// index, tensors lie in their section without overlap, names and blocks are unique.
    pub fn check(&self, index_offset: u64) -> Result<(), String> {
        if self.format != FORMAT_NAME {
            return Err(format!("format is `{}`", self.format));
        }
        let mut end = HEADER_BYTES;
        let mut blocks = HashSet::new();
        for section in &self.sections {
            if section.offset != end {
                return Err(format!("section `{}` starts at {} instead of {end}", section.name, section.offset));
            }
            end = section
                .bytes
                .checked_next_multiple_of(SECTION_ALIGNMENT)
                .and_then(|padded| end.checked_add(padded))
                .filter(|&end| end <= index_offset)
                .ok_or_else(|| {
                    format!("section `{}` of {} bytes reaches past the index", section.name, section.bytes)
                })?;
            if section.sha256.len() != 64 || !section.sha256.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return Err(format!("section `{}` has no checksum", section.name));
            }
            if let Some(block) = section.block
                && !blocks.insert(block)
            {
                return Err(format!("block {block} has two regions"));
            }
        }
        if end != index_offset {
            return Err(format!("sections end at {end} but the index starts at {index_offset}"));
        }
        let mut names = HashSet::new();
        let mut filled = vec![0u64; self.sections.len()];
        for tensor in &self.tensors {
            let name = &tensor.spec.name;
            if !names.insert(name.as_str()) {
                return Err(format!("two tensors are named `{name}`"));
            }
            if let Some(problem) = tensor.spec.problem(tensor.bytes) {
                return Err(format!("tensor `{name}`: {problem}"));
            }
            let Some(section) = self.sections.get(tensor.section) else {
                return Err(format!(
                    "tensor `{name}` lies in section number {}, of {}",
                    tensor.section,
                    self.sections.len()
                ));
            };
            if section.block.is_some() && section.block != tensor.spec.block {
                return Err(format!(
                    "tensor `{name}` of block {:?} lies in section `{}`",
                    tensor.spec.block, section.name
                ));
            }
            let aligned = tensor.offset.is_multiple_of(TENSOR_ALIGNMENT);
            let end = tensor.offset.checked_add(tensor.bytes);
            match end {
                Some(end) if aligned && tensor.offset >= filled[tensor.section] && end <= section.bytes => {
                    filled[tensor.section] = end;
                }
                _ => {
                    return Err(format!(
                        "tensor `{name}` at {} of {} bytes does not fit section `{}` of {} bytes",
                        tensor.offset, tensor.bytes, section.name, section.bytes
                    ));
                }
            }
        }
        Ok(())
    }
}
