//! A clip: everything fixed before its first block, and the state that runs along.

use crate::VideoError;
use crate::config::PATCH;
use crate::dit::patches::{patchify, unpatchify};
use crate::dit::{Conditions, Host, TimeEmbedding};
use crate::model::Model;
use crate::sampler::{History, Sampler};
use crate::schedule::Trajectory;
use crate::tensors::Tensor;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering};
use trefoil_kernels::{RotaryTable, rotary_table};

/// Most tokens of a clip: a kernel's matrices stay within 32-bit counts.
pub const MAX_TOKENS: usize = 1 << 20;

/// Numbers the clips of this process.
static CLIPS: AtomicU64 = AtomicU64::new(0);

/// The conditions of a clip. Engines share it; nothing in it changes.
#[derive(Debug)]
pub struct Clip {
    serial: u64,
    sampler: Sampler,
    trajectory: Trajectory,
    /// `[channels, frames, height, width]` of the latent.
    shape: [usize; 4],
    width: usize,
    patch: usize,
    rotary: RotaryTable,
    /// Per step.
    times: Vec<TimeEmbedding>,
    /// Per expert and branch, where a step needs it.
    contexts: Vec<Vec<Option<Vec<f32>>>>,
}

impl Clip {
    /// Computes the conditions of a clip: text context of every expert that acts, timestep embeddings, positions.
    ///
    /// `noise` is `[C, F, H, W]` or `[1, C, F, H, W]`; `text` and `negative` are `[rows, text_dim]` or with a leading 1, padded with zero
    /// rows as the model was trained (512 for the released ones). `negative` is needed with guidance.
    ///
    /// # Errors
    /// Tensors of other shapes than the model's; guidance without `negative`.
    pub fn new(
        host: &mut Host,
        model: &Model,
        noise: &Tensor,
        text: &Tensor,
        negative: Option<&Tensor>,
    ) -> Result<Clip, VideoError> {
        let (config, sampler) = (model.config(), model.sampler().clone());
        let shape = latent_shape(noise, config.channels)?;
        let [_, frames, height, width] = shape;
        let grid = [frames, height / PATCH, width / PATCH];
        let tokens = grid.iter().product::<usize>();
        if tokens > MAX_TOKENS {
            return Err(noise.refuse(format!("{tokens} tokens are above {MAX_TOKENS}")));
        }
        let mut texts = vec![text_rows(text, config.text_dim)?];
        match (sampler.branches(), negative) {
            (2, Some(negative)) => texts.push(text_rows(negative, config.text_dim)?),
            (2, None) => {
                return Err(VideoError::Input {
                    what: "negative text".to_string(),
                    reason: format!(
                        "the sampler has guidance {}, so a second text is needed; give one, or a sampler with guidance 1",
                        sampler.guidance
                    ),
                });
            }
            _ => {}
        }
        let mut contexts = vec![vec![None; texts.len()]; model.record().experts.len()];
        let mut times = Vec::with_capacity(sampler.steps());
        for (&timestep, &expert) in sampler.timesteps.iter().zip(&sampler.experts) {
            times.push(host.time_embedding(model, expert, timestep)?);
            for (context, text) in contexts[expert].iter_mut().zip(&texts) {
                if context.is_none() {
                    *context = Some(host.text_context(model, expert, text)?);
                }
            }
        }
        Clip::assemble(model, shape, times, contexts)
    }

    fn assemble(
        model: &Model,
        shape: [usize; 4],
        times: Vec<TimeEmbedding>,
        contexts: Vec<Vec<Option<Vec<f32>>>>,
    ) -> Result<Clip, VideoError> {
        let (config, sampler) = (model.config(), model.sampler().clone());
        let [_, frames, height, width] = shape;
        Ok(Clip {
            serial: CLIPS.fetch_add(1, Ordering::Relaxed),
            trajectory: Trajectory { steps: sampler.steps(), branches: sampler.branches(), layers: config.layers },
            sampler,
            shape,
            width: config.width(),
            patch: config.patch(),
            rotary: rotary_table([frames, height / PATCH, width / PATCH], config.head_dim)?,
            times,
            contexts,
        })
    }

    /// Refuses text states that the model does not take, before a clip is made of them.
    ///
    /// # Errors
    /// Another width, or no row.
    pub fn check_text(model: &Model, text: &Tensor) -> Result<(), VideoError> {
        text_rows(text, model.config().text_dim).map(drop)
    }

