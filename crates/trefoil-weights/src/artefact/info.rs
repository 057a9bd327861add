//! What an artefact holds: bytes by class, the paper's accounting, and a text rendering.

use super::index::{Layout, StoredType};
use super::{Artefact, FORMAT_VERSION, TensorClass, TensorRecord, TensorSpec};
use serde::Serialize;
use std::collections::HashMap;
use std::fmt::Write as _;

/// Bytes of one memory class.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ClassBytes {
    /// Class.
    pub class: TensorClass,
    /// Tensors in it.
    pub tensors: usize,
    /// Stored bytes, padding of matrices included, alignment gaps not.
    pub bytes: u64,
}

/// The paper's memory classes (HeteroVDiff, the table of stored bytes), in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct MemoryClasses {
    /// Attention codes and the attention biases.
    pub attention_base_with_biases: u64,
    /// Feed-forward codes.
    pub ffn: u64,
    /// Column scales of base matrices.
    pub scales: u64,
    /// Adapter factors with their column scales.
    pub factors: u64,
    /// The sum of the four, which the paper calls the artefact.
    pub paper_total: u64,
    /// Everything that the paper does not count: other biases, norms, embedders, tables.
    pub uncounted: u64,
}

/// One region.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RegionInfo {
    /// Block.
    pub block: u32,
    /// Where its tensors come from.
    pub label: Option<String>,
    /// Offset in the file.
    pub offset: u64,
    /// Used bytes.
    pub bytes: u64,
    /// Attention bytes of it.
    pub attention_bytes: u64,
    /// Feed-forward bytes of it.
    pub ffn_bytes: u64,
    /// Tensors in it.
    pub tensors: usize,
}

/// Everything `trefoil weights info` tells.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Info {
    /// File as given.
    pub path: String,
    /// Format version.
    pub format_version: u32,
    /// Bytes of the file.
    pub file_bytes: u64,
    /// SHA-256 of the index, hexadecimal.
    pub fingerprint: String,
    /// Quantised weights, in elements without padding.
    pub quantised_elements: u64,
    /// Bytes by class; classes without tensors are left out.
    pub classes: Vec<ClassBytes>,
    /// The paper's accounting.
    pub memory: MemoryClasses,
    /// Largest region in bytes: what every engine must be able to map at once.
    pub largest_region_bytes: u64,
    /// Regions, by block.
    pub regions: Vec<RegionInfo>,
    /// Tensors whose matrix was padded.
    pub padded: Vec<String>,
    /// All tensors.
    pub tensors: Vec<TensorRecord>,
    /// What the packer recorded.
    pub metadata: serde_json::Map<String, serde_json::Value>,
}

impl Info {
    pub(super) fn new(artefact: &Artefact, file_bytes: u64) -> Info {
        let tensors = artefact.tensors();
        let mut regions: Vec<RegionInfo> = artefact
            .sections()
            .iter()
            .enumerate()
            .filter_map(|(number, section)| {
                let inside = || tensors.iter().filter(move |tensor| tensor.section == number);
                let class_bytes =
                    |class| inside().filter(|tensor| tensor.spec.class == class).map(|tensor| tensor.bytes).sum();
                Some(RegionInfo {
                    block: section.block?,
                    label: section.label.clone(),
                    offset: section.offset,
                    bytes: section.bytes,
                    attention_bytes: class_bytes(TensorClass::AttentionBase),
                    ffn_bytes: class_bytes(TensorClass::Ffn),
                    tensors: inside().count(),
                })
            })
            .collect();
        regions.sort_by_key(|region| region.block);
        let classes = TensorClass::ALL
            .into_iter()
            .map(|class| {
                let of_class = || tensors.iter().filter(move |tensor| tensor.spec.class == class);
                ClassBytes { class, tensors: of_class().count(), bytes: of_class().map(|tensor| tensor.bytes).sum() }
            })
            .filter(|class| class.tensors > 0)
            .collect();
        let tiled = || tensors.iter().filter(|tensor| tensor.spec.layout == Layout::Tile32);
        Info {
            path: artefact.path().display().to_string(),
            format_version: FORMAT_VERSION,
            file_bytes,
            fingerprint: artefact.fingerprint_hex(),
            quantised_elements: tiled().map(|tensor| tensor.spec.shape.iter().product::<u64>()).sum(),
            classes,
            memory: memory_classes(tensors.iter().map(|tensor| (&tensor.spec, tensor.bytes))),
            largest_region_bytes: regions.iter().map(|region| region.bytes).max().unwrap_or(0),
            regions,
            padded: tiled()
                .filter(|tensor| tensor.spec.shape != tensor.spec.padded_shape)
                .map(|tensor| tensor.spec.name.clone())
                .collect(),
            tensors: tensors.to_vec(),
            metadata: artefact.metadata().clone(),
        }
    }
}

