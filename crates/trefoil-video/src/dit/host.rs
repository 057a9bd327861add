//! What runs on the CPU around the blocks, in place on the shared state: embeddings, head.
//!
//! Always in f32 with the best instruction set of this machine, whatever the engines' own, so a `w8a8` clip has the same bits
//! on every engine here. Each value is one sum in a fixed order, so the number of cores changes nothing either.

use super::patches::from_head_order;
use super::{NumericPath, ffn_rows, floats, floats_mut, grown};
use crate::VideoError;
use crate::model::{LinearView, Model};
use std::sync::Arc;
use trefoil_kernels::math::silu;
use trefoil_kernels::{Activation, FloatEpilogue, GemmSink, Kernels, Modulation, Operands, RowSink, Rows, Workspace};

/// A timestep as an expert sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct TimeEmbedding {
    /// `[d]`, for the head.
    pub embedding: Vec<f32>,
    /// `[6, d]`, for the blocks.
    pub modulation: Vec<f32>,
}

/// The CPU side of an engine: cores and scratch.
#[derive(Debug)]
pub struct Host {
    kernels: Arc<Kernels>,
    workspace: Workspace,
    normed: Vec<f32>,
    projected: Vec<f32>,
}

impl Host {
    /// A host on the cores of `kernels`.
    pub fn new(kernels: Arc<Kernels>) -> Host {
        Host { kernels, workspace: Workspace::new(), normed: Vec::new(), projected: Vec::new() }
    }

    /// The kernels it runs on.
    pub fn kernels(&self) -> &Arc<Kernels> {
        &self.kernels
    }

    /// Bytes of scratch held.
    pub fn scratch_bytes(&self) -> usize {
        self.workspace.bytes() + (self.normed.capacity() + self.projected.capacity()) * size_of::<f32>()
    }

    /// `W·x + b`, then `activation`.
    fn linear(
        &mut self,
        input: Rows<'_, f32>,
        layer: &LinearView<'_>,
        activation: Activation,
        out: &mut [f32],
        operands: Operands,
    ) -> Result<(), VideoError> {
        let epilogue = FloatEpilogue { bias: Some(layer.bias), adapter: None, activation };
        let out = floats_mut("the output", out, input.rows(), layer.weights.shape().1)?;
        let sink = GemmSink::F32 { out, operands };
        self.kernels.gemm_f32(input, &layer.weights, Operands::F32, &epilogue, sink, &mut self.workspace)?;
        Ok(())
    }

    /// The timestep `t` (0..=1000) for an expert. Cosines come before sines; the angles are f64.
    ///
    /// # Errors
    /// Weights that do not fit (which opening the model has checked).
    pub fn time_embedding(&mut self, model: &Model, expert: usize, t: f32) -> Result<TimeEmbedding, VideoError> {
        let (width, half) = (model.config().width(), model.config().frequency / 2);
        let angle = |index: usize| f64::from(t) * 10_000f64.powf(-(index as f64) / half as f64);
        let mut sinusoid: Vec<f32> = (0..half).map(|index| angle(index).cos() as f32).collect();
        sinusoid.extend((0..half).map(|index| angle(index).sin() as f32));
        let mut hidden = vec![0f32; width];
        let input = floats("the sinusoid", &sinusoid, 1, 2 * half)?;
        let first = model.embedder(expert, "time_embedder.linear_1")?;
        self.linear(input, &first, Activation::Silu, &mut hidden, Operands::F32)?;
        let mut embedding = vec![0f32; width];
        let second = model.embedder(expert, "time_embedder.linear_2")?;
        self.linear(
            floats("the hidden timestep", &hidden, 1, width)?,
            &second,
            Activation::Identity,
            &mut embedding,
            Operands::F32,
        )?;
        let activated: Vec<f32> = embedding.iter().map(|&value| silu(value)).collect();
        let mut modulation = vec![0f32; 6 * width];
        let projection = model.embedder(expert, "time_proj")?;
        self.linear(
            floats("the timestep", &activated, 1, width)?,
            &projection,
            Activation::Identity,
            &mut modulation,
            Operands::F32,
        )?;
        Ok(TimeEmbedding { embedding, modulation })
    }

