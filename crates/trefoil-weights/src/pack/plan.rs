//! What goes where, decided from names, types and shapes alone.

use crate::artefact::{Layout, StoredType};
use crate::checkpoint::SourceType;
use crate::rules::{Placement, RuleSet};
use crate::tile::{TILE, TileShape};
use crate::{TensorClass, TensorSpec, WeightsError};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// One tensor of the plan.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannedTensor {
    /// Name in the checkpoint.
    pub source: String,
    /// What is stored.
    pub spec: TensorSpec,
    /// Stored bytes.
    pub bytes: u64,
    /// Where it goes.
    pub place: Placement,
    /// The scales that come with a quantised matrix.
    pub scale: Option<TensorSpec>,
    /// Order of its rule and of the alternatives taken: tensors of a region lie as the rules list them.
    order: (usize, Vec<usize>),
}

/// The tensors of one block's region.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannedRegion {
    /// Block number.
    pub block: u32,
    /// Name of the block in the checkpoint.
    pub label: String,
    /// Bytes of the region.
    pub bytes: u64,
    /// Tensors in order.
    pub tensors: Vec<PlannedTensor>,
}

/// A packing plan. It needs no tensor data, so sizes are known before anything is read.
#[derive(Debug, Clone, PartialEq)]
pub struct PackPlan {
    regions: Vec<PlannedRegion>,
    outside: Vec<PlannedTensor>,
    /// Source tensors that no rule matched.
    pub unmatched: Vec<String>,
}

impl PackPlan {
    /// Plans for tensors given as (name, element type, shape).
    ///
    /// # Errors
    /// A matrix of a type that cannot be quantised, two tensors with the same canonical name, or rules that place no
    /// tensor in any region.
    pub fn new<'a>(
        tensors: impl Iterator<Item = (&'a str, &'a SourceType, &'a [u64])>,
        rules: &RuleSet,
    ) -> Result<PackPlan, WeightsError> {
        let mut planned = Vec::new();
        let mut unmatched = Vec::new();
        // Where each region tensor belongs: (what stands before the block number, the number).
        let mut stacks: BTreeMap<String, BTreeSet<u32>> = BTreeMap::new();
        let mut keys = Vec::new();
        for (source, dtype, shape) in tensors {
            let matched = rules.apply(source, shape.len());
            let rule = matched.rule.map(|number| &rules.rules[number]);
            let place = rule.map_or(Placement::Plain, |rule| rule.place);
            let class = rule.map_or(TensorClass::Other, |rule| rule.class);
            if rule.is_none() {
                unmatched.push(source.to_string());
            }
            let key = matched.captures.block.map(|block| (matched.captures.prefix.clone(), block));
            if place == Placement::Region
                && let Some((prefix, block)) = &key
            {
                stacks.entry(prefix.clone()).or_default().insert(*block);
            }
            keys.push(key);
            let order = (matched.rule.unwrap_or(usize::MAX), matched.captures.order.clone());
            planned.push(plan_tensor(source, &matched.name, class, place, dtype, shape, order)?);
        }
        if stacks.is_empty() {
            return Err(WeightsError::Rules {
                rules: rules.name.clone(),
                reason: "no tensor of the checkpoint belongs into a region; give rules that fit its names".to_string(),
            });
        }
        let numbers = number_blocks(&stacks);
        for (tensor, key) in planned.iter_mut().zip(&keys) {
            tensor.spec.block = key.as_ref().and_then(|key| numbers.get(key)).copied();
            if let Some(scale) = &mut tensor.scale {
                scale.block = tensor.spec.block;
            }
        }
        find_owners(&mut planned);
        let labels: BTreeMap<u32, String> =
            numbers.iter().map(|((prefix, block), &number)| (number, label(prefix, *block))).collect();
        let mut plan = PackPlan { regions: Vec::new(), outside: Vec::new(), unmatched };
        let mut by_block: BTreeMap<u32, Vec<PlannedTensor>> = BTreeMap::new();
        for tensor in planned {
            match (tensor.place, tensor.spec.block) {
                (Placement::Region, Some(block)) => by_block.entry(block).or_default().push(tensor),
                _ => plan.outside.push(tensor),
            }
        }
        for (block, mut tensors) in by_block {
            tensors.sort_by(|a, b| (&a.order, &a.spec.name).cmp(&(&b.order, &b.spec.name)));
            // Matrices are multiples of 1,024 bytes, so they lie without gaps.
            let bytes = tensors.iter().map(|tensor| tensor.bytes).sum();
            plan.regions.push(PlannedRegion {
                block,
                label: labels.get(&block).cloned().unwrap_or_default(),
                bytes,
                tensors,
            });
        }
        plan.outside
            .sort_by(|a, b| (a.spec.block, &a.order, &a.spec.name).cmp(&(b.spec.block, &b.order, &b.spec.name)));
        plan.check_names()?;
        Ok(plan)
    }

