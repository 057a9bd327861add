//! A worker's life: set up once, then run what it is told until the owner goes.

use super::channel::{receive, send};
use super::slot::Slot;
use super::start::SHARING;
use super::{Order, PROTOCOL, Reply, Setup};
use crate::calibrate::Calibration;
use crate::denoise::{Clip, Event, Lane};
use crate::engine::EngineSpec;
use crate::model::Model;
use crate::pack::open_reference;
use crate::{NumericPath, VideoError};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::Arc;
use trefoil_weights::share::{Expectation, receive as receive_regions};

/// Body of a worker process; its standard input is the socket to the owner.
pub fn worker_main() -> ExitCode {
    let socket = match socket_of(io::stdin().as_fd()) {
        Ok(socket) => socket,
        Err(error) => {
            eprintln!("error: a video worker is started by trefoil itself ({error})");
            return ExitCode::FAILURE;
        }
    };
    match serve(&socket) {
        // The owner closed its end: the work is done.
        Ok(()) | Err(Ended::OwnerGone) => ExitCode::SUCCESS,
        Err(Ended::Failed(error)) => {
            let told = send(&socket, &Reply::Failed { message: error.to_string() });
            if told.is_err() {
                eprintln!("error: {error}");
            }
            ExitCode::FAILURE
        }
    }
}

/// The socket that an owner leaves as standard input.
fn socket_of(input: BorrowedFd<'_>) -> io::Result<UnixStream> {
    let about = rustix::fs::fstat(input)?;
    if rustix::fs::FileType::from_raw_mode(about.st_mode) != rustix::fs::FileType::Socket {
        return Err(io::Error::other("its standard input is no socket"));
    }
    Ok(UnixStream::from(input.try_clone_to_owned()?))
}

/// Why a worker ends.
enum Ended {
    OwnerGone,
    Failed(VideoError),
}

impl From<io::Error> for Ended {
    fn from(error: io::Error) -> Ended {
        match super::channel::foreign(&error) {
            Some(reason) => Ended::Failed(refuse(&reason)),
            // Nobody is left to be told what went wrong with the socket.
            None => Ended::OwnerGone,
        }
    }
}

impl From<VideoError> for Ended {
    fn from(error: VideoError) -> Ended {
        Ended::Failed(error)
    }
}

fn serve(socket: &UnixStream) -> Result<(), Ended> {
    let Order::Setup(setup) = receive(socket)? else {
        return Err(refuse("the owner gave an order before it set the worker up").into());
    };
    if setup.protocol != PROTOCOL {
        return Err(refuse("the owner is another version of trefoil").into());
    }
    let (mut lane, slot) = set_up(socket, &setup)?;
    match slot {
        Some(slot) => carry(socket, &mut lane, &slot),
        None => super::engine::serve(socket, &mut lane).map_err(|error| match error {
            super::engine::Stopped::OwnerGone => Ended::OwnerGone,
            super::engine::Stopped::Failed(error) => Ended::Failed(error),
        }),
    }
}

/// Carries one clip from order to order.
fn carry(socket: &UnixStream, lane: &mut Lane, slot: &Slot) -> Result<(), Ended> {
    let model = Arc::clone(lane.model());
    let (noise, text, negative) = (slot.noise()?, slot.text(0)?, slot.text(1)?);
    let text = text.ok_or_else(|| refuse("the clip has no text"))?;
    let clip = Clip::new(lane.host_mut(), &model, &noise, &text, negative.as_ref())?;
    send(socket, &Reply::Ready { notes: lane.engine().notes() })?;
    loop {
        let Order::Run { state, mark, until } = receive(socket)? else {
            return Err(refuse("the owner gave an order of another kind of worker").into());
        };
        let mut running = slot.get(state, mark)?;
        let mut gone = false;
        let ran = lane.run(&clip, &mut running, until, &mut |event| {
            let reply = match event {
                Event::Blocks { done, elapsed, .. } => Reply::Blocks { done: *done, ms: elapsed.as_secs_f64() * 1e3 },
                Event::Step { step, latent, .. } => {
                    slot.put_result(*step, &clip.unpatchify(latent))?;
                    Reply::Step { step: *step }
                }
            };
            send(socket, &reply).map_err(|_| {
                gone = true;
                refuse("the owner is gone")
            })
        });
        match ran {
            Err(_) if gone => return Err(Ended::OwnerGone),
            other => other?,
        }
        // The state that was read stays as it was until the owner knows of the other one.
        let mark = slot.put(1 - state, &running)?;
        send(socket, &Reply::Done { mark })?;
    }
}

/// Opens the model over the owner's regions, and the slot of a clip to carry.
fn set_up(socket: &UnixStream, setup: &Setup) -> Result<(Lane, Option<Slot>), VideoError> {
    let mut packed: Option<Model> = None;
    let mut references: Option<Model> = None;
    for artefact in &setup.artefacts {
        let mut model = Model::open(artefact)?;
        let fingerprint = model.artefact().map(trefoil_weights::Artefact::fingerprint);
        let expectation = Expectation { fingerprint, ..Expectation::default() };
        model.use_regions(receive_regions(socket, &expectation, SHARING)?.regions);
        if setup.path == NumericPath::F32 {
            let reference = open_reference(&model, setup.checkpoint.as_deref())?;
            references = Some(join(references, reference, setup)?);
        }
        packed = Some(join(packed, model, setup)?);
    }
    // All that the owner passes is taken before anything is refused, so that it listens for the refusal.
    let slot = match setup.slot {
        None => None,
        Some(layout) => {
            let slot = receive_regions(socket, &Expectation::default(), SHARING)?.regions;
            let [slot] = <[_; 1]>::try_from(slot).map_err(|_| refuse("the owner passed more than one slot"))?;
            Some(Slot::over(slot, layout)?)
        }
    };
    let model = references.or(packed).ok_or_else(|| refuse("the owner named no artefact"))?;
    let model = Arc::new(model.with_sampler(setup.sampler.clone())?);
    let calibration = setup.calibration.as_ref().map(|bits| Arc::new(Calibration::from_bits(bits)));
    let spec: EngineSpec = setup.engine.parse()?;
    Ok((Lane::open(&spec, &model, setup.path, calibration.as_ref())?, slot))
}

fn join(first: Option<Model>, model: Model, setup: &Setup) -> Result<Model, VideoError> {
    match first {
        None => Ok(model),
        Some(first) => first.joined(model, setup.sampler.clone()),
    }
}

pub(super) fn refuse(reason: &str) -> VideoError {
    VideoError::Engine { engine: "worker".to_string(), reason: reason.to_string() }
}
