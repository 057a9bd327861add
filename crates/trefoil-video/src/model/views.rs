//! The weights of one block, as references into the model.

use super::{Model, Part};
use crate::VideoError;
use std::ops::Range;
use trefoil_kernels::FloatWeights;
use trefoil_weights::TiledView;
use trefoil_weights::tile::{TILE, TileShape};

/// Low-rank factors of a linear layer.
#[derive(Debug, Clone, Copy)]
pub struct AdapterView<'a> {
    /// `A`: d_in → rank.
    pub down: FloatWeights<'a>,
    /// `B`: rank → d_out.
    pub up: FloatWeights<'a>,
    /// Factor of the delta.
    pub factor: f32,
}

impl AdapterView<'_> {
    /// Rank.
    pub fn rank(&self) -> usize {
        self.down.shape().1
    }
}

/// A linear layer of the expert that runs.
#[derive(Debug, Clone, Copy)]
pub struct LinearView<'a> {
    /// Base weights.
    pub weights: FloatWeights<'a>,
    /// One value per output.
    pub bias: &'a [f32],
    /// The expert's factors.
    pub adapter: Option<AdapterView<'a>>,
}

impl<'a> LinearView<'a> {
    /// The outputs `columns`, which start at a whole tile: in tile order they lie together, so this is a view too.
    ///
    /// # Errors
    /// Columns that are not there or start inside a tile; weights that are not quantised.
    pub fn columns(&self, columns: Range<usize>) -> Result<LinearView<'a>, VideoError> {
        let refuse = || VideoError::Input {
            what: "a slice of the weights".to_string(),
            reason: format!("columns {columns:?} of {} are no whole tiles", self.bias.len()),
        };
        let bias = self.bias.get(columns.clone()).ok_or_else(refuse)?;
        let part = |weights: &FloatWeights<'a>| -> Result<FloatWeights<'a>, VideoError> {
            let view = tiled(weights)?;
            let shape = TileShape::new(view.shape.d_in, columns.len()).filter(|_| columns.start.is_multiple_of(TILE));
            let shape = shape.ok_or_else(refuse)?;
            let first = columns.start / TILE * view.shape.column_bytes();
            let codes = view.codes.get(first..first + shape.bytes()).ok_or_else(refuse)?;
            let scales = view.scales.get(columns.start..columns.start + shape.padded_out()).ok_or_else(refuse)?;
            Ok(FloatWeights::Tiled(TiledView { shape, codes, scales }))
        };
        let adapter = match &self.adapter {
            Some(adapter) => Some(AdapterView { up: part(&adapter.up)?, ..*adapter }),
            None => None,
        };
        Ok(LinearView { weights: part(&self.weights)?, bias, adapter })
    }
}

/// Projections and norms of one attention.
#[derive(Debug, Clone, Copy)]
pub struct AttentionView<'a> {
    /// Queries.
    pub query: LinearView<'a>,
    /// Keys.
    pub key: LinearView<'a>,
    /// Values.
    pub value: LinearView<'a>,
    /// Output.
    pub out: LinearView<'a>,
    /// Gain of the norm of queries.
    pub query_gain: &'a [f32],
    /// Gain of the norm of keys.
    pub key_gain: &'a [f32],
}

/// One block as one expert sees it.
#[derive(Debug, Clone, Copy)]
pub struct BlockView<'a> {
    /// Self-attention and cross-attention.
    pub attention: [AttentionView<'a>; 2],
    /// Gain of the norm before cross-attention.
    pub norm_gain: &'a [f32],
    /// Bias of the norm before cross-attention.
    pub norm_bias: &'a [f32],
    /// Feed-forward, in and out.
    pub ffn: [LinearView<'a>; 2],
    /// `[6, d]`: shift, scale and gate of self-attention, then of the feed-forward.
    pub table: &'a [f32],
}

/// The INT8 form of a matrix, which the model was checked to have.
pub(crate) fn tiled<'a>(weights: &FloatWeights<'a>) -> Result<TiledView<'a>, VideoError> {
    match weights {
        FloatWeights::Tiled(view) => Ok(*view),
        FloatWeights::OutIn(_) => Err(VideoError::Input {
            what: "the weights".to_string(),
            reason: "they are not quantised; pack the model with `trefoil video pack`".to_string(),
        }),
    }
}