    /// Regions by block.
    pub fn regions(&self) -> &[PlannedRegion] {
        &self.regions
    }

    /// Tensors outside the regions, by block and rule.
    pub fn outside(&self) -> &[PlannedTensor] {
        &self.outside
    }

    /// All tensors, without scales.
    pub fn tensors(&self) -> impl Iterator<Item = &PlannedTensor> + Clone {
        self.regions.iter().flat_map(|region| &region.tensors).chain(&self.outside)
    }

    /// Everything stored, scales included, with its bytes.
    pub fn stored(&self) -> impl Iterator<Item = (&TensorSpec, u64)> + Clone {
        self.tensors().flat_map(|tensor| {
            let scale = tensor.scale.as_ref().map(|spec| (spec, spec.stored_bytes().unwrap_or(0)));
            [(&tensor.spec, tensor.bytes)].into_iter().chain(scale)
        })
    }

    /// Elements that are quantised, without padding.
    pub fn quantised_elements(&self) -> u64 {
        self.tensors()
            .filter(|tensor| tensor.scale.is_some())
            .map(|tensor| tensor.spec.shape.iter().product::<u64>())
            .sum()
    }

    /// Names of matrices that are padded.
    pub fn padded(&self) -> impl Iterator<Item = &str> {
        self.tensors()
            .filter(|tensor| tensor.scale.is_some() && tensor.spec.shape != tensor.spec.padded_shape)
            .map(|tensor| tensor.spec.name.as_str())
    }

    /// Refuses regions above `limit` bytes.
    pub fn check_limit(&self, limit: Option<u64>) -> Result<(), WeightsError> {
        match (limit, self.regions.iter().max_by_key(|region| region.bytes)) {
            (Some(limit), Some(region)) if region.bytes > limit => {
                Err(WeightsError::RegionTooLarge { block: region.block, bytes: region.bytes, limit, kind: "artefact" })
            }
            _ => Ok(()),
        }
    }

    fn check_names(&self) -> Result<(), WeightsError> {
        let mut sources: HashMap<&str, &str> = HashMap::new();
        for tensor in self.tensors() {
            let names = [Some(&tensor.spec), tensor.scale.as_ref()];
            for spec in names.into_iter().flatten() {
                if let Some(other) = sources.insert(&spec.name, &tensor.source) {
                    return Err(WeightsError::Tensor {
                        tensor: tensor.source.clone(),
                        reason: format!(
                            "it and `{other}` both become `{}`; give rules that keep them apart",
                            spec.name
                        ),
                    });
                }
            }
        }
        Ok(())
    }
}

/// Block numbers: the numbers of the names where there is one stack of blocks, else consecutive over all stacks, so that
/// an encoder's and a decoder's block 0 do not share a region.
fn number_blocks(stacks: &BTreeMap<String, BTreeSet<u32>>) -> BTreeMap<(String, u32), u32> {
    let several = stacks.len() > 1;
    let keys = stacks.iter().flat_map(|(prefix, blocks)| blocks.iter().map(move |&block| (prefix.clone(), block)));
    keys.enumerate()
        .map(|(at, key)| {
            let number = if several { at as u32 } else { key.1 };
            (key, number)
        })
        .collect()
}

fn label(prefix: &str, block: u32) -> String {
    if prefix.is_empty() { block.to_string() } else { format!("{prefix}.{block}") }
}

