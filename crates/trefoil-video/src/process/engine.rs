//! An engine in a process of its own: what a stream's lanes run on.
//!
//! The owner keeps the hidden state; its copy in the clip's region belongs to whoever has the word. A piece of blocks is a message, a
//! few microseconds and two copies of the hidden state, beside blocks of milliseconds to seconds. So a process that is killed costs one
//! piece, which another process then computes from the same state, with the same result.

use super::channel::{receive, send};
use super::owner::{SharedModel, WorkerCommand};
use super::start::{Failure, SHARING, Started, described, died, ended, failed, sharing, start};
use super::worker::refuse;
use super::{Order, Reply, unexpected};
use crate::denoise::{Clip, Lane};
use crate::dit::Host;
use crate::engine::{Engine, EngineSpec, ShapedEngine};
use crate::model::Model;
use crate::schedule::Piece;
use crate::{NumericPath, VideoError};
use serde::Serialize;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use trefoil_kernels::Kernels;
use trefoil_weights::Region;
use trefoil_weights::region::RegionKind;
use trefoil_weights::share::{Expectation, offer, receive as receive_regions};

/// A process that dies this often at the same piece is not started again.
const MOST_DEATHS: usize = 5;

/// A process that ended before its time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Death {
    /// Engine.
    pub engine: String,
    /// What the system says about it, such as `killed by signal 9`.
    pub reason: String,
}

/// What others may know of an engine's process while it runs.
#[derive(Debug, Default)]
pub struct ProcessStatus {
    pid: AtomicU32,
    deaths: Mutex<Vec<Death>>,
}

impl ProcessStatus {
    /// The process now; `None` where none runs.
    pub fn pid(&self) -> Option<u32> {
        Some(self.pid.load(Ordering::Acquire)).filter(|&pid| pid != 0)
    }

    /// Every process that ended before its time, in order.
    pub fn deaths(&self) -> Vec<Death> {
        self.deaths.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// See the module.
#[derive(Debug)]
pub struct ProcessEngine {
    command: WorkerCommand,
    engine: String,
    cores: Vec<usize>,
    path: NumericPath,
    shared: Arc<SharedModel>,
    running: Option<Running>,
    notes: Vec<String>,
    status: Arc<ProcessStatus>,
}

/// A process that is set up.
#[derive(Debug)]
struct Running {
    process: Started,
    /// The clip it knows: its serial number, and the region with hidden state and conditions.
    clip: Option<(u64, Region)>,
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may be gone already; then there is only its exit status to collect.
        let _ = self.process.child.kill();
        let _ = self.process.child.wait();
    }
}

impl ProcessEngine {
    /// Starts the engine's process and waits until it is ready.
    ///
    /// # Errors
    /// A process that does not start, or what it refuses.
    pub fn start(
        command: &WorkerCommand,
        spec: &EngineSpec,
        path: NumericPath,
        shared: &Arc<SharedModel>,
    ) -> Result<ProcessEngine, VideoError> {
        let mut engine = ProcessEngine {
            command: command.clone(),
            engine: spec.to_string(),
            cores: spec.resolved_cores(),
            path,
            shared: Arc::clone(shared),
            running: None,
            notes: Vec::new(),
            status: Arc::new(ProcessStatus::default()),
        };
        match engine.running() {
            Ok(_) => Ok(engine),
            Err(failure) => Err(failure.into_error(&spec.to_string())),
        }
    }

    /// A lane on such an engine, its host work in this process on the engine's cores. A shape is kept here, where it sees what the
    /// other engine does. `model` is what the host works with: the shared one, or the unquantised one for `f32`.
    ///
    /// # Errors
    /// As [`ProcessEngine::start`]; cores that cannot be used.
    pub fn lane(
        command: &WorkerCommand,
        spec: &EngineSpec,
        path: NumericPath,
        shared: &Arc<SharedModel>,
        model: &Arc<Model>,
    ) -> Result<(Lane, Arc<ProcessStatus>), VideoError> {
        let kernels = Arc::new(Kernels::best(&spec.resolved_cores())?);
        let plain = EngineSpec { shape: None, ..spec.clone() };
        let process = ProcessEngine::start(command, &plain, path, shared)?;
        let status = Arc::clone(&process.status);
        let mut engine: Box<dyn Engine> = Box::new(process);
        if let Some(shape) = spec.shape {
            engine = Box::new(ShapedEngine::new(spec.to_string(), engine, shape));
        }
        Ok((Lane::new(engine, Host::new(kernels), Arc::clone(model)), status))
    }

