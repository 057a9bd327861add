//! The owner's side: starts workers, passes descriptors, gives orders, and starts a worker again that was killed.

use super::channel::{receive, send};
use super::slot::{Slot, SlotLayout, StateMark};
use super::start::{Failure, Started, described, died, ended, failed, start};
use super::{Order, Reply, unexpected};
use crate::calibrate::Calibration;
use crate::denoise::{DenoiseReport, Handoff, LaneReport, latent_shape, text_rows};
use crate::engine::EngineSpec;
use crate::model::Model;
use crate::sampler::Solver;
use crate::schedule::{Place, Trajectory};
use crate::tensors::Tensor;
use crate::{NumericPath, VideoError};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;
use trefoil_weights::region::{RegionKind, load_regions};
use trefoil_weights::{Artefact, Region};

/// A worker that dies this often in one run is not started again.
const MOST_RESTARTS: u32 = 25;

/// How a worker is started: this program with a hidden argument, whose handler calls [`super::worker_main`].
#[derive(Debug, Clone)]
pub struct WorkerCommand {
    /// Program.
    pub program: PathBuf,
    /// Arguments that lead to [`super::worker_main`].
    pub arguments: Vec<OsString>,
}

impl WorkerCommand {
    /// The running program with other arguments.
    ///
    /// # Errors
    /// A system that does not tell which program runs.
    pub fn this_program(arguments: &[&str]) -> Result<WorkerCommand, VideoError> {
        let program = std::env::current_exe().map_err(VideoError::io("find", std::path::Path::new("this program")))?;
        Ok(WorkerCommand { program, arguments: arguments.iter().map(OsString::from).collect() })
    }
}

/// A model whose regions this process has mapped, to be passed to workers: one copy of the weights, however many processes.
#[derive(Debug)]
pub struct SharedModel {
    pub(super) model: Arc<Model>,
    pub(super) regions: Vec<([u8; 32], Vec<Region>)>,
    pub(super) checkpoint: Option<PathBuf>,
    pub(super) calibration: Option<Arc<Calibration>>,
}

impl SharedModel {
    /// Maps the regions of the model's artefacts. `checkpoint` is where `f32` finds its weights, `calibration` what `w8a8` needs.
    ///
    /// # Errors
    /// Artefacts that cannot be mapped.
    pub fn new(
        model: &Arc<Model>,
        checkpoint: Option<PathBuf>,
        calibration: Option<Arc<Calibration>>,
    ) -> Result<SharedModel, VideoError> {
        let regions = model
            .artefacts()
            .map(|artefact: &Artefact| Ok((artefact.fingerprint(), load_regions(artefact, RegionKind::File, None)?)))
            .collect::<Result<_, VideoError>>()?;
        Ok(SharedModel { model: Arc::clone(model), regions, checkpoint, calibration })
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }
}

/// What all workers of a clip share: the model's regions and the clip's slot, as this process owns them.
#[derive(Debug)]
pub struct WorkerSetup {
    shared: SharedModel,
    slot: Slot,
    trajectory: Trajectory,
}

impl WorkerSetup {
    /// Prepares a clip for workers: maps the regions of the model's artefacts and makes the slot.
    ///
    /// # Errors
    /// Tensors that do not fit the model, memory that the system refuses.
    pub fn new(
        model: &Arc<Model>,
        checkpoint: Option<PathBuf>,
        calibration: Option<Arc<Calibration>>,
        noise: &Tensor,
        text: &Tensor,
        negative: Option<&Tensor>,
    ) -> Result<WorkerSetup, VideoError> {
        let (config, sampler) = (model.config(), model.sampler());
        let shape = latent_shape(noise, config.channels)?;
        let branches = sampler.branches();
        let negative = negative.filter(|_| branches > 1);
        let rows = |text: Option<&Tensor>| -> Result<usize, VideoError> {
            let Some(text) = text else { return Ok(0) };
            Ok(text_rows(text, config.text_dim)?.len() / config.text_dim)
        };
        let layout = SlotLayout {
            shape,
            hidden: noise.values.len() / config.patch() * config.width(),
            text_rows: [rows(Some(text))?, rows(negative)?],
            text_dim: config.text_dim,
            steps: sampler.steps(),
            has_history: sampler.solver == Solver::UniPc,
        };
        Ok(WorkerSetup {
            shared: SharedModel::new(model, checkpoint, calibration)?,
            slot: Slot::create(layout, noise, [Some(text), negative])?,
            trajectory: Trajectory { steps: sampler.steps(), branches, layers: config.layers },
        })
    }

