//! Wan-family checkpoints: which layout, what is in them, and what is wrong with them.
//!
//! All layouts come down to diffusers names ([`RuleSet::wan`]): the original Wan files, diffusers folders, DCM's dual-expert
//! file, and plain base files with a LoRA file beside them. Names and shapes are checked against the configuration before
//! anything is read.

use crate::VideoError;
use crate::config::DitConfig;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use trefoil_weights::RuleSet;
use trefoil_weights::checkpoint::{Checkpoint, SourceTensor, SourceType};
use trefoil_weights::files::open_regular;

/// Largest configuration file that is read, in bytes.
const MAX_CONFIG: u64 = 1 << 20;
/// Names listed in an error before it says how many more there are.
const LISTED: usize = 4;
/// Factor of the detail expert's delta: lora_alpha/rank = 256/128 (HeteroVDiff equation 3).
const DCM_SCALING: f32 = 2.0;

/// How a checkpoint spells its tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Layout {
    /// `self_attn.q`, `head.head`: the model authors' files.
    Original,
    /// `attn1.to_q`, `proj_out`: diffusers.
    Diffusers,
    /// `base_layer` and `lora_A`/`lora_B` beside a second condition embedder and head: DCM's detail expert.
    Dcm,
}

/// What to read besides the checkpoint itself.
#[derive(Debug, Clone, Default)]
pub struct CheckpointOptions {
    /// The transformer's `config.json`; beside the weights (or `NAME.config.json`) where `None`.
    pub config: Option<PathBuf>,
    /// LoRA files whose factors become the adapter of a second expert.
    pub adapters: Vec<PathBuf>,
}

/// Factors of the adapter deltas, `y += scaling·(x·Aᵀ)·Bᵀ`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AdapterScaling {
    /// Of every matrix that is not an exception.
    pub default: f32,
    /// By matrix (`blocks.0.attn1.to_q`), where a file gives its own `alpha`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub exceptions: BTreeMap<String, f32>,
}

impl AdapterScaling {
    /// The factor of the matrix `stem`.
    pub fn of(&self, stem: &str) -> f32 {
        self.exceptions.get(stem).copied().unwrap_or(self.default)
    }
}

/// An open checkpoint whose tensors are all there.
#[derive(Debug)]
pub struct WanCheckpoint {
    path: PathBuf,
    checkpoint: Checkpoint,
    /// Canonical name → name in the file.
    names: BTreeMap<String, String>,
    /// Names in the files of adapters → which file.
    adapters: BTreeMap<String, PathBuf>,
    /// Sizes.
    pub config: DitConfig,
    /// Spelling.
    pub layout: Layout,
    /// Whether there is a second condition embedder and head.
    pub has_detail_embedder: bool,
    /// Factors of the adapter, if there is one.
    pub adapter: Option<AdapterScaling>,
}

impl WanCheckpoint {
    /// Opens and checks a checkpoint: a safetensors file or index, a folder with either, or a pipeline folder with a
    /// `transformer/` in it.
    ///
    /// # Errors
    /// Files that cannot be read, no or an unsupported configuration, and every tensor that is missing, has another shape or
    /// type than the configuration asks for, or belongs to no text-to-video transformer.
    pub fn open(path: &Path, options: &CheckpointOptions) -> Result<WanCheckpoint, VideoError> {
        let checkpoint = Checkpoint::open(path, &options.adapters)?;
        let mut adapters = BTreeMap::new();
        for file in &options.adapters {
            let names = Checkpoint::open(file, &[])?;
            adapters.extend(names.tensors().map(|tensor| (tensor.name.clone(), file.clone())));
        }
        let config = read_config(path, &checkpoint, options.config.as_deref())?;
        let layout = layout_of(checkpoint.tensors().map(|tensor| tensor.name.as_str()));
        let rules = RuleSet::wan();
        let mut names = BTreeMap::new();
        for tensor in checkpoint.tensors() {
            if let Some(twin) = names.insert(rules.canonical_name(&tensor.name), tensor.name.clone()) {
                let file = adapters.get(&tensor.name).or(adapters.get(&twin));
                return Err(VideoError::Tensors {
                    path: file.map_or(path, PathBuf::as_path).to_path_buf(),
                    reason: format!("`{twin}` and `{}` are the same tensor; give each once", tensor.name),
                });
            }
        }
        let mut opened = WanCheckpoint {
            path: path.to_path_buf(),
            has_detail_embedder: names.keys().any(|name| is_detail(name)),
            checkpoint,
            names,
            adapters,
            config,
            layout,
            adapter: None,
        };
        opened.check_names()?;
        opened.adapter = opened.read_scaling()?;
        Ok(opened)
    }