/// Sorts tensors (with their stored bytes) into the paper's classes.
pub fn memory_classes<'a>(tensors: impl Iterator<Item = (&'a TensorSpec, u64)> + Clone) -> MemoryClasses {
    let class_of: HashMap<&str, TensorClass> =
        tensors.clone().map(|(spec, _)| (spec.name.as_str(), spec.class)).collect();
    let mut sums = MemoryClasses::default();
    for (spec, bytes) in tensors {
        let owner = spec.owner.as_deref().and_then(|owner| class_of.get(owner)).copied();
        let sum = match (spec.class, owner) {
            (TensorClass::AttentionBase, _) | (TensorClass::Bias, Some(TensorClass::AttentionBase)) => {
                &mut sums.attention_base_with_biases
            }
            (TensorClass::Ffn, _) => &mut sums.ffn,
            (TensorClass::Scales, _) => &mut sums.scales,
            (TensorClass::Adapter, _) => &mut sums.factors,
            _ => &mut sums.uncounted,
        };
        *sum += bytes;
    }
    sums.paper_total = sums.attention_base_with_biases + sums.ffn + sums.scales + sums.factors;
    sums
}

/// Bytes in MiB.
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// The text of `trefoil weights info`. With `all_tensors`, one line per tensor follows.
pub fn render_info(info: &Info, all_tensors: bool) -> String {
    let mut text = String::new();
    let memory = &info.memory;
    let _ = writeln!(text, "{}: weights artefact, format version {}", info.path, info.format_version);
    let _ = writeln!(text, "fingerprint {}", info.fingerprint);
    let _ = writeln!(
        text,
        "{:.1} MiB in the file, {:.1} M quantised weights, {} tensors\n",
        mib(info.file_bytes),
        info.quantised_elements as f64 / 1e6,
        info.tensors.len()
    );
    let _ = writeln!(text, "{:<16}{:>9}{:>14}", "class", "tensors", "MiB");
    for class in &info.classes {
        let _ = writeln!(text, "{:<16}{:>9}{:>14.3}", class.class, class.tensors, mib(class.bytes));
    }
    let _ = writeln!(text, "\nas the paper counts (MiB)");
    for (name, bytes) in [
        ("attention base with its biases", memory.attention_base_with_biases),
        ("feed-forward", memory.ffn),
        ("column scales", memory.scales),
        ("adapter factors with their scales", memory.factors),
        ("sum of the four", memory.paper_total),
        ("beside them in the file", memory.uncounted),
    ] {
        let _ = writeln!(text, "  {name:<36}{:>12.1}", mib(bytes));
    }
    let _ = writeln!(text, "\n{} regions, the largest {:.2} MiB", info.regions.len(), mib(info.largest_region_bytes));
    // Runs of equal regions are one line: thirty identical blocks say nothing thirty times.
    let same = |a: &RegionInfo, b: &RegionInfo| {
        (a.bytes, a.attention_bytes, a.ffn_bytes, a.tensors) == (b.bytes, b.attention_bytes, b.ffn_bytes, b.tensors)
    };
    for run in info.regions.chunk_by(same) {
        let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
        let blocks = if run.len() == 1 {
            format!("block {}", first.block)
        } else {
            format!("blocks {} to {}", first.block, last.block)
        };
        let _ = writeln!(
            text,
            "  {blocks:<20}{:>10.2} MiB each ({:.2} attention + {:.2} feed-forward), {} tensors",
            mib(first.bytes),
            mib(first.attention_bytes),
            mib(first.ffn_bytes),
            first.tensors
        );
    }
    if let Some(first) = info.padded.first() {
        let _ = writeln!(text, "\n{} matrices are padded to multiples of 32, the first is {first}", info.padded.len());
    }
    if all_tensors {
        let _ = writeln!(text, "\n{:<56}{:<16}{:<6}{:>14}  shape", "tensor", "class", "type", "bytes");
        for tensor in &info.tensors {
            let spec = &tensor.spec;
            let padded = if spec.shape == spec.padded_shape {
                String::new()
            } else {
                format!(" stored as {:?}", spec.padded_shape)
            };
            let dtype: &StoredType = &spec.dtype;
            let _ = writeln!(
                text,
                "{:<56}{:<16}{:<6}{:>14}  {:?}{padded}",
                spec.name, spec.class, dtype, tensor.bytes, spec.shape
            );
        }
    }
    text
}
