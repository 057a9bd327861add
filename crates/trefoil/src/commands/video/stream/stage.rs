//! The last stage of a stream: decoding a clip and writing it, or writing its latent.

use super::args::StreamFormat;
use crate::commands::video::lanes::share_a_driver;
use crate::commands::video::memory::Need;
use crate::commands::video::size::Size;
use crate::context::stop_flag;
use crate::error::CliError;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use trefoil_video::engine::EngineDecoder;
use trefoil_video::output::{
    ClipMetadata, ClipReport, ClipStrip, ClipWriter, NamedTensor, OutputError, VideoFrame, write_tensors,
};
use trefoil_video::stream::{Denoised, time_decoding};
use trefoil_video::vae::{DecoderPath, Latent, VaeConfig};
use trefoil_video::{EngineSpec, VideoError};

/// What happens to a clip after its last block.
#[derive(Clone)]
pub enum Stage {
    /// Its latent is written; a stand-in for a decoder waits.
    Latents {
        /// Milliseconds that the stand-in waits.
        wait_ms: f64,
    },
    /// It is decoded, and the frames are written.
    Decode(Box<Decoding>),
}

/// A decoder and how its clips are written.
#[derive(Clone)]
pub struct Decoding {
    /// Decoder, on the engine that ends a clip; absent while another has the driver's threads.
    on: Arc<Mutex<Option<Arc<EngineDecoder>>>>,
    /// Its configuration.
    config: VaeConfig,
    /// What it computes in.
    path: DecoderPath,
    /// Which device it runs on.
    notes: Vec<String>,
    /// The engine's kernels.
    kernels: String,
    /// The engine as it was asked for.
    engine: EngineSpec,
    /// Where its weights are.
    model: PathBuf,
    /// Size of the clips.
    pub size: Size,
    /// How they are written.
    pub format: StreamFormat,
}

/// Where a clip goes.
pub struct Outputs {
    /// The clip.
    pub clip: PathBuf,
    /// Its strip, where frames are decoded.
    pub strip: Option<PathBuf>,
    /// What its files say.
    pub metadata: ClipMetadata,
}

impl Stage {
    /// Refuses a decoder that cannot take the transformer's latents, and clips that their format cannot hold.
    pub fn check(&self, channels: usize) -> Result<(), CliError> {
        let Stage::Decode(decoding) = self else { return Ok(()) };
        if decoding.config.z_dim != channels {
            return Err(CliError::Usage(format!(
                "the decoder takes latents of {} channels and the transformer makes {channels}; is it this model's decoder?",
                decoding.config.z_dim
            )));
        }
        let folder = std::env::temp_dir();
        let probe = tempfile::tempdir_in(&folder).map_err(|source| CliError::File {
            action: "write",
            path: folder.clone(),
            source,
        })?;
        let Size { frames, width, height, fps } = decoding.size;
        let metadata =
            ClipMetadata { fps, prompt: None, seed: None, numeric_path: String::new(), plan: None, source: None };
        let path = probe.path().join(decoding.format.file("clip"));
        let named = |error: OutputError| match error {
            // The clip's own name means nothing to anybody yet.
            OutputError::Format { reason, .. } => CliError::Usage(format!("the clips: {reason}")),
            other => VideoError::from(other).into(),
        };
        drop(ClipWriter::create(&path, (height, width), frames, metadata).map_err(named)?);
        Ok(())
    }

    /// The same stage at the end of another engine. Where this process cannot decode on both, this one's decoder is closed until
    /// [`Stage::ready`] or its next clip.
    pub fn on(&self, engine: &EngineSpec) -> Result<Self, VideoError> {
        let Stage::Decode(decoding) = self else { return Ok(self.clone()) };
        if decoding.engine == *engine {
            decoding.on()?;
            return Ok(self.clone());
        }
        if share_a_driver(&decoding.engine, engine)? {
            decoding.held().take();
        }
        let Decoding { model, path, size, format, .. } = &**decoding;
        Ok(Stage::Decode(Box::new(Decoding::open(model, *path, engine, *size, *format)?)))
    }

    /// Whether this process can decode on both engines at once.
    pub fn fits_both(&self, [one, other]: [&EngineSpec; 2]) -> Result<bool, VideoError> {
        match self {
            Stage::Latents { .. } => Ok(true),
            Stage::Decode(_) => Ok(!share_a_driver(one, other)?),
        }
    }

    /// Opens the decoder again where another one had to have its place.
    pub fn ready(&self) -> Result<(), VideoError> {
        match self {
            Stage::Latents { .. } => Ok(()),
            Stage::Decode(decoding) => decoding.on().map(drop),
        }
    }