    /// Block executions of the clip.
    pub fn trajectory(&self) -> Trajectory {
        self.trajectory
    }

    /// `[C, F, H, W]` of the latent.
    pub fn shape(&self) -> [usize; 4] {
        self.slot.layout().shape
    }

    /// The first state: the noise as the running latent.
    fn start(&self) -> Result<StateMark, VideoError> {
        let noise = self.slot.noise()?;
        let latent = crate::dit::patches::patchify(&noise.values, self.shape());
        let layout = self.slot.layout();
        let guided = if layout.text_rows[1] > 0 { latent.len() } else { 0 };
        let state = crate::denoise::ClipState {
            hidden: vec![0.0; layout.hidden],
            velocity: Vec::new(),
            guided: vec![0.0; guided],
            history: crate::sampler::History::default(),
            next: 0,
            latent,
        };
        self.slot.put(0, &state)
    }

    /// What crosses between two workers: nothing is copied, both map it.
    fn handoff(&self, mark: StateMark) -> Handoff {
        let Place { step, block, .. } = self.trajectory.place(mark.next);
        let layout = self.slot.layout();
        let latent = layout.shape.iter().product::<usize>() * size_of::<f32>();
        let guided = if layout.text_rows[1] > 0 { latent } else { 0 };
        let history = match (layout.has_history, mark.done) {
            (true, 1) => 2 * latent,
            (true, 2..) => 3 * latent,
            _ => 0,
        };
        Handoff {
            at: mark.next,
            step,
            block,
            hidden_bytes: if block == 0 { 0 } else { layout.hidden * size_of::<f32>() },
            latent_bytes: latent,
            extra_bytes: guided + history,
        }
    }
}

/// What an owner sees while workers run.
#[derive(Debug)]
pub enum WorkerEvent<'a> {
    /// A block is done.
    Blocks {
        /// Engine.
        engine: &'a str,
        /// Its process.
        pid: u32,
        /// Executions of the clip done.
        done: usize,
        /// Milliseconds of the block.
        ms: f64,
    },
    /// A step is done and its latent is in the slot.
    Step {
        /// Which.
        step: usize,
    },
    /// A worker died and is about to be started again.
    Died {
        /// Engine.
        engine: &'a str,
        /// What was noticed.
        reason: String,
    },
}

/// A worker process.
#[derive(Debug)]
pub struct Worker {
    command: WorkerCommand,
    engine: String,
    path: NumericPath,
    setup: Arc<WorkerSetup>,
    started: Started,
    restarts: u32,
}

impl Worker {
    /// Starts a worker and waits until it is ready.
    ///
    /// # Errors
    /// A process that does not start, or what it refuses.
    pub fn start(
        command: &WorkerCommand,
        spec: &EngineSpec,
        path: NumericPath,
        setup: &Arc<WorkerSetup>,
    ) -> Result<Worker, VideoError> {
        let engine = spec.to_string();
        let started = start(command, &engine, path, &setup.shared, Some(&setup.slot))
            .map_err(|failure| failure.into_error(&engine))?;
        Ok(Worker { command: command.clone(), engine, path, setup: Arc::clone(setup), started, restarts: 0 })
    }

    /// Its engine.
    pub fn engine(&self) -> &str {
        &self.engine
    }

    /// Its process, as long as it lives.
    pub fn pid(&self) -> u32 {
        self.started.child.id()
    }

    /// What a reader of its results should know, such as its device.
    pub fn notes(&self) -> &[String] {
        &self.started.notes
    }

    /// How often it was started again.
    pub fn restarts(&self) -> u32 {
        self.restarts
    }