    /// The path as given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files underneath.
    pub fn files(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// A tensor by its canonical name.
    pub fn tensor(&self, canonical: &str) -> Option<&SourceTensor> {
        self.checkpoint.tensor(self.names.get(canonical)?)
    }

    /// Canonical names, ascending.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.keys().map(String::as_str)
    }

    /// All elements of a tensor, row-major, as f32.
    ///
    /// # Errors
    /// A tensor that is not there or not floating-point, NaN or infinity in it, a mapping that fails.
    pub fn values(&self, canonical: &str) -> Result<Vec<f32>, VideoError> {
        let tensor = self.tensor(canonical).ok_or_else(|| VideoError::Tensors {
            path: self.path.clone(),
            reason: format!("tensor `{canonical}` is missing"),
        })?;
        read_values(self.file_of(&tensor.name), &self.checkpoint, tensor)
    }

    /// The adapter's file that a tensor is in, else the checkpoint.
    fn file_of(&self, source: &str) -> &Path {
        self.adapters.get(source).unwrap_or(&self.path)
    }

    /// Reads the tensors of all adapter files, so that what is wrong with one is told with its name.
    ///
    /// # Errors
    /// NaN or infinity.
    pub(crate) fn check_adapters(&self) -> Result<(), VideoError> {
        let of_adapters = self.names.iter().filter(|(_, source)| self.adapters.contains_key(*source));
        of_adapters.filter(|(name, _)| !is_ignored(name)).try_for_each(|(name, _)| self.values(name).map(drop))
    }

    /// Missing, odd and unknown tensors, first those of the checkpoint, then those of the adapters' files.
    fn check_names(&self) -> Result<(), VideoError> {
        let expected = expected_tensors(&self.config, self.has_detail_embedder);
        let mut problems = Vec::new();
        let missing: Vec<String> = expected
            .iter()
            .filter(|(name, _)| !self.names.contains_key(*name))
            .map(|(name, shape)| format!("{name} {shape:?}"))
            .collect();
        if !missing.is_empty() {
            problems.push(format!("{} missing: {}", count(missing.len()), list(&missing)));
        }
        self.name_problems(None, &expected, &mut problems);
        if !problems.is_empty() {
            return Err(VideoError::Tensors {
                path: self.path.clone(),
                reason: format!("{}; give a complete checkpoint and its own config.json", problems.join("; ")),
            });
        }
        let files: std::collections::BTreeSet<&PathBuf> = self.adapters.values().collect();
        for file in files {
            self.name_problems(Some(file), &expected, &mut problems);
            if !problems.is_empty() {
                let reason = format!(
                    "{}; give a LoRA file of {} or of a model like it",
                    problems.join("; "),
                    self.path.display()
                );
                return Err(VideoError::Tensors { path: file.clone(), reason });
            }
        }
        Ok(())
    }