    /// What a reader of the result should know about it.
    pub fn notes(&self) -> Vec<String> {
        match self {
            Stage::Latents { .. } => Vec::new(),
            Stage::Decode(decoding) => decoding.notes.clone(),
        }
    }

    /// The decoder's memory for latents of `[frames, height, width]`.
    pub fn needs(&self, latent: [usize; 3]) -> Result<Vec<Need>, CliError> {
        let Stage::Decode(decoding) = self else { return Ok(Vec::new()) };
        // Its weights are in memory already.
        let memory = decoding.on()?.memory(latent).map_err(VideoError::from)?;
        Ok(vec![Need { what: "decoder", bytes: (memory.history + memory.working) as u64 }])
    }

    /// What a report says of it.
    pub fn describe(&self) -> String {
        match self {
            Stage::Latents { wait_ms } if *wait_ms > 0.0 => {
                format!("a stand-in for the decoder that waits {} (emulated)", trefoil_report::format::time(*wait_ms))
            }
            Stage::Latents { .. } => "writing latents, no decoder".to_owned(),
            Stage::Decode(decoding) => {
                format!(
                    "decoding in {} on {} ({}) and writing {}",
                    decoding.path,
                    EngineSpec { shape: None, ..decoding.engine.clone() },
                    decoding.kernels,
                    decoding.format.as_str()
                )
            }
        }
    }

    /// Frames a second, where there are frames.
    pub fn fps(&self) -> Option<u32> {
        match self {
            Stage::Latents { .. } => None,
            Stage::Decode(decoding) => Some(decoding.size.fps),
        }
    }

    /// The numeric path of a clip whose blocks ran on `path`.
    pub fn numeric_path(&self, path: &str) -> String {
        match self {
            Stage::Latents { .. } => path.to_owned(),
            Stage::Decode(decoding) => format!("{path}, decoder {}", decoding.path),
        }
    }

    /// Does it for one clip. Without `outputs` frames are decoded and dropped.
    pub fn run(&self, done: &Denoised<'_>, outputs: Option<&Outputs>) -> Result<Option<ClipReport>, VideoError> {
        let shape = done.clip.shape();
        let values = done.clip.unpatchify(done.state.latent());
        match self {
            Stage::Latents { wait_ms } => {
                if *wait_ms > 0.0 {
                    std::thread::sleep(Duration::from_secs_f64(wait_ms / 1e3));
                }
                if let Some(outputs) = outputs {
                    let shape: Vec<usize> = std::iter::once(1).chain(shape).collect();
                    let tensor = NamedTensor { name: "latent", shape: &shape, values: &values };
                    write_tensors(&outputs.clip, &[tensor], &notes(&outputs.metadata))?;
                }
                Ok(None)
            }
            Stage::Decode(decoding) => {
                let [channels, frames, height, width] = shape;
                let latent = Latent::new(channels, frames, height, width, values)?;
                decoding.run(latent, done.clip.trajectory().blocks(), outputs).map(Some)
            }
        }
    }

    /// Milliseconds of it for one clip whose latent has `[frames, height, width]`, from a part of one; what it writes goes into
    /// `folder` and is removed.
    pub fn time(
        &self,
        latent: [usize; 3],
        folder: &Path,
        keep_going: &(dyn Fn() -> Result<(), VideoError> + Sync),
    ) -> Result<f64, VideoError> {
        match self {
            Stage::Latents { wait_ms } => {
                std::thread::sleep(Duration::from_secs_f64(wait_ms / 1e3));
                Ok(*wait_ms)
            }
            Stage::Decode(decoding) => {
                let on = decoding.on()?;
                let _on_cores = on.engine().on_cores();
                let decoding_ms = time_decoding(on.decoder(), on.kernels(), latent, keep_going)?;
                Ok(decoding_ms + decoding.time_writing(folder)?)
            }
        }
    }
}

impl Decoding {
    /// Opens a decoder on the engine that ends a clip.
    pub fn open(
        model: &Path,
        path: DecoderPath,
        engine: &EngineSpec,
        size: Size,
        format: StreamFormat,
    ) -> Result<Self, VideoError> {
        let on = EngineDecoder::open(model, path, engine)?;
        Ok(Self {
            config: on.decoder().config().clone(),
            path,
            notes: on.engine().notes().to_vec(),
            kernels: on.engine().kernels_name(),
            engine: engine.clone(),
            model: model.to_owned(),
            size,
            format,
            on: Arc::new(Mutex::new(Some(Arc::new(on)))),
        })
    }

    /// The decoder's configuration.
    pub fn config(&self) -> &VaeConfig {
        &self.config
    }

