//! A lane: an engine with its CPU side, carrying states along.

use super::{Clip, ClipState};
use crate::calibrate::Calibration;
use crate::dit::Host;
use crate::engine::{CpuEngine, Engine, EngineKind, EngineSpec, HeteroTensorEngine, OpenClEngine, Shape, ShapedEngine};
use crate::model::Model;
use crate::schedule::Piece;
use crate::tensors::Tensor;
use crate::{NumericPath, VideoError};
use std::sync::Arc;
use std::time::{Duration, Instant};
use trefoil_kernels::Kernels;
use trefoil_kernels::math::round_f16;

/// What a lane tells while it runs.
#[derive(Debug)]
pub enum Event<'a> {
    /// Blocks are done.
    Blocks {
        /// Engine.
        engine: &'a str,
        /// Which blocks.
        piece: &'a Piece,
        /// When they began.
        started: Instant,
        /// How long they took.
        elapsed: Duration,
        /// Executions of the clip done.
        done: usize,
        /// The hidden state behind them, tokens × d.
        hidden: &'a [f32],
    },
    /// A step is done.
    Step {
        /// Which.
        step: usize,
        /// Velocity (after guidance), tokens × patch.
        velocity: &'a [f32],
        /// The running latent, tokens × patch.
        latent: &'a [f32],
    },
}

/// An engine and the CPU cores that work around its blocks.
pub struct Lane {
    engine: Box<dyn Engine>,
    host: Host,
    model: Arc<Model>,
    /// Blocks per engine call; how often events come and how fast an interrupt acts. Changes no value.
    blocks_per_call: usize,
}

impl Lane {
    /// A lane of any engine; `model` is where its host finds embedders and heads.
    pub fn new(engine: Box<dyn Engine>, host: Host, model: Arc<Model>) -> Lane {
        Lane { engine, host, model, blocks_per_call: 1 }
    }

    /// An engine as the command line names it, with its host on the same cores. `calibration` is needed on `w8a8`.
    ///
    /// # Errors
    /// Cores that cannot be used, weights in another form than the path needs, missing or foreign activation scales, a device that is not
    /// there or lacks the path.
    pub fn open(
        spec: &EngineSpec,
        model: &Arc<Model>,
        path: NumericPath,
        calibration: Option<&Arc<Calibration>>,
    ) -> Result<Lane, VideoError> {
        // The device first: its driver's threads may inherit cores from this one.
        let device = match spec.kind {
            EngineKind::Cpu => None,
            EngineKind::OpenCl => Some(OpenClEngine::open(spec, model, path, calibration)?),
        };
        let kernels = Arc::new(Kernels::best(&spec.resolved_cores())?);
        let mut lane = match device {
            None => Lane::cpu(spec.to_string(), kernels, model, path, calibration)?,
            Some(engine) => Lane::new(Box::new(engine), Host::new(kernels), Arc::clone(model)),
        };
        if let Some(shape) = spec.shape {
            lane = lane.shaped(spec.to_string(), shape);
        }
        Ok(lane)
    }

    /// The same lane with its engine slowed to a stated rate, under another name (emulated).
    #[must_use]
    pub fn shaped(mut self, name: String, shape: Shape) -> Lane {
        self.engine = Box::new(ShapedEngine::new(name, self.engine, shape));
        self
    }

    /// A CPU and an OpenCL engine as one that computes every block on both, column by column; see [`HeteroTensorEngine`]. Its host is on
    /// the cores of both.
    ///
    /// # Errors
    /// As for [`HeteroTensorEngine::open`].
    pub fn hetero_tensor(
        specs: &[EngineSpec; 2],
        cpu_share: f64,
        model: &Arc<Model>,
        calibration: Option<&Arc<Calibration>>,
    ) -> Result<Lane, VideoError> {
        let engine = HeteroTensorEngine::open(specs, cpu_share, model, calibration)?;
        let host = Host::new(Arc::new(Kernels::best(engine.cores())?));
        Ok(Lane::new(Box::new(engine), host, Arc::clone(model)))
    }

    /// A CPU lane on kernels made by the caller, such as those of another instruction set.
    ///
    /// # Errors
    /// As for [`Lane::open`].
    pub fn cpu(
        name: String,
        kernels: Arc<Kernels>,
        model: &Arc<Model>,
        path: NumericPath,
        calibration: Option<&Arc<Calibration>>,
    ) -> Result<Lane, VideoError> {
        let engine = match (path, calibration) {
            (NumericPath::W8a8, Some(calibration)) => {
                CpuEngine::int8(name, Arc::clone(model), Arc::clone(calibration), Arc::clone(&kernels))?
            }
            _ => CpuEngine::float(name, Arc::clone(model), path, Arc::clone(&kernels))?,
        };
        Ok(Lane::new(Box::new(engine), Host::new(kernels), Arc::clone(model)))
    }

    /// Calls the engine for up to `blocks` blocks at a time, at least 1.
    #[must_use]
    pub fn with_blocks_per_call(mut self, blocks: usize) -> Lane {
        self.blocks_per_call = blocks.max(1);
        self
    }

    /// The engine.
    pub fn engine(&self) -> &dyn Engine {
        self.engine.as_ref()
    }

    /// The engine, to run blocks without the work around them.
    pub fn engine_mut(&mut self) -> &mut dyn Engine {
        self.engine.as_mut()
    }

    /// The CPU side.
    pub fn host_mut(&mut self) -> &mut Host {
        &mut self.host
    }

    /// The model it runs.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Bytes held beside weights and states.
    pub fn scratch_bytes(&self) -> usize {
        self.engine.scratch_bytes() + self.host.scratch_bytes()
    }