    /// Odd and unknown tensors of the checkpoint itself, or of an adapter's `file`.
    fn name_problems(&self, file: Option<&PathBuf>, expected: &BTreeMap<String, Vec<u64>>, problems: &mut Vec<String>) {
        let mut odd = Vec::new();
        let mut unknown = Vec::new();
        for (name, source) in self.names.iter().filter(|(_, source)| self.adapters.get(*source) == file) {
            let Some(tensor) = self.checkpoint.tensor(source) else { continue };
            let shown = if name == source { name.clone() } else { format!("{source} (that is, {name})") };
            match (expected.get(name), self.factor_shape(name)) {
                (Some(shape), _) if *shape != tensor.shape => {
                    odd.push(format!("{shown} is {:?} instead of {shape:?}", tensor.shape));
                }
                (Some(_), _) | (None, Some(Ok(()))) => {
                    if let SourceType::Raw { name } = &tensor.dtype {
                        odd.push(format!("{shown} is {name}, not f32, f16 or bf16"));
                    }
                }
                (None, Some(Err(problem))) => odd.push(format!("{shown} {problem}")),
                (None, None) if is_ignored(name) => {}
                (None, None) => unknown.push(format!("{shown} {:?}", tensor.shape)),
            }
        }
        if !odd.is_empty() {
            problems.push(format!("{} wrong: {}", count(odd.len()), list(&odd)));
        }
        if !unknown.is_empty() {
            problems.push(format!(
                "{} known to no text-to-video Wan transformer: {}",
                count(unknown.len()),
                list(&unknown)
            ));
        }
    }

    /// Whether a tensor not in the base model is a fitting half of a low-rank adapter; `None` where it is no such thing.
    fn factor_shape(&self, name: &str) -> Option<Result<(), String>> {
        if let Some(stem) = name.strip_suffix(".alpha") {
            let shape = &self.tensor(name)?.shape;
            let known = self.names.contains_key(&format!("{stem}.lora_A.weight"));
            return known.then(|| {
                if shape.iter().product::<u64>() == 1 {
                    Ok(())
                } else {
                    Err(format!("is {shape:?} instead of one number"))
                }
            });
        }
        let (stem, is_down) = match (name.strip_suffix(".lora_A.weight"), name.strip_suffix(".lora_B.weight")) {
            (Some(stem), _) => (stem, true),
            (_, Some(stem)) => (stem, false),
            _ => return None,
        };
        let sides = block_matrix(&self.config, stem)?;
        let twin = format!("{stem}.{}", if is_down { "lora_B.weight" } else { "lora_A.weight" });
        let Some(twin) = self.tensor(&twin) else {
            return Some(Err(format!("has no counterpart {twin}")));
        };
        let shape = &self.tensor(name)?.shape;
        let rank = if is_down { shape.first() } else { shape.get(1) };
        let other = if is_down { twin.shape.get(1) } else { twin.shape.first() };
        let want = rank.map(|&rank| if is_down { vec![rank, sides[1]] } else { vec![sides[0], rank] });
        Some(match (want, rank) {
            (Some(want), Some(&rank)) if want == *shape && other == Some(&rank) && rank > 0 => Ok(()),
            _ => Err(format!(
                "is {shape:?} and its counterpart {:?}, which is no low-rank delta of a [{}, {}] matrix",
                twin.shape, sides[0], sides[1]
            )),
        })
    }

    /// Factors of the deltas: a file's own `alpha` over the rank, the configuration's, DCM's 2, or 1.
    fn read_scaling(&self) -> Result<Option<AdapterScaling>, VideoError> {
        let stems: Vec<&str> = self.names().filter_map(|name| name.strip_suffix(".lora_A.weight")).collect();
        if stems.is_empty() {
            return Ok(None);
        }
        let number = |key: &str| self.checkpoint.config()?.get(key)?.as_f64();
        let configured = number("lora_alpha").zip(number("lora_rank")).map(|(alpha, rank)| (alpha / rank) as f32);
        let default = configured
            .filter(|scaling| scaling.is_finite() && *scaling != 0.0)
            .unwrap_or(if self.has_detail_embedder { DCM_SCALING } else { 1.0 });
        let mut exceptions = BTreeMap::new();
        for stem in stems {
            let alpha = format!("{stem}.alpha");
            if self.names.contains_key(&alpha) {
                let rank = self.tensor(&format!("{stem}.lora_A.weight")).and_then(|factor| factor.shape.first());
                let alpha = self.values(&alpha)?[0];
                exceptions.insert(stem.to_string(), alpha / rank.copied().unwrap_or(1) as f32);
            }
        }
        Ok(Some(AdapterScaling { default, exceptions }))
    }
}