impl Model {
    /// Block `block` as expert `expert` runs it.
    ///
    /// # Errors
    /// A tensor that is not there (which [`Model::open`] has checked).
    pub fn block(&self, expert: usize, block: usize) -> Result<BlockView<'_>, VideoError> {
        let width = self.config().width();
        let stem = format!("blocks.{block}");
        let part = self.part(expert);
        let table = part.vector(&format!("{stem}.scale_shift_table"), 6 * width)?;
        Ok(BlockView {
            attention: [
                self.attention(expert, &format!("{stem}.attn1"))?,
                self.attention(expert, &format!("{stem}.attn2"))?,
            ],
            norm_gain: part.vector(&format!("{stem}.norm2.weight"), width)?,
            norm_bias: part.vector(&format!("{stem}.norm2.bias"), width)?,
            ffn: [
                self.linear(expert, &format!("{stem}.ffn.net.0.proj"))?,
                self.linear(expert, &format!("{stem}.ffn.net.2"))?,
            ],
            table,
        })
    }

    /// Layer `layer` (`time_embedder.linear_1`, …) of the expert's condition embedder.
    pub(crate) fn embedder(&self, expert: usize, layer: &str) -> Result<LinearView<'_>, VideoError> {
        self.outside("condition_embedder", expert, layer)
    }

    /// The expert's output projection.
    pub(crate) fn head(&self, expert: usize) -> Result<LinearView<'_>, VideoError> {
        self.outside("proj_out", expert, "")
    }

    /// Patch embedding, the same for all experts of a base.
    pub(crate) fn patch_embedding(&self, expert: usize) -> Result<LinearView<'_>, VideoError> {
        self.part(expert).plain("patch_embedding")
    }

    /// `[2, d]`: shift and scale of the last norm, the same for all experts of a base.
    pub(crate) fn head_table(&self, expert: usize) -> Result<&[f32], VideoError> {
        self.part(expert).vector("scale_shift_table", 2 * self.config().width())
    }

    fn outside(&self, owner: &str, expert: usize, layer: &str) -> Result<LinearView<'_>, VideoError> {
        let suffix = if self.record().experts[expert].own_embedder { "_lora" } else { "" };
        let dot = if layer.is_empty() { "" } else { "." };
        self.part(expert).plain(&format!("{owner}{suffix}{dot}{layer}"))
    }

    fn attention(&self, expert: usize, stem: &str) -> Result<AttentionView<'_>, VideoError> {
        let width = self.config().width();
        Ok(AttentionView {
            query: self.linear(expert, &format!("{stem}.to_q"))?,
            key: self.linear(expert, &format!("{stem}.to_k"))?,
            value: self.linear(expert, &format!("{stem}.to_v"))?,
            out: self.linear(expert, &format!("{stem}.to_out.0"))?,
            query_gain: self.part(expert).vector(&format!("{stem}.norm_q.weight"), width)?,
            key_gain: self.part(expert).vector(&format!("{stem}.norm_k.weight"), width)?,
        })
    }

    fn linear(&self, expert: usize, stem: &str) -> Result<LinearView<'_>, VideoError> {
        let part = self.part(expert);
        let mut view = part.plain(stem)?;
        if let (true, Some(scaling)) = (self.record().experts[expert].adapter, &part.adapter) {
            let down = format!("{stem}.lora_A.weight");
            if part.has(&down) {
                view.adapter = Some(AdapterView {
                    down: part.matrix(&down)?,
                    up: part.matrix(&format!("{stem}.lora_B.weight"))?,
                    factor: scaling.of(stem),
                });
            }
        }
        Ok(view)
    }
}

impl Part {
    /// A layer without an adapter.
    fn plain(&self, stem: &str) -> Result<LinearView<'_>, VideoError> {
        let weights = self.matrix(&format!("{stem}.weight"))?;
        let bias = self.vector(&format!("{stem}.bias"), weights.shape().1)?;
        Ok(LinearView { weights, bias, adapter: None })
    }
}