    /// What others may know of its process.
    pub fn status(&self) -> &Arc<ProcessStatus> {
        &self.status
    }

    /// The process, started where there is none.
    fn running(&mut self) -> Result<&mut Running, Failure> {
        let running = if let Some(running) = self.running.take() {
            running
        } else {
            let process = start(&self.command, &self.engine, self.path, &self.shared, None)?;
            self.status.pid.store(process.child.id(), Ordering::Release);
            self.notes.clone_from(&process.notes);
            Running { process, clip: None }
        };
        Ok(self.running.insert(running))
    }

    fn attempt(&mut self, clip: &Clip, piece: &Piece, hidden: &mut [f32]) -> Result<(), Failure> {
        let engine = self.engine.clone();
        let running = self.running()?;
        if running.clip.as_ref().is_none_or(|(serial, _)| *serial != clip.serial()) {
            // The old clip's memory goes before the new one's comes.
            running.clip = None;
            let region = region_of(clip, hidden.len()).map_err(Failure::Refused)?;
            let socket = &running.process.socket;
            send(socket, &Order::Clip(clip.outline())).map_err(died)?;
            offer(socket, [0; 32], std::slice::from_ref(&region), SHARING).map_err(sharing)?;
            answer(&engine, socket, &Reply::Taken)?;
            running.clip = Some((clip.serial(), region));
        }
        let Some((_, region)) = &running.clip else {
            return Err(Failure::Refused(refuse("it has no clip")));
        };
        region.write_at(0, bytes_of(hidden)).map_err(refused)?;
        let (first, end) = (piece.blocks.start, piece.blocks.end);
        let socket = &running.process.socket;
        send(socket, &Order::Blocks { step: piece.step, branch: piece.branch, first, end }).map_err(died)?;
        answer(&engine, socket, &Reply::Ran)?;
        region.read_at(0, bytes_of_mut(hidden)).map_err(refused)
    }

    /// Ends the process and writes down why; returns the reason.
    fn bury(&mut self, noticed: String) -> String {
        self.status.pid.store(0, Ordering::Release);
        let status = self.running.take().and_then(|mut running| ended(&mut running.process.child));
        let reason = status.map_or(noticed, described);
        let death = Death { engine: self.engine.clone(), reason: reason.clone() };
        self.status.deaths.lock().unwrap_or_else(PoisonError::into_inner).push(death);
        reason
    }
}

impl Engine for ProcessEngine {
    fn name(&self) -> &str {
        &self.engine
    }

    fn path(&self) -> NumericPath {
        self.path
    }

    fn cores(&self) -> &[usize] {
        &self.cores
    }

    fn run_blocks(&mut self, clip: &Clip, piece: &Piece, hidden: &mut [f32]) -> Result<(), VideoError> {
        let mut reason = String::new();
        for _ in 0..MOST_DEATHS {
            match self.attempt(clip, piece, hidden) {
                Ok(()) => return Ok(()),
                Err(Failure::Refused(error)) => return Err(error),
                Err(Failure::Died(noticed)) => reason = self.bury(noticed),
            }
        }
        let blocks = match piece.blocks.len() {
            1 => format!("block {}", piece.blocks.start),
            _ => format!("blocks {} to {}", piece.blocks.start, piece.blocks.end - 1),
        };
        Err(VideoError::Engine {
            engine: self.engine.clone(),
            reason: format!(
                "its process died {MOST_DEATHS} times at {blocks} of step {} ({reason}); the system's log says who kills it, too little memory is the usual reason",
                piece.step
            ),
        })
    }

    fn scratch_bytes(&self) -> usize {
        // Its scratch is the other process's; here it holds the region.
        self.running.as_ref().and_then(|running| running.clip.as_ref()).map_or(0, |(_, region)| region.len())
    }

    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }
}

fn refused(error: trefoil_weights::WeightsError) -> Failure {
    Failure::Refused(error.into())
}