/// All elements of a floating-point tensor, finite, as f32.
pub(crate) fn read_values(path: &Path, files: &Checkpoint, tensor: &SourceTensor) -> Result<Vec<f32>, VideoError> {
    const WINDOW: u64 = 16 << 20;
    let problem = |reason: String| VideoError::Tensors { path: path.to_path_buf(), reason };
    let SourceType::Float(dtype) = tensor.dtype else {
        return Err(problem(format!("tensor `{}` is not f32, f16 or bf16; convert it", tensor.name)));
    };
    let mut values = vec![0f32; tensor.elements() as usize];
    let size = dtype.bytes() as u64;
    for (number, values) in values.chunks_mut((WINDOW / size) as usize).enumerate() {
        let window = files.window(tensor, number as u64 * WINDOW, values.len() as u64 * size)?;
        dtype.decode(window.bytes(), values);
    }
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(values),
        Some(at) => {
            Err(problem(format!("tensor `{}` {:?} holds {} at flat index {at}", tensor.name, tensor.shape, values[at])))
        }
    }
}

/// Names and shapes of a model, canonical: the base, and a second embedder and head where asked.
pub(crate) fn expected_tensors(config: &DitConfig, with_detail: bool) -> BTreeMap<String, Vec<u64>> {
    let mut expected: BTreeMap<String, Vec<u64>> = config.sizes(0).tensors().into_iter().collect();
    if with_detail {
        let detail: Vec<_> =
            expected.iter().filter_map(|(name, shape)| Some((detail_name(name)?, shape.clone()))).collect();
        expected.extend(detail);
    }
    expected
}

/// The detail expert's own version of an embedder or head tensor.
fn detail_name(name: &str) -> Option<String> {
    ["condition_embedder", "proj_out"]
        .into_iter()
        .find_map(|owner| Some(format!("{owner}_lora.{}", name.strip_prefix(owner)?.strip_prefix('.')?)))
}

fn is_detail(name: &str) -> bool {
    name.starts_with("condition_embedder_lora.") || name.starts_with("proj_out_lora.")
}

/// `[out, in]` of a block's matrix `blocks.N.….to_q`.
fn block_matrix(config: &DitConfig, stem: &str) -> Option<[u64; 2]> {
    let rest = stem.strip_prefix("blocks.")?;
    let (block, matrix) = rest.split_once('.')?;
    block.parse::<usize>().ok().filter(|&block| block < config.layers)?;
    let (width, ffn) = (config.width() as u64, config.ffn as u64);
    match matrix {
        "ffn.net.0.proj" => Some([ffn, width]),
        "ffn.net.2" => Some([width, ffn]),
        _ => {
            let (attention, projection) = matrix.split_once('.')?;
            let known =
                ["attn1", "attn2"].contains(&attention) && ["to_q", "to_k", "to_v", "to_out.0"].contains(&projection);
            known.then_some([width, width])
        }
    }
}

/// Tensors that some files carry and no text-to-video model uses.
fn is_ignored(name: &str) -> bool {
    name.contains("norm_added_") || name.starts_with("rope.") || name == "freqs"
}

fn layout_of<'a>(names: impl Iterator<Item = &'a str>) -> Layout {
    let mut layout = Layout::Diffusers;
    for name in names {
        if name.contains(".base_layer.") {
            return Layout::Dcm;
        }
        if name.ends_with("head.head.weight") {
            layout = Layout::Original;
        }
    }
    layout
}

fn count(number: usize) -> String {
    if number == 1 { "1 tensor is".to_string() } else { format!("{number} tensors are") }
}

