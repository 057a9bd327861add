//! Names of the tensors of a text encoder, in transformers' layout and in Wan's own.

/// Names of the tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    Transformers,
    Original,
}

/// A matrix or vector of a layer.
#[derive(Debug, Clone, Copy)]
pub(super) enum Part {
    AttentionNorm,
    Query,
    Key,
    Value,
    Output,
    PositionBias,
    FeedForwardNorm,
    Gate,
    Up,
    Down,
}

impl Layout {
    pub(super) fn name(self, layer: usize, part: Part) -> String {
        match self {
            Layout::Transformers => {
                let rest = match part {
                    Part::AttentionNorm => "0.layer_norm",
                    Part::Query => "0.SelfAttention.q",
                    Part::Key => "0.SelfAttention.k",
                    Part::Value => "0.SelfAttention.v",
                    Part::Output => "0.SelfAttention.o",
                    Part::PositionBias => "0.SelfAttention.relative_attention_bias",
                    Part::FeedForwardNorm => "1.layer_norm",
                    Part::Gate => "1.DenseReluDense.wi_0",
                    Part::Up => "1.DenseReluDense.wi_1",
                    Part::Down => "1.DenseReluDense.wo",
                };
                format!("encoder.block.{layer}.layer.{rest}.weight")
            }
            Layout::Original => {
                let rest = match part {
                    Part::AttentionNorm => "norm1",
                    Part::Query => "attn.q",
                    Part::Key => "attn.k",
                    Part::Value => "attn.v",
                    Part::Output => "attn.o",
                    Part::PositionBias => "pos_embedding.embedding",
                    Part::FeedForwardNorm => "norm2",
                    Part::Gate => "ffn.gate.0",
                    Part::Up => "ffn.fc1",
                    Part::Down => "ffn.fc2",
                };
                format!("blocks.{layer}.{rest}.weight")
            }
        }
    }

    pub(super) fn final_norm(self) -> &'static str {
        match self {
            Layout::Transformers => "encoder.final_layer_norm.weight",
            Layout::Original => "norm.weight",
        }
    }

    /// The token table, under whichever name it is there.
    pub(super) fn embedding(self, has: impl Fn(&str) -> bool) -> &'static str {
        match self {
            Layout::Transformers if !has("shared.weight") => "encoder.embed_tokens.weight",
            Layout::Transformers => "shared.weight",
            Layout::Original => "token_embedding.weight",
        }
    }
}