    /// Runs executions from `mark` to `until` on state `state` of the slot, which stays as it is; the result is the other state.
    fn run(
        &mut self,
        state: usize,
        mark: StateMark,
        until: usize,
        watch: &mut dyn FnMut(&WorkerEvent<'_>) -> Result<(), VideoError>,
    ) -> Result<StateMark, VideoError> {
        // Why there is no process that could be given the order.
        let mut dead: Option<String> = None;
        let mut reason = String::new();
        for _ in 0..=MOST_RESTARTS {
            reason = match dead.take() {
                Some(reason) => reason,
                None => match self.attempt(state, mark, until, watch) {
                    Ok(mark) => return Ok(mark),
                    Err(Failure::Refused(error)) => return Err(error),
                    Err(Failure::Died(noticed)) => ended(&mut self.started.child).map_or(noticed, described),
                },
            };
            watch(&WorkerEvent::Died { engine: &self.engine, reason: reason.clone() })?;
            self.end();
            self.restarts += 1;
            match start(&self.command, &self.engine, self.path, &self.setup.shared, Some(&self.setup.slot)) {
                Ok(started) => self.started = started,
                // It may be killed again while it starts.
                Err(Failure::Died(reason)) => dead = Some(reason),
                Err(Failure::Refused(error)) => return Err(error),
            }
        }
        Err(VideoError::Engine {
            engine: self.engine.clone(),
            reason: format!(
                "its process died {MOST_RESTARTS} times in a row ({reason}); the system's log says who kills it, too little memory is the usual reason"
            ),
        })
    }

    fn attempt(
        &mut self,
        state: usize,
        mark: StateMark,
        until: usize,
        watch: &mut dyn FnMut(&WorkerEvent<'_>) -> Result<(), VideoError>,
    ) -> Result<StateMark, Failure> {
        let (pid, socket) = (self.started.child.id(), &self.started.socket);
        send(socket, &Order::Run { state, mark, until }).map_err(died)?;
        loop {
            let event = match receive(socket).map_err(died)? {
                Reply::Blocks { done, ms } => WorkerEvent::Blocks { engine: &self.engine, pid, done, ms },
                Reply::Step { step } => WorkerEvent::Step { step },
                Reply::Done { mark } => return Ok(mark),
                Reply::Failed { message } => return Err(failed(&self.engine, message)),
                Reply::Ready { .. } | Reply::Taken | Reply::Ran => {
                    return Err(Failure::Refused(unexpected(&self.engine, "another kind of order")));
                }
            };
            watch(&event).map_err(Failure::Refused)?;
        }
    }

    fn end(&mut self) {
        // It may be gone already; then there is only its exit status to collect.
        let _ = self.started.child.kill();
        let _ = self.started.child.wait();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.end();
    }
}

/// As [`crate::denoise()`], with engines in processes of their own. Returns the latent after every step, `[C, F, H, W]`.
///
/// # Errors
/// A cut outside 0..=B, what a worker refuses, a worker that dies again and again, the error of `watch`.
pub fn denoise_in_workers(
    workers: &mut [Worker],
    setup: &WorkerSetup,
    cut: usize,
    watch: &mut dyn FnMut(&WorkerEvent<'_>) -> Result<(), VideoError>,
) -> Result<(DenoiseReport, Vec<Vec<f32>>), VideoError> {
    let blocks = setup.trajectory.blocks();
    if cut > blocks {
        return Err(VideoError::Cut { cut, blocks });
    }
    let ends: &[usize] = match workers.len() {
        1 => &[blocks],
        2 => &[cut, blocks],
        other => {
            let reason = format!("{other} workers; a trajectory with one cut takes one or two");
            return Err(VideoError::Engine { engine: "denoise".to_string(), reason });
        }
    };
    let mut report = DenoiseReport { blocks, cut: ends[0], lanes: Vec::new(), handoffs: Vec::new() };
    let (mut state, mut mark) = (0, setup.start()?);
    for (worker, &end) in workers.iter_mut().zip(ends) {
        let first = mark.next;
        if first >= end {
            continue;
        }
        if !report.lanes.is_empty() {
            report.handoffs.push(setup.handoff(mark));
        }
        let start = Instant::now();
        mark = worker.run(state, mark, end, watch)?;
        state = 1 - state;
        if mark.next != end {
            return Err(unexpected(&worker.engine, "with a state from elsewhere"));
        }
        report.lanes.push(LaneReport {
            engine: worker.engine.clone(),
            path: worker.path,
            blocks: end - first,
            ms: start.elapsed().as_secs_f64() * 1e3,
        });
    }
    let latents = (0..setup.trajectory.steps).map(|step| setup.slot.result(step)).collect::<Result<_, _>>()?;
    Ok((report, latents))
}
