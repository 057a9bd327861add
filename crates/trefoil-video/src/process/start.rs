//! Starting a worker process: passing it what it works with, and telling why it is not there.

use super::channel::{receive, send};
use super::owner::{SharedModel, WorkerCommand};
use super::slot::Slot;
use super::{Order, PROTOCOL, Reply, Setup, unexpected};
use crate::{NumericPath, VideoError};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;
use trefoil_weights::WeightsError;
use trefoil_weights::share::offer;

/// How long either side may take to pass descriptors or to map them.
pub(super) const SHARING: Duration = Duration::from_mins(1);

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
