//! A clip: everything fixed before its first block, and the state that runs along.

use crate::VideoError;
use crate::config::PATCH;
use crate::dit::patches::{patchify, unpatchify};
use crate::dit::{Conditions, Host, TimeEmbedding};
use crate::model::Model;
use crate::sampler::{History, Sampler};
use crate::schedule::Trajectory;
use crate::tensors::Tensor;
use std::sync::atomic::{AtomicU64, Ordering};
use trefoil_kernels::{RotaryTable, rotary_table};

/// Clips made so far.
static CLIPS: AtomicU64 = AtomicU64::new(0);
/// Most tokens of a clip: a kernel's matrices stay within 32-bit counts.
const MAX_TOKENS: usize = 1 << 20;

/// The conditions of a clip. Engines share it; nothing in it changes.
#[derive(Debug)]
pub struct Clip {
    id: u64,
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
        Ok(Clip {
            id: CLIPS.fetch_add(1, Ordering::Relaxed),
            trajectory: Trajectory { steps: sampler.steps(), branches: sampler.branches(), layers: config.layers },
            sampler,
            shape,
            width: config.width(),
            patch: config.patch(),
            rotary: rotary_table(grid, config.head_dim)?,
            times,
            contexts,
        })
    }

    /// A number that no other clip of this process has, so that an engine knows whose conditions it holds.
    pub fn id(&self) -> u64 {
        self.id
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