fn list(names: &[String]) -> String {
    let mut text = names.iter().take(LISTED).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > LISTED {
        let _ = write!(text, ", and {} more", names.len() - LISTED);
    }
    text
}

fn read_config(path: &Path, checkpoint: &Checkpoint, given: Option<&Path>) -> Result<DitConfig, VideoError> {
    if let Some(file) = given {
        let mut opened = open_regular(file)?;
        let length = opened.metadata().map_err(VideoError::io("open", file))?.len();
        if length > MAX_CONFIG {
            return Err(VideoError::config(format!("{length} bytes are above {MAX_CONFIG}")).in_file(file));
        }
        let mut text = Vec::new();
        opened.read_to_end(&mut text).map_err(VideoError::io("read", file))?;
        let json: Value = serde_json::from_slice(&text)
            .map_err(|error| VideoError::config(format!("not JSON ({error})")).in_file(file))?;
        return DitConfig::from_json(&json).map_err(|error| error.in_file(file));
    }
    match checkpoint.config() {
        Some(json) => DitConfig::from_json(json).map_err(|error| error.in_file(path)),
        None => Err(VideoError::config(
            "there is no config.json beside the weights; name it with --config (the number of heads is in no tensor)",
        )
        .in_file(path)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> DitConfig {
        DitConfig { layers: 2, heads: 2, head_dim: 32, ffn: 96, channels: 4, text_dim: 24, frequency: 16, eps: 1e-6 }
    }

    #[test]
    fn the_detail_expert_adds_twelve_tensors() {
        let (base, both) = (expected_tensors(&config(), false), expected_tensors(&config(), true));
        assert_eq!(both.len() - base.len(), 12);
        assert_eq!(both["condition_embedder_lora.time_proj.weight"], [384, 64]);
        assert_eq!(both["proj_out_lora.bias"], [16]);
        assert!(!both.contains_key("scale_shift_table_lora"));
        // 825 tensors in the base of the released model.
        let released = DitConfig {
            layers: 30,
            heads: 12,
            head_dim: 128,
            ffn: 8960,
            channels: 16,
            text_dim: 4096,
            frequency: 256,
            eps: 1e-6,
        };
        assert_eq!(expected_tensors(&released, false).len(), 825);
        // 14B shapes: 40 blocks of width 5120.
        let large = DitConfig { layers: 40, heads: 40, ffn: 13_824, ..released };
        let parameters: u64 = expected_tensors(&large, false).values().map(|shape| shape.iter().product::<u64>()).sum();
        assert!((14_000_000_000..14_500_000_000).contains(&parameters), "{parameters}");
    }

    #[test]
    fn adapters_fit_the_matrices_of_blocks_only() {
        assert_eq!(block_matrix(&config(), "blocks.1.ffn.net.0.proj"), Some([96, 64]));
        assert_eq!(block_matrix(&config(), "blocks.0.attn2.to_out.0"), Some([64, 64]));
        for stem in [
            "blocks.2.attn1.to_q",
            "blocks.0.attn3.to_q",
            "blocks.0.norm2",
            "condition_embedder.time_proj",
            "blocks.x.attn1.to_q",
        ] {
            assert_eq!(block_matrix(&config(), stem), None, "{stem}");
        }
    }

    #[test]
    fn scalings_have_exceptions() {
        let exceptions = BTreeMap::from([("blocks.0.attn1.to_q".to_string(), 0.5)]);
        let scaling = AdapterScaling { default: 2.0, exceptions };
        assert!((scaling.of("blocks.0.attn1.to_q") - 0.5).abs() < f32::EPSILON);
        assert!((scaling.of("blocks.1.attn1.to_q") - 2.0).abs() < f32::EPSILON);
        let json = serde_json::to_string(&scaling).unwrap();
        assert_eq!(serde_json::from_str::<AdapterScaling>(&json).unwrap(), scaling);
    }
}
