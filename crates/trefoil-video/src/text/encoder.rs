//! The umT5 encoder, its layers read from the mapped file as they are needed.
//!
//! Only the tokens of the prompts are computed: the reference masks padding with −∞, so padded keys add nothing, and it
//! replaces padded rows by zeros afterwards. All prompts of a call go through a layer together, so its weights are read
//! once. A matrix is widened a few thousand rows at a time; the whole model is never in memory.

use super::TextError;
use super::config::{MAX_LAYERS, TextConfig, distance, eos, epsilon, feed_forward, text_len};
use super::layout::{Layout, Part};
use super::weights::{TextPath, Weights, float_tensor, record};
use std::path::{Path, PathBuf};
use trefoil_kernels::{
    Activation, FloatEpilogue, FloatWeights, GemmSink, Kernels, Operands, RowSink, Rows, RowsMut, Workspace,
};
use trefoil_weights::Artefact;
use trefoil_weights::checkpoint::Checkpoint;

/// Weights widened at a time: 16 MiB.
const WIDENED: usize = 4 << 20;

/// Encoded prompts.
#[derive(Debug, Clone, PartialEq)]
pub struct TextStates {
    /// Rows per prompt ([`TextConfig::text_len`]).
    pub text_len: usize,
    /// Width of a row.
    pub width: usize,
    /// Tokens of each prompt; rows from there on are zero.
    pub lengths: Vec<usize>,
    /// `[prompts][text_len][width]`.
    pub values: Vec<f32>,
}

impl TextStates {
    /// Rows of one prompt.
    pub fn prompt(&self, index: usize) -> &[f32] {
        &self.values[index * self.text_len * self.width..][..self.text_len * self.width]
    }
}

/// An open text encoder: headers and sizes, no weights.
#[derive(Debug)]
pub struct TextEncoder {
    weights: Weights,
    layout: Layout,
    config: TextConfig,
    path: PathBuf,
}

impl TextEncoder {
    /// Opens a `text_encoder/` folder, a safetensors file or index, or a pipeline folder that holds `text_encoder/`; or a file that
    /// [`super::pack_text`] made. Both public layouts are read. Shapes of all tensors are checked here.
    ///
    /// # Errors
    /// Files that cannot be read, a config of another model, tensors missing or of another shape (by name).
    pub fn open(path: &Path) -> Result<TextEncoder, TextError> {
        if path.extension().is_some_and(|extension| extension == "trefoil") {
            return TextEncoder::open_packed(path);
        }
        let folder = path.join("text_encoder");
        let path = if folder.is_dir() { folder } else { path.to_path_buf() };
        let checkpoint = Checkpoint::open(&path, &[])?;
        let layout = if checkpoint.tensor("blocks.0.attn.q.weight").is_some() {
            Layout::Original
        } else if checkpoint.tensor(&Layout::Transformers.name(0, Part::Query)).is_some() {
            Layout::Transformers
        } else {
            return Err(TextError::Tensor {
                name: Layout::Transformers.name(0, Part::Query),
                reason: format!(
                    "is missing in {} (and so is the original `blocks.0.attn.q.weight`); it is no umT5 encoder",
                    path.display()
                ),
            });
        };
        let config_path = path.join("config.json");
        let config = match checkpoint.config() {
            // The original repository has one config for the whole pipeline, without the encoder's sizes.
            Some(value) if layout == Layout::Transformers => TextConfig::from_json(value, &config_path)?,
            _ => infer(&checkpoint, layout)?,
        };
        let encoder = TextEncoder { weights: Weights::Checkpoint(checkpoint), layout, config, path };
        encoder.check()?;
        Ok(encoder)
    }

    fn open_packed(path: &Path) -> Result<TextEncoder, TextError> {
        let artefact = Artefact::open(path)?;
        let record = record(&artefact)?;
        let layout = if record.is_original { Layout::Original } else { Layout::Transformers };
        let (weights, path) = (Weights::Packed(artefact), path.to_path_buf());
        let encoder = TextEncoder { weights, layout, config: record.config, path };
        encoder.check()?;
        Ok(encoder)
    }