fn plan_tensor(
    source: &str,
    name: &str,
    class: TensorClass,
    place: Placement,
    dtype: &SourceType,
    shape: &[u64],
    order: (usize, Vec<usize>),
) -> Result<PlannedTensor, WeightsError> {
    let problem = |reason: String| WeightsError::Tensor { tensor: source.to_string(), reason };
    let mut spec = match dtype {
        SourceType::Float(_) => TensorSpec::plain(name, class, StoredType::F32, shape),
        SourceType::Raw { name: dtype } => TensorSpec::plain(name, class, StoredType::from_name(dtype), shape),
    };
    spec.source = (source != name).then(|| source.to_string());
    if place == Placement::Plain {
        let bytes = match spec.stored_bytes() {
            Some(bytes) => bytes,
            None => raw_bytes(dtype, shape)
                .ok_or_else(|| problem(format!("{shape:?} of {} has no byte size", spec.dtype)))?,
        };
        return Ok(PlannedTensor { source: source.to_string(), spec, bytes, place, scale: None, order });
    }
    if let SourceType::Raw { name: dtype } = dtype {
        return Err(problem(format!("{dtype} {shape:?} cannot be quantised; convert it to f32, f16 or bf16")));
    }
    // [out, in] in the file is W of in × out.
    let sides = match *shape {
        [d_out, d_in] => usize::try_from(d_in).ok().zip(usize::try_from(d_out).ok()),
        _ => None,
    };
    let tiles = sides
        .and_then(|(d_in, d_out)| TileShape::new(d_in, d_out))
        .ok_or_else(|| problem(format!("{shape:?} is no matrix that can be tiled")))?;
    let padded = [tiles.padded_in() as u64, tiles.padded_out() as u64];
    spec.dtype = StoredType::I8;
    spec.layout = Layout::Tile32;
    spec.shape = vec![tiles.d_in as u64, tiles.d_out as u64];
    spec.padded_shape = padded.to_vec();
    let scale_class = if class == TensorClass::Adapter { TensorClass::Adapter } else { TensorClass::Scales };
    let mut scale = TensorSpec::plain(format!("{name}.scale"), scale_class, StoredType::F32, &[tiles.d_out as u64]);
    scale.padded_shape = vec![padded[1]];
    scale.owner = Some(name.to_string());
    let bytes = tiles.bytes() as u64;
    Ok(PlannedTensor { source: source.to_string(), spec, bytes, place, scale: Some(scale), order })
}

/// Bytes of a type that is kept as it came.
fn raw_bytes(dtype: &SourceType, shape: &[u64]) -> Option<u64> {
    let SourceType::Raw { name } = dtype else { return None };
    let bits = match name.as_str() {
        "f4" => 4,
        "f6_e2m3" | "f6_e3m2" => 6,
        "bool" | "f8_e5m2" | "f8_e4m3" | "f8_e8m0" | "f8_e4m3fnuz" | "f8_e5m2fnuz" => 8,
        "i16" | "u16" => 16,
        "u32" => 32,
        "u64" | "c64" => 64,
        _ => return None,
    };
    let bits = shape.iter().try_fold(bits as u64, |bits, &side| bits.checked_mul(side))?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// Links biases and adapter factors to their matrix, and pads biases to its columns.
fn find_owners(planned: &mut [PlannedTensor]) {
    let matrices: HashMap<String, u64> = planned
        .iter()
        .filter(|tensor| tensor.scale.is_some())
        .map(|tensor| (tensor.spec.name.clone(), tensor.spec.shape[1]))
        .collect();
    for tensor in planned {
        let name = tensor.spec.name.as_str();
        if let Some(stem) = name.strip_suffix(".bias") {
            let owner = format!("{stem}.weight");
            let fits = matrices.get(&owner).is_some_and(|&columns| tensor.spec.shape == [columns]);
            if fits && tensor.spec.dtype == StoredType::F32 {
                tensor.spec.padded_shape = vec![tensor.spec.shape[0].next_multiple_of(TILE as u64)];
                tensor.bytes = tensor.spec.stored_bytes().unwrap_or(tensor.bytes);
                tensor.spec.owner = Some(owner);
            }
        } else if tensor.spec.class == TensorClass::Adapter
            && let Some((stem, _)) = name.split_once(".lora_")
        {
            let owner = format!("{stem}.weight");
            tensor.spec.owner = matrices.contains_key(&owner).then_some(owner);
        }
    }
}