    /// A number that no other clip of this process has, so that an engine knows whose conditions it holds.
    pub fn serial(&self) -> u64 {
        self.serial
    }

    /// Sizes of what its blocks need, for a copy in another process.
    pub(crate) fn outline(&self) -> ClipOutline {
        let lengths = |branches: &Vec<Option<Vec<f32>>>| {
            branches.iter().map(|context| context.as_ref().map_or(0, Vec::len)).collect()
        };
        ClipOutline { shape: self.shape, contexts: self.contexts.iter().map(lengths).collect() }
    }

    /// The values that [`ClipOutline`] describes, in its order: modulations of all steps, then contexts.
    pub(crate) fn values(&self) -> impl Iterator<Item = &[f32]> {
        let modulations = self.times.iter().map(|time| time.modulation.as_slice());
        modulations.chain(self.contexts.iter().flatten().filter_map(Option::as_deref))
    }

    /// The copy: conditions for blocks alone, without what the host needs. `next` reads as many values as it is told.
    ///
    /// # Errors
    /// An outline that does not fit the model, an error of `next`.
    pub(crate) fn copied(
        model: &Model,
        outline: &ClipOutline,
        next: &mut dyn FnMut(usize) -> Result<Vec<f32>, VideoError>,
    ) -> Result<Clip, VideoError> {
        let width = model.config().width();
        let fits = outline.contexts.len() == model.record().experts.len()
            && outline.contexts.iter().all(|branches| branches.len() == model.sampler().branches())
            && outline.contexts.iter().flatten().all(|len| len.is_multiple_of(width));
        if !fits {
            return Err(VideoError::Input {
                what: "a clip from another process".to_string(),
                reason: "its conditions do not fit the model".to_string(),
            });
        }
        let times = (0..model.sampler().steps())
            .map(|_| Ok(TimeEmbedding { embedding: Vec::new(), modulation: next(6 * width)? }))
            .collect::<Result<_, VideoError>>()?;
        let mut contexts = Vec::with_capacity(outline.contexts.len());
        for branches in &outline.contexts {
            let mut texts = Vec::with_capacity(branches.len());
            for &len in branches {
                texts.push(if len == 0 { None } else { Some(next(len)?) });
            }
            contexts.push(texts);
        }
        Clip::assemble(model, outline.shape, times, contexts)
    }

    /// Its block executions.
    pub fn trajectory(&self) -> Trajectory {
        self.trajectory
    }

    /// Its sampler.
    pub fn sampler(&self) -> &Sampler {
        &self.sampler
    }

    /// `[channels, frames, height, width]` of its latent.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// Tokens M.
    pub fn tokens(&self) -> usize {
        self.rotary.positions
    }

    /// Width d of the hidden state.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Expert of a step.
    pub fn expert(&self, step: usize) -> usize {
        self.sampler.experts[step]
    }

    /// Timestep of a step as its expert sees it.
    pub fn time(&self, step: usize) -> &TimeEmbedding {
        &self.times[step]
    }

    /// What the blocks of a branch need.
    ///
    /// # Errors
    /// A branch that the clip does not have.
    pub fn conditions(&self, step: usize, branch: usize) -> Result<Conditions<'_>, VideoError> {
        let context = self.contexts[self.expert(step)].get(branch).and_then(Option::as_deref);
        let context = context.ok_or_else(|| VideoError::Input {
            what: "text".to_string(),
            reason: format!("branch {branch} of step {step} has none"),
        })?;
        Ok(Conditions {
            context,
            text: context.len() / self.width,
            modulation: &self.times[step].modulation,
            rotary: &self.rotary,
        })
    }

    /// The state before the first execution.
    ///
    /// # Errors
    /// Noise of another shape than the clip was made for.
    pub fn start(&self, noise: &Tensor) -> Result<ClipState, VideoError> {
        let shape = latent_shape(noise, self.shape[0])?;
        if shape != self.shape {
            return Err(noise.refuse(format!("its shape is {shape:?}, the clip's {:?}", self.shape)));
        }
        let tokens = self.tokens();
        let guided = if self.trajectory.branches > 1 { tokens * self.patch } else { 0 };
        Ok(ClipState {
            hidden: vec![0.0; tokens * self.width],
            latent: patchify(&noise.values, self.shape),
            velocity: vec![0.0; tokens * self.patch],
            guided: vec![0.0; guided],
            history: History::default(),
            next: 0,
        })
    }

    /// Tokens × patch → `[C, F, H, W]`.
    pub fn unpatchify(&self, patches: &[f32]) -> Vec<f32> {
        unpatchify(patches, self.shape)
    }
}