    /// What the weights of its layers are.
    pub fn text_path(&self) -> TextPath {
        self.weights.path()
    }

    pub(super) fn is_original(&self) -> bool {
        self.layout == Layout::Original
    }

    /// Sizes.
    pub fn config(&self) -> &TextConfig {
        &self.config
    }

    /// The folder or file that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes that encoding `tokens` tokens (of all prompts together) takes at most, weights in hand included: pieces of a matrix while
    /// it is widened, or a layer of a packed file. The mapped file comes on top only as cache that the system may drop.
    pub fn working_bytes(&self, tokens: usize) -> usize {
        let config = &self.config;
        let inner = config.num_heads * config.d_kv;
        let widest = config.d_model.max(config.d_ff).max(inner);
        let longest = tokens.min(config.text_len);
        let per_token = 2 * config.d_model + (3 * inner + inner).max(2 * config.d_ff);
        // A matrix is mapped in the file's own type while it is widened.
        let weights = match self.text_path() {
            TextPath::F32 => 2 * WIDENED.max(widest),
            TextPath::Int8 => self.weights.layer_bytes() / size_of::<f32>(),
        };
        let attention = longest * longest + config.d_kv * longest;
        size_of::<f32>() * (tokens * per_token + weights + attention)
    }

    /// Encodes prompts given as token ids (without padding, with `</s>`). One row of the result per token, then zeros.
    ///
    /// # Errors
    /// An empty or too long list, or an id without an embedding (with the prompt's number), a tensor that is not finite.
    pub fn encode(&self, kernels: &Kernels, prompts: &[Vec<u32>]) -> Result<TextStates, TextError> {
        let config = &self.config;
        for (index, ids) in prompts.iter().enumerate() {
            let fail = |reason: String| Err(TextError::Prompt { number: index + 1, reason });
            if ids.is_empty() || ids.len() > config.text_len {
                return fail(format!("{} tokens; there must be 1 to {}", ids.len(), config.text_len));
            }
            if let Some(id) = ids.iter().find(|&&id| id as usize >= config.vocab_size) {
                return fail(format!(
                    "token {id} has no embedding (the encoder knows {}); is this its tokenizer?",
                    config.vocab_size
                ));
            }
        }
        let lengths: Vec<usize> = prompts.iter().map(Vec::len).collect();
        let width = config.d_model;
        let mut pass = Pass {
            encoder: self,
            kernels,
            lengths: &lengths,
            x: self.embed(prompts)?,
            normed: Vec::new(),
            wide: [Vec::new(), Vec::new(), Vec::new(), Vec::new()],
            scores: Vec::new(),
            transposed: Vec::new(),
            weights: Vec::new(),
            workspace: Workspace::new(),
        };
        for layer in 0..config.num_layers {
            pass.attention(layer)?;
            pass.feed_forward(layer)?;
            self.weights.release(layer);
        }
        pass.norm(self.layout.final_norm())?;
        let mut values = vec![0f32; prompts.len() * config.text_len * width];
        let mut first = 0;
        for (out, &length) in values.chunks_exact_mut(config.text_len * width).zip(&lengths) {
            out[..length * width].copy_from_slice(&pass.normed[first * width..][..length * width]);
            first += length;
        }
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            return Err(TextError::Prompt {
                number: at / (config.text_len * width) + 1,
                reason: format!("the encoder gave {}; its weights are damaged", values[at]),
            });
        }
        Ok(TextStates { text_len: config.text_len, width, lengths, values })
    }

    /// Rows of the token table, each read on its own: a vocabulary of 256,384 rows is never read whole.
    fn embed(&self, prompts: &[Vec<u32>]) -> Result<Vec<f32>, TextError> {
        let name = self.embedding();
        let width = self.config.d_model;
        let count: usize = prompts.iter().map(Vec::len).sum();
        let mut x = vec![0f32; count * width];
        for (out, &id) in x.chunks_exact_mut(width).zip(prompts.iter().flatten()) {
            self.weights.read(name, (id as usize, 1, width), out)?;
        }
        Ok(x)
    }

    fn embedding(&self) -> &'static str {
        self.layout.embedding(|name| self.weights.has(name))
    }

    fn vector(&self, name: &str) -> Result<Vec<f32>, TextError> {
        let elements = self.weights.shape(name)?.iter().product();
        let mut values = vec![0f32; elements];
        self.weights.read(name, (0, 1, elements), &mut values)?;
        Ok(values)
    }

    /// Every tensor's shape.
    fn check(&self) -> Result<(), TextError> {
        let config = &self.config;
        let (model, inner) = (config.d_model, config.num_heads * config.d_kv);
        let expect = |name: &str, shape: &[usize]| {
            let have = self.weights.shape(name)?;
            if have == shape {
                return Ok(());
            }
            let reason = format!("is {have:?}, but the config asks for {shape:?}; is it the encoder of this config?");
            Err(TextError::Tensor { name: name.to_string(), reason })
        };
        expect(self.embedding(), &[config.vocab_size, model])?;
        expect(self.layout.final_norm(), &[model])?;
        for layer in 0..config.num_layers {
            for (part, shape) in [
                (Part::AttentionNorm, &[model][..]),
                (Part::Query, &[inner, model]),
                (Part::Key, &[inner, model]),
                (Part::Value, &[inner, model]),
                (Part::Output, &[model, inner]),
                (Part::PositionBias, &[config.relative_attention_num_buckets, config.num_heads]),
                (Part::FeedForwardNorm, &[model]),
                (Part::Gate, &[config.d_ff, model]),
                (Part::Up, &[config.d_ff, model]),
                (Part::Down, &[model, config.d_ff]),
            ] {
                expect(&self.layout.name(layer, part), shape)?;
            }
        }
        let beyond = self.layout.name(config.num_layers, Part::Query);
        if self.weights.has(&beyond) {
            let reason = format!(
                "is there although the config has {} layers; is it the encoder of this config?",
                config.num_layers
            );
            return Err(TextError::Tensor { name: beyond, reason });
        }
        Ok(())
    }
}