    fn held(&self) -> MutexGuard<'_, Option<Arc<EngineDecoder>>> {
        self.on.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The decoder, opened where it was closed.
    fn on(&self) -> Result<Arc<EngineDecoder>, VideoError> {
        let mut held = self.held();
        if let Some(on) = &*held {
            return Ok(Arc::clone(on));
        }
        let on = Arc::new(EngineDecoder::open(&self.model, self.path, &self.engine)?);
        *held = Some(Arc::clone(&on));
        Ok(on)
    }

    fn run(&self, latent: Latent, blocks: usize, outputs: Option<&Outputs>) -> Result<ClipReport, VideoError> {
        let on = self.on()?;
        let _on_cores = on.engine().on_cores();
        let latent = latent.denormalise(&self.config)?;
        let (extent, frames) = ((self.size.height, self.size.width), self.size.frames);
        let mut strip = ClipStrip::new(extent.0, extent.1, frames);
        let mut clip = match outputs {
            Some(outputs) => Some(ClipWriter::create(&outputs.clip, extent, frames, outputs.metadata.clone())?),
            None => None,
        };
        let mut report = ClipReport { frames: 0, health: trefoil_video::output::FrameHealth::default() };
        let mut before = |_| {
            let is_stopped = stop_flag().load(Ordering::SeqCst);
            if is_stopped { Err(VideoError::Interrupted { done: blocks, blocks }) } else { Ok(()) }
        };
        let mut take = |frame: VideoFrame| {
            strip.push(&frame);
            report.frames += 1;
            match &mut clip {
                Some(clip) => clip.push(&frame)?,
                None => report.health.add(frame.health()),
            }
            Ok(())
        };
        on.decoder().decode_clip(on.kernels(), &latent, &mut before, &mut take)?;
        if let Some(outputs) = outputs {
            // The strip first: a clip that is there is finished.
            if let Some(path) = &outputs.strip {
                strip.write(path, &outputs.metadata)?;
            }
        }
        match clip {
            Some(clip) => Ok(clip.finish()?),
            None => Ok(report),
        }
    }

    /// Writing a clip, from the first frames of one: noise over a ramp, which is neither easy nor hard to encode.
    fn time_writing(&self, folder: &Path) -> Result<f64, VideoError> {
        const TIMED: usize = 5;
        let Size { frames, width, height, fps } = self.size;
        let timed = frames.min(TIMED);
        let metadata =
            ClipMetadata { fps, prompt: None, seed: None, numeric_path: String::new(), plan: None, source: None };
        let probe = tempfile::Builder::new()
            .prefix(".trefoil-probe-")
            .tempdir_in(folder)
            .map_err(|source| VideoError::Io { action: "write", path: folder.to_owned(), source })?;
        let path = probe.path().join(self.format.file("probe"));
        let pictures: Vec<VideoFrame> = (0..timed).map(|number| test_picture(number, height, width)).collect();
        let begun = Instant::now();
        let mut clip = ClipWriter::create(&path, (height, width), timed, metadata.clone())?;
        for picture in &pictures {
            clip.push(picture)?;
        }
        clip.finish()?;
        let clip_ms = begun.elapsed().as_secs_f64() * 1e3;
        // A strip has as many frames whatever the clip's length.
        let begun = Instant::now();
        let mut strip = ClipStrip::new(height, width, timed);
        for picture in &pictures {
            strip.push(picture);
        }
        strip.write(&probe.path().join("strip.png"), &metadata)?;
        Ok(clip_ms * frames as f64 / timed as f64 + begun.elapsed().as_secs_f64() * 1e3)
    }
}

fn test_picture(number: usize, height: usize, width: usize) -> VideoFrame {
    let mut state = 0x2545_f491u32.wrapping_add(number as u32);
    let mut bytes = Vec::with_capacity(height * width * 3);
    for y in 0..height {
        for x in 0..width {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let ramp = (x + y + 3 * number) * 200 / (height + width);
            bytes.extend([(ramp as u8).wrapping_add((state >> 28) as u8); 3]);
        }
    }
    VideoFrame::from_bytes(height, width, &bytes)
}

/// Metadata of a latent's file, in the words that decoding looks for.
fn notes(metadata: &ClipMetadata) -> Vec<(&'static str, String)> {
    let mut notes = vec![("numeric_path", metadata.numeric_path.clone())];
    notes.extend(metadata.prompt.clone().map(|prompt| ("prompt", prompt)));
    notes.extend(metadata.seed.map(|seed| ("seed", seed.to_string())));
    notes.extend(metadata.plan.clone().map(|plan| ("plan", plan)));
    notes
}