    /// Runs executions from where `state` is up to `until`. `watch` sees every engine call and every step; an error of it stops the
    /// lane between two calls.
    ///
    /// # Errors
    /// What the engine refuses, a state that is no longer finite, the error of `watch`.
    pub fn run(
        &mut self,
        clip: &Clip,
        state: &mut ClipState,
        until: usize,
        watch: &mut dyn FnMut(&Event<'_>) -> Result<(), VideoError>,
    ) -> Result<(), VideoError> {
        let (trajectory, path) = (clip.trajectory(), self.engine.path());
        if path == NumericPath::W8a8 && !state.next.is_multiple_of(trajectory.layers) {
            // An engine of another path may have left more precision than this one keeps; none is lost twice.
            state.hidden.iter_mut().for_each(|value| *value = round_f16(*value));
        }
        for run in trajectory.pieces(state.next..until.min(trajectory.blocks())) {
            if run.blocks.start == 0 {
                self.host.embed(&self.model, clip.expert(run.step), path, &state.latent, &mut state.hidden)?;
            }
            let mut first = run.blocks.start;
            while first < run.blocks.end {
                let end = run.blocks.end.min(first + self.blocks_per_call);
                let piece = Piece { step: run.step, branch: run.branch, blocks: first..end };
                let started = Instant::now();
                self.engine.run_blocks(clip, &piece, &mut state.hidden)?;
                let elapsed = started.elapsed();
                first = end;
                let ends_branch = end == trajectory.layers;
                if ends_branch {
                    self.end_branch(clip, &piece, state)?;
                }
                state.next += piece.blocks.len();
                let (engine, done) = (self.engine.name(), state.next);
                watch(&Event::Blocks { engine, piece: &piece, started, elapsed, done, hidden: &state.hidden })?;
                if ends_branch && piece.branch + 1 == trajectory.branches {
                    watch(&Event::Step { step: piece.step, velocity: &state.velocity, latent: &state.latent })?;
                }
            }
        }
        Ok(())
    }

    /// Times one piece of blocks on `state`, which is embedded before block 0 and never sees a head: whatever it holds, its place in the
    /// trajectory does not change.
    ///
    /// # Errors
    /// What host and engine refuse.
    pub(crate) fn time_block(
        &mut self,
        clip: &Clip,
        state: &mut ClipState,
        piece: &Piece,
    ) -> Result<Duration, VideoError> {
        if piece.blocks.start == 0 {
            let path = self.engine.path();
            self.host.embed(&self.model, clip.expert(piece.step), path, &state.latent, &mut state.hidden)?;
        }
        let begun = Instant::now();
        self.engine.run_blocks(clip, piece, &mut state.hidden)?;
        Ok(begun.elapsed())
    }

    /// Times what begins a clip of a stream on this lane: its conditions and its state.
    ///
    /// # Errors
    /// As [`Clip::new`].
    pub fn time_conditions(
        &mut self,
        noise: &Tensor,
        text: &Tensor,
        negative: Option<&Tensor>,
    ) -> Result<Duration, VideoError> {
        let begun = Instant::now();
        let clip = Clip::new(&mut self.host, &self.model, noise, text, negative)?;
        let state = clip.start(noise)?;
        let elapsed = begun.elapsed();
        drop((clip, state));
        Ok(elapsed)
    }

    /// Times the host's work around the blocks of one branch: patch embedding before them, head and sampler's step behind them. On a
    /// state of its own that no block touches.
    ///
    /// # Errors
    /// Noise that is not the clip's; what the host refuses.
    pub fn time_host(&mut self, clip: &Clip, noise: &Tensor) -> Result<Duration, VideoError> {
        let layers = clip.trajectory().layers;
        let last = Piece { step: 0, branch: clip.trajectory().branches - 1, blocks: layers - 1..layers };
        let mut elapsed = Duration::ZERO;
        // Once for buffers that grow, once for the time; each from a clip's start, as a multi-step solver's history is of one pass only.
        for _ in 0..2 {
            let mut state = clip.start(noise)?;
            let begun = Instant::now();
            self.host.embed(&self.model, clip.expert(0), self.engine.path(), &state.latent, &mut state.hidden)?;
            self.end_branch(clip, &last, &mut state)?;
            elapsed = begun.elapsed();
        }
        Ok(elapsed)
    }

    /// Head; after the last branch guidance and the sampler's step.
    fn end_branch(&mut self, clip: &Clip, piece: &Piece, state: &mut ClipState) -> Result<(), VideoError> {
        let (step, expert) = (piece.step, clip.expert(piece.step));
        self.host.head(&self.model, expert, clip.time(step), &state.hidden, &mut state.velocity)?;
        let sampler = clip.sampler();
        if sampler.branches() == 2 {
            if piece.branch == 0 {
                state.guided.copy_from_slice(&state.velocity);
                return Ok(());
            }
            // v_u + g·(v_c − v_u); the first branch has the prompt.
            for (velocity, &with_prompt) in state.velocity.iter_mut().zip(&state.guided) {
                *velocity += sampler.guidance * (with_prompt - *velocity);
            }
        }
        sampler.advance(step, &state.velocity, &mut state.latent, &mut state.history);
        match state.latent.iter().find(|value| !value.is_finite()) {
            None => Ok(()),
            Some(&value) => Err(VideoError::NonFinite {
                value,
                what: "the latent",
                step,
                reason: "noise or text hold extreme values, or the artefact is damaged (see `trefoil weights verify`)",
            }),
        }
    }
}