/// Sizes from the shapes, where no config says them.
fn infer(checkpoint: &Checkpoint, layout: Layout) -> Result<TextConfig, TextError> {
    let sides = |name: &str| -> Result<(usize, usize), TextError> {
        let (tensor, _) = float_tensor(checkpoint, name)?;
        match tensor.shape.as_slice() {
            &[rows, columns] => Ok((rows as usize, columns as usize)),
            shape => {
                Err(TextError::Tensor { name: name.to_string(), reason: format!("is {shape:?}; it must be a matrix") })
            }
        }
    };
    let (vocab_size, d_model) = sides(layout.embedding(|name| checkpoint.tensor(name).is_some()))?;
    let query = layout.name(0, Part::Query);
    let (inner, _) = sides(&query)?;
    let (relative_attention_num_buckets, num_heads) = sides(&layout.name(0, Part::PositionBias))?;
    if num_heads == 0 || !inner.is_multiple_of(num_heads) {
        let reason = format!("has {inner} rows, which {num_heads} heads do not divide");
        return Err(TextError::Tensor { name: query, reason });
    }
    let num_layers =
        (0..=MAX_LAYERS).take_while(|&layer| checkpoint.tensor(&layout.name(layer, Part::Query)).is_some()).count();
    let config = TextConfig {
        vocab_size,
        d_model,
        d_kv: inner / num_heads,
        d_ff: sides(&layout.name(0, Part::Gate))?.0,
        num_layers,
        num_heads,
        relative_attention_num_buckets,
        relative_attention_max_distance: distance(),
        layer_norm_epsilon: epsilon(),
        feed_forward_proj: feed_forward(),
        pad_token_id: 0,
        eos_token_id: eos(),
        text_len: text_len(),
    };
    config.check().map_err(|reason| TextError::Tensor { name: query, reason })?;
    Ok(config)
}

