//! The owner's side: starts workers, passes descriptors, gives orders, and starts a worker again that was killed.

use super::channel::{receive, send};
use super::slot::{Slot, SlotLayout, StateMark};
use super::{Order, PROTOCOL, Reply, Setup, unexpected};
use crate::calibrate::Calibration;
use crate::denoise::{DenoiseReport, Handoff, LaneReport, latent_shape, text_rows};
use crate::engine::EngineSpec;
use crate::model::Model;
use crate::sampler::Solver;
use crate::schedule::{Place, Trajectory};
use crate::tensors::Tensor;
use crate::{NumericPath, VideoError};
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use trefoil_weights::region::{RegionKind, load_regions};
use trefoil_weights::share::offer;
use trefoil_weights::{Artefact, Region, WeightsError};

/// How long a worker may take to map what it is given.
pub(super) const SHARING: Duration = Duration::from_mins(1);
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
    regions: Vec<([u8; 32], Vec<Region>)>,
    checkpoint: Option<PathBuf>,
    calibration: Option<Arc<Calibration>>,
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

/// A process that is set up.
#[derive(Debug)]
pub(super) struct Started {
    pub(super) child: Child,
    pub(super) socket: UnixStream,
    /// What a reader of its results should know.
    pub(super) notes: Vec<String>,
}

/// Why a run did not end.
pub(super) enum Failure {
    /// The process is gone; another one can try.
    Died(String),
    /// It said no; another one would too.
    Refused(VideoError),
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

impl Failure {
    pub(super) fn into_error(self, engine: &str) -> VideoError {
        match self {
            Failure::Refused(error) => error,
            Failure::Died(reason) => VideoError::Engine {
                engine: engine.to_string(),
                reason: format!("its process ended before it was ready ({reason})"),
            },
        }
    }
}

#[allow(clippy::needless_pass_by_value, reason = "used as a function for map_err")]
pub(super) fn died(error: std::io::Error) -> Failure {
    Failure::Died(error.to_string())
}

pub(super) fn failed(engine: &str, message: String) -> Failure {
    // It may have named itself already.
    let message = match message.strip_prefix(&format!("engine `{engine}`: ")) {
        Some(reason) => reason.to_string(),
        None => message,
    };
    Failure::Refused(VideoError::Engine { engine: engine.to_string(), reason: message })
}

/// Failures of passing descriptors: a peer that is gone can be started again.
pub(super) fn sharing(error: WeightsError) -> Failure {
    match error {
        WeightsError::PeerClosed { .. } | WeightsError::Socket { .. } => Failure::Died(error.to_string()),
        other => Failure::Refused(other.into()),
    }
}

/// Starts a process and sets it up: with a slot it carries one clip, without one it is an engine.
pub(super) fn start(
    command: &WorkerCommand,
    engine: &str,
    path: NumericPath,
    shared: &SharedModel,
    slot: Option<&Slot>,
) -> Result<Started, Failure> {
    let (ours, theirs) = UnixStream::pair().map_err(died)?;
    let mut child = Command::new(&command.program)
        .args(&command.arguments)
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        // Ctrl-C goes to the terminal's process group; the owner decides when its workers end.
        .process_group(0)
        .spawn()
        .map_err(|source| {
            Failure::Refused(VideoError::Io { action: "start", path: command.program.clone(), source })
        })?;
    let failure = match introduce(&ours, engine, path, shared, slot) {
        Ok(notes) => return Ok(Started { child, socket: ours, notes }),
        // All that its socket tells is that nobody is there; the system knows why.
        Err(Failure::Died(noticed)) => Failure::Died(ended(&mut child).map_or(noticed, described)),
        Err(refused) => refused,
    };
    let _ = child.kill();
    let _ = child.wait();
    Err(failure)
}

/// How a process ended; `None` where it did not, although its socket is closed. A socket closes a moment before its process is gone.
pub(super) fn ended(child: &mut Child) -> Option<ExitStatus> {
    for _ in 0..100 {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    None
}

/// `killed by signal 9`, `exit code 3`.
pub(super) fn described(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("killed by signal {signal}"),
        (None, Some(code)) => format!("exit code {code}"),
        (None, None) => "no exit status".to_string(),
    }
}

/// Setup message, descriptors, and the worker's answer: what a reader of its results should know.
fn introduce(
    socket: &UnixStream,
    engine: &str,
    path: NumericPath,
    shared: &SharedModel,
    slot: Option<&Slot>,
) -> Result<Vec<String>, Failure> {
    let message = Setup {
        protocol: PROTOCOL,
        engine: engine.to_string(),
        path,
        artefacts: shared.model.artefacts().map(|artefact| artefact.path().to_path_buf()).collect(),
        checkpoint: shared.checkpoint.clone(),
        sampler: shared.model.sampler().clone(),
        calibration: shared.calibration.as_ref().map(|calibration| calibration.to_bits()),
        slot: slot.map(|slot| *slot.layout()),
    };
    send(socket, &Order::Setup(Box::new(message))).map_err(died)?;
    for (fingerprint, regions) in &shared.regions {
        offer(socket, *fingerprint, regions, SHARING).map_err(sharing)?;
    }
    if let Some(slot) = slot {
        offer(socket, [0; 32], std::slice::from_ref(slot.region()), SHARING).map_err(sharing)?;
    }
    match receive(socket).map_err(died)? {
        Reply::Ready { notes } => Ok(notes),
        Reply::Failed { message } => Err(failed(engine, message)),
        _ => Err(Failure::Refused(unexpected(engine, "an order that it never got"))),
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