    /// Text states (`text × text_dim`, zero rows behind the prompt) as an expert's context, `text × d`. Zero rows go through too
    /// and are attended to: there is no mask anywhere.
    ///
    /// # Errors
    /// A text of another width.
    pub fn text_context(&mut self, model: &Model, expert: usize, text: &[f32]) -> Result<Vec<f32>, VideoError> {
        let (width, text_dim) = (model.config().width(), model.config().text_dim);
        let rows = text.len() / text_dim;
        let mut hidden = vec![0f32; rows * width];
        let first = model.embedder(expert, "text_embedder.linear_1")?;
        self.linear(
            floats("the text", text, rows, text_dim)?,
            &first,
            Activation::GeluTanh,
            &mut hidden,
            Operands::F32,
        )?;
        let mut context = vec![0f32; rows * width];
        let second = model.embedder(expert, "text_embedder.linear_2")?;
        self.linear(
            floats("the hidden text", &hidden, rows, width)?,
            &second,
            Activation::Identity,
            &mut context,
            Operands::F32,
        )?;
        Ok(context)
    }

    /// Patch embedding: the start of a step. On `w8a8` the state is FP16 from the start.
    ///
    /// # Errors
    /// Buffers of other sizes.
    pub fn embed(
        &mut self,
        model: &Model,
        expert: usize,
        path: NumericPath,
        latent: &[f32],
        hidden: &mut [f32],
    ) -> Result<(), VideoError> {
        let columns = model.config().patch();
        let input = floats("the latent", latent, latent.len() / columns, columns)?;
        let operands = if path == NumericPath::W8a8 { Operands::F16 } else { Operands::F32 };
        self.linear(input, &model.patch_embedding(expert)?, Activation::Identity, hidden, operands)
    }

    /// The end of a branch: last norm with the timestep's modulation, output projection, and the order of the latent.
    ///
    /// # Errors
    /// Buffers of other sizes.
    pub fn head(
        &mut self,
        model: &Model,
        expert: usize,
        time: &TimeEmbedding,
        hidden: &[f32],
        velocity: &mut [f32],
    ) -> Result<(), VideoError> {
        let (width, patch) = (model.config().width(), model.config().patch());
        let table = model.head_table(expert)?;
        let row = |index: usize| -> Vec<f32> {
            let table = &table[index * width..(index + 1) * width];
            table.iter().zip(&time.embedding).map(|(table, time)| table + time).collect()
        };
        let (shift, scale) = (row(0), row(1));
        let projection = model.head(expert)?;
        let eps = model.config().eps;
        let (mut normed, mut projected) = (std::mem::take(&mut self.normed), std::mem::take(&mut self.projected));
        let most = ffn_rows(hidden.len() / width);
        let chunks = hidden.chunks(most * width).zip(velocity.chunks_mut(most * patch));
        for (hidden, velocity) in chunks {
            let rows = hidden.len() / width;
            let normed = grown(&mut normed, rows * width);
            let sink = RowSink::F32 { out: floats_mut("the norm", normed, rows, width)?, operands: Operands::F32 };
            let modulation = Modulation::AdaLn { scale: &scale, shift: &shift };
            let input = floats("the hidden state", hidden, rows, width)?;
            self.kernels.layer_norm(input, eps, modulation, sink, &mut self.workspace)?;
            let projected = grown(&mut projected, rows * patch);
            let input = floats("the norm", normed, rows, width)?;
            self.linear(input, &projection, Activation::Identity, projected, Operands::F32)?;
            for (projected, velocity) in projected.chunks_exact(patch).zip(velocity.chunks_exact_mut(patch)) {
                from_head_order(projected, velocity);
            }
        }
        (self.normed, self.projected) = (normed, projected);
        Ok(())
    }
}