/// What one call computes with.
struct Pass<'a> {
    encoder: &'a TextEncoder,
    kernels: &'a Kernels,
    lengths: &'a [usize],
    /// The residual stream, rows of all prompts one after another.
    x: Vec<f32>,
    normed: Vec<f32>,
    /// Queries, keys, values and attention's result; or the two halves of the feed-forward layer.
    wide: [Vec<f32>; 4],
    scores: Vec<f32>,
    transposed: Vec<f32>,
    weights: Vec<f32>,
    workspace: Workspace,
}

/// Where a product goes.
enum Target<'a> {
    Store(&'a mut Vec<f32>, Activation),
    Add(&'a mut [f32]),
}

impl Pass<'_> {
    fn norm(&mut self, name: &str) -> Result<(), TextError> {
        let config = &self.encoder.config;
        let gain = self.encoder.vector(name)?;
        let rows = self.x.len() / config.d_model;
        self.normed.resize(self.x.len(), 0.0);
        let out = RowsMut::dense("normed", &mut self.normed, rows, config.d_model)?;
        let sink = RowSink::F32 { out, operands: Operands::F32 };
        let x = Rows::dense("states", &self.x, rows, config.d_model)?;
        self.kernels.rms_norm(x, config.layer_norm_epsilon, &gain, None, sink, &mut self.workspace)?;
        Ok(())
    }

    fn attention(&mut self, layer: usize) -> Result<(), TextError> {
        let encoder = self.encoder;
        let name = |part| encoder.layout.name(layer, part);
        let config = &encoder.config;
        self.norm(&name(Part::AttentionNorm))?;
        let [mut query, mut key, mut value, mut out] = std::mem::take(&mut self.wide);
        let normed = std::mem::take(&mut self.normed);
        for (part, out) in [(Part::Query, &mut query), (Part::Key, &mut key), (Part::Value, &mut value)] {
            self.product(&name(part), &normed, Target::Store(out, Activation::Identity))?;
        }
        self.normed = normed;
        let table = encoder.vector(&name(Part::PositionBias))?;
        out.resize(query.len(), 0.0);
        let inner = config.num_heads * config.d_kv;
        let mut first = 0;
        for &length in self.lengths {
            let rows = first * inner..(first + length) * inner;
            let operands = [&query[rows.clone()], &key[rows.clone()], &value[rows.clone()]];
            for head in 0..config.num_heads {
                let bias = |distance: i64| table[config.bucket(distance) * config.num_heads + head];
                self.head(operands, length, head, &bias, &mut out[rows.clone()])?;
            }
            first += length;
        }
        let mut x = std::mem::take(&mut self.x);
        self.product(&name(Part::Output), &out, Target::Add(&mut x))?;
        self.x = x;
        self.wide = [query, key, value, out];
        Ok(())
    }

    /// One head of one prompt: `softmax(q·kᵀ + bias)·v`, no scaling of the scores.
    fn head(
        &mut self,
        [query, key, value]: [&[f32]; 3],
        length: usize,
        head: usize,
        bias: &dyn Fn(i64) -> f32,
        out: &mut [f32],
    ) -> Result<(), TextError> {
        let config = &self.encoder.config;
        let (width, inner) = (config.d_kv, config.num_heads * config.d_kv);
        let column = head * width;
        let epilogue = FloatEpilogue::default();
        self.scores.resize(length * length, 0.0);
        let scores = RowsMut::dense("scores", &mut self.scores[..length * length], length, length)?;
        let sink = GemmSink::F32 { out: scores, operands: Operands::F32 };
        let keys = FloatWeights::OutIn(Rows::new("head", &key[column..], length, width, inner)?);
        let queries = Rows::new("head", &query[column..], length, width, inner)?;
        self.kernels.gemm_f32(queries, &keys, Operands::F32, &epilogue, sink, &mut self.workspace)?;
        // Biases by distance: key minus query from −(length−1) to length−1.
        let biases: Vec<f32> = (1 - length as i64..length as i64).map(bias).collect();
        for (row, scores) in self.scores[..length * length].chunks_exact_mut(length).enumerate() {
            let biases = &biases[length - 1 - row..][..length];
            let mut largest = f32::NEG_INFINITY;
            for (score, bias) in scores.iter_mut().zip(biases) {
                *score += bias;
                largest = largest.max(*score);
            }
            let mut total = 0f32;
            for score in scores.iter_mut() {
                *score = trefoil_kernels::math::exp(*score - largest);
                total += *score;
            }
            for score in scores.iter_mut() {
                *score /= total;
            }
        }
        let values = Rows::new("head", &value[column..], length, width, inner)?;
        self.transposed.resize(width * length, 0.0);
        for key in 0..length {
            for (dim, &value) in values.row(key).iter().enumerate() {
                self.transposed[dim * length + key] = value;
            }
        }
        let probabilities = Rows::dense("probabilities", &self.scores[..length * length], length, length)?;
        let values = FloatWeights::OutIn(Rows::dense("values", &self.transposed[..width * length], width, length)?);
        let out = RowsMut::new("head", &mut out[column..], length, width, inner)?;
        let sink = GemmSink::F32 { out, operands: Operands::F32 };
        self.kernels.gemm_f32(probabilities, &values, Operands::F32, &epilogue, sink, &mut self.workspace)?;
        Ok(())
    }

    fn feed_forward(&mut self, layer: usize) -> Result<(), TextError> {
        let encoder = self.encoder;
        let name = |part| encoder.layout.name(layer, part);
        self.norm(&name(Part::FeedForwardNorm))?;
        let [mut gate, mut up, key, out] = std::mem::take(&mut self.wide);
        let normed = std::mem::take(&mut self.normed);
        self.product(&name(Part::Gate), &normed, Target::Store(&mut gate, Activation::GeluTanh))?;
        self.product(&name(Part::Up), &normed, Target::Store(&mut up, Activation::Identity))?;
        self.normed = normed;
        for (gate, up) in gate.iter_mut().zip(&up) {
            *gate *= up;
        }
        let mut x = std::mem::take(&mut self.x);
        self.product(&name(Part::Down), &gate, Target::Add(&mut x))?;
        self.x = x;
        self.wide = [gate, up, key, out];
        Ok(())
    }

    /// `input · Wᵀ`, the weights as INT8 tiles, or widened in pieces of whole rows (output columns).
    fn product(&mut self, name: &str, input: &[f32], mut target: Target<'_>) -> Result<(), TextError> {
        let encoder = self.encoder;
        let &[outputs, inputs] = encoder.weights.shape(name)?.as_slice() else {
            return Err(TextError::Tensor { name: name.to_string(), reason: "is no matrix".to_string() });
        };
        let tokens = input.len() / inputs;
        if let Target::Store(out, _) = &mut target {
            out.resize(tokens * outputs, 0.0);
        }
        let tiles = encoder.weights.tiles(name)?;
        let piece = if tiles.is_some() { outputs } else { (WIDENED / inputs).clamp(1, outputs) };
        for first in (0..outputs).step_by(piece) {
            let rows = piece.min(outputs - first);
            let weights = if let Some(tiles) = tiles {
                FloatWeights::Tiled(tiles)
            } else {
                self.weights.resize(rows * inputs, 0.0);
                encoder.weights.read(name, (first, rows, inputs), &mut self.weights)?;
                FloatWeights::OutIn(Rows::dense("weights", &self.weights, rows, inputs)?)
            };
            let input = Rows::dense("states", input, tokens, inputs)?;
            let (sink, activation) = match &mut target {
                Target::Store(out, activation) => {
                    let out = RowsMut::new("product", &mut out[first..], tokens, rows, outputs)?;
                    (GemmSink::F32 { out, operands: Operands::F32 }, *activation)
                }
                Target::Add(out) => {
                    let state = RowsMut::new("product", &mut out[first..], tokens, rows, outputs)?;
                    (GemmSink::Residual { state, gate: None, precision: Operands::F32 }, Activation::Identity)
                }
            };
            let epilogue = FloatEpilogue { activation, ..FloatEpilogue::default() };
            self.kernels.gemm_f32(input, &weights, Operands::F32, &epilogue, sink, &mut self.workspace)?;
        }
        Ok(())
    }
}