/// Waits for one reply.
fn answer(engine: &str, socket: &UnixStream, wanted: &Reply) -> Result<(), Failure> {
    match (receive(socket).map_err(died)?, wanted) {
        (Reply::Taken, Reply::Taken) | (Reply::Ran, Reply::Ran) => Ok(()),
        (Reply::Failed { message }, _) => Err(failed(engine, message)),
        (other, _) => Err(Failure::Refused(unexpected(engine, &format!("{other:?}")))),
    }
}

/// The clip's region: the hidden state, then what [`Clip::values`] gives.
fn region_of(clip: &Clip, hidden: usize) -> Result<Region, VideoError> {
    let len = hidden + clip.values().map(<[f32]>::len).sum::<usize>();
    let region = Region::shared(0, len * size_of::<f32>(), RegionKind::Memfd, None)?;
    let mut at = hidden * size_of::<f32>();
    for values in clip.values() {
        region.write_at(at, bytes_of(values))?;
        at += size_of_val(values);
    }
    Ok(region)
}

fn bytes_of(values: &[f32]) -> &[u8] {
    // SAFETY: the bytes of initialised floats, for as long as the floats are borrowed; bytes have no alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

fn bytes_of_mut(values: &mut [f32]) -> &mut [u8] {
    // SAFETY: as in `bytes_of`; the borrow is exclusive, and every pattern of bytes is a float.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

/// Why an engine's process stops serving.
pub(super) enum Stopped {
    OwnerGone,
    Failed(VideoError),
}

impl From<std::io::Error> for Stopped {
    fn from(error: std::io::Error) -> Stopped {
        match super::channel::foreign(&error) {
            Some(reason) => Stopped::Failed(refuse(&reason)),
            // Nobody is left to be told what went wrong with the socket.
            None => Stopped::OwnerGone,
        }
    }
}

impl From<VideoError> for Stopped {
    fn from(error: VideoError) -> Stopped {
        Stopped::Failed(error)
    }
}

/// The process's side: runs the blocks it is told, until the owner goes.
pub(super) fn serve(socket: &UnixStream, lane: &mut Lane) -> Result<(), Stopped> {
    let model = Arc::clone(lane.model());
    let mut known: Option<(Clip, Region, usize)> = None;
    send(socket, &Reply::Ready { notes: lane.engine().notes() })?;
    loop {
        match receive(socket)? {
            Order::Clip(outline) => {
                // The old clip's memory goes before the new one's comes.
                drop(known.take());
                let regions =
                    receive_regions(socket, &Expectation::default(), SHARING).map_err(VideoError::from)?.regions;
                let [region] =
                    <[Region; 1]>::try_from(regions).map_err(|_| refuse("the owner passed more than one region"))?;
                let [_, frames, height, width] = outline.shape;
                let tokens = frames * height * width / (crate::config::PATCH * crate::config::PATCH);
                let hidden = tokens * model.config().width();
                let mut at = hidden * size_of::<f32>();
                if region.len() < at {
                    return Err(refuse("the owner's region is too small for its clip").into());
                }
                let clip = Clip::copied(&model, &outline, &mut |len| {
                    let mut values = vec![0f32; len];
                    region.read_at(at, bytes_of_mut(&mut values))?;
                    at += len * size_of::<f32>();
                    Ok(values)
                })?;
                known = Some((clip, region, hidden));
                send(socket, &Reply::Taken)?;
            }
            Order::Blocks { step, branch, first, end } => {
                let Some((clip, region, len)) = &known else { return Err(refuse("blocks of no clip").into()) };
                #[allow(clippy::cast_ptr_alignment, reason = "regions begin at a page")]
                let address = region.as_mut_ptr().map_err(VideoError::from)?.cast::<f32>();
                // SAFETY: the region was found to hold `len` floats, is mapped at a page's start until `known` changes, and the
                // owner does not touch it between its order and the reply.
                let hidden = unsafe { std::slice::from_raw_parts_mut(address, *len) };
                lane.engine_mut().run_blocks(clip, &Piece { step, branch, blocks: first..end }, hidden)?;
                send(socket, &Reply::Ran)?;
            }
            Order::Setup(_) | Order::Run { .. } => {
                return Err(refuse("the owner gave an order of another kind of worker").into());
            }
        }
    }
}