/// Sizes of a clip's conditions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ClipOutline {
    /// `[channels, frames, height, width]` of the latent.
    pub(crate) shape: [usize; 4],
    /// Values of the context of each expert and branch; 0 where no step needs it.
    pub(crate) contexts: Vec<Vec<usize>>,
}

/// What runs along the trajectory.
#[derive(Debug, Clone, PartialEq)]
pub struct ClipState {
    /// Tokens × d.
    pub(crate) hidden: Vec<f32>,
    /// Tokens × patch.
    pub(crate) latent: Vec<f32>,
    /// The present branch's output, tokens × patch.
    pub(crate) velocity: Vec<f32>,
    /// With guidance: the first branch's output.
    pub(crate) guided: Vec<f32>,
    pub(crate) history: History,
    pub(crate) next: usize,
}

impl ClipState {
    /// Execution that comes next.
    pub fn next(&self) -> usize {
        self.next
    }

    /// The hidden state, tokens × d.
    pub fn hidden(&self) -> &[f32] {
        &self.hidden
    }

    /// The running latent, tokens × patch; [`Clip::unpatchify`] gives it its shape.
    pub fn latent(&self) -> &[f32] {
        &self.latent
    }

    /// Goes on from a state that another program left: `hidden` before execution `next` and the running latent, both in tokens.
    ///
    /// # Errors
    /// Other sizes, an execution outside the trajectory, or a place where the two are not the whole state (guidance, a
    /// multi-step solver).
    pub fn resume(clip: &Clip, next: usize, hidden: &[f32], latent: &[f32]) -> Result<ClipState, VideoError> {
        let (tokens, blocks) = (clip.tokens(), clip.trajectory().blocks());
        if next > blocks {
            return Err(VideoError::Cut { cut: next, blocks });
        }
        let refuse = |reason: String| VideoError::Input { what: "resumed state".to_string(), reason };
        if hidden.len() != tokens * clip.width || latent.len() != tokens * clip.patch {
            return Err(refuse(format!(
                "{} and {} values instead of {tokens}×{} and {tokens}×{}",
                hidden.len(),
                latent.len(),
                clip.width,
                clip.patch
            )));
        }
        if clip.trajectory.branches > 1 || clip.sampler.solver != crate::sampler::Solver::Euler {
            return Err(refuse(
                "hidden state and latent are the whole state only without guidance and with euler".to_string(),
            ));
        }
        Ok(ClipState {
            hidden: hidden.to_vec(),
            latent: latent.to_vec(),
            velocity: vec![0.0; latent.len()],
            guided: Vec::new(),
            history: History::default(),
            next,
        })
    }

    pub(super) fn hidden_bytes(&self) -> usize {
        self.hidden.len() * size_of::<f32>()
    }

    pub(super) fn latent_bytes(&self) -> usize {
        self.latent.len() * size_of::<f32>()
    }

    pub(super) fn extra_bytes(&self) -> usize {
        self.guided.len() * size_of::<f32>() + self.history.bytes()
    }
}

/// `[C, F, H, W]` of a latent that the model takes.
pub(crate) fn latent_shape(noise: &Tensor, channels: usize) -> Result<[usize; 4], VideoError> {
    let shape = match noise.shape.as_slice() {
        &[c, f, h, w] | &[1, c, f, h, w] => [c, f, h, w],
        other => {
            return Err(
                noise.refuse(format!("{other:?} is no latent; it must be [1, {channels}, frames, height, width]"))
            );
        }
    };
    let [have, frames, height, width] = shape;
    if have != channels || frames == 0 || height == 0 || width == 0 {
        return Err(noise.refuse(format!("{:?} is no latent of a model with {channels} channels", noise.shape)));
    }
    if !height.is_multiple_of(PATCH) || !width.is_multiple_of(PATCH) {
        return Err(noise.refuse(format!(
            "height and width of {:?} must be even: patches are 2×2, so pixels come in sixteens",
            noise.shape
        )));
    }
    Ok(shape)
}

/// Rows of text states of the width that the model takes.
pub(crate) fn text_rows(text: &Tensor, text_dim: usize) -> Result<&[f32], VideoError> {
    match text.shape.as_slice() {
        &[rows, width] | &[1, rows, width] if width == text_dim && rows > 0 => Ok(&text.values),
        other => Err(text.refuse(format!("{other:?} are no text states; they must be [1, rows, {text_dim}]"))),
    }
}
