//! A clip's file in whatever format its name asks for, written frame by frame.

use super::atomic::AtomicFolder;
use super::gif::AnimatedGif;
#[cfg(feature = "mp4")]
use super::mp4::Av1Mp4;
use super::png::{AnimatedPng, write_picture};
use super::tensors::FrameTensor;
use super::webp::AnimatedWebp;
use super::{ClipMetadata, FrameHealth, OutputError, VideoFrame};
use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};

/// How a clip is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClipFormat {
    /// A folder of `frame_00001.png` … and `clip.json`.
    Frames,
    /// MP4 with AV1 video.
    Mp4,
    /// Animated PNG: every pixel as decoded, shown by all browsers.
    AnimatedPng,
    /// Animated WebP: every pixel as decoded.
    WebP,
    /// Animated GIF.
    Gif,
    /// f32 frames as safetensors.
    Tensors,
}

/// What the names of pictures in a folder of frames begin with.
const FRAME: &str = "frame_";
/// What a folder of frames says of itself.
const NOTE: &str = "clip.json";
/// Names of the formats, for messages.
const FORMATS: &str = ".mp4, DIR/ (PNG frames), .png or .apng (animated), .webp (animated), .gif, .safetensors";

impl ClipFormat {
    /// The format of a file name. Names that end in `/`, have no extension or are folders are folders of frames.
    ///
    /// # Errors
    /// An extension of no format (with those there are).
    pub fn of(path: &Path) -> Result<ClipFormat, OutputError> {
        let is_folder = path.as_os_str().to_string_lossy().ends_with('/') || path.is_dir();
        let Some(extension) = path.extension().filter(|_| !is_folder) else { return Ok(ClipFormat::Frames) };
        match extension.to_string_lossy().to_ascii_lowercase().as_str() {
            "mp4" => Ok(ClipFormat::Mp4),
            "png" | "apng" => Ok(ClipFormat::AnimatedPng),
            "webp" => Ok(ClipFormat::WebP),
            "gif" => Ok(ClipFormat::Gif),
            "safetensors" => Ok(ClipFormat::Tensors),
            other => Err(OutputError::format(path, format!("clips are not written as .{other}; use {FORMATS}"))),
        }
    }
}

/// What a written clip is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClipReport {
    /// Frames written.
    pub frames: usize,
    /// Values that a picture cannot hold.
    pub health: FrameHealth,
}

#[derive(Debug)]
enum Sink {
    #[cfg(feature = "mp4")]
    Mp4(Box<Av1Mp4>),
    Frames(AtomicFolder),
    AnimatedPng(Box<AnimatedPng>),
    WebP(Box<AnimatedWebp>),
    Gif(Box<AnimatedGif>),
    Tensors(FrameTensor),
}

/// A clip being written. Nothing is at its place before [`ClipWriter::finish`].
#[derive(Debug)]
pub struct ClipWriter {
    path: PathBuf,
    size: (usize, usize),
    frames: usize,
    metadata: ClipMetadata,
    sink: Sink,
    written: usize,
    health: FrameHealth,
}

impl ClipWriter {
    /// Starts a clip of `frames` frames of `height` × `width` at `path`, in the format of its name.
    ///
    /// # Errors
    /// An unknown extension, a place that cannot be written, a size that the format cannot hold.
    pub fn create(
        path: &Path,
        (height, width): (usize, usize),
        frames: usize,
        metadata: ClipMetadata,
    ) -> Result<ClipWriter, OutputError> {
        let format = ClipFormat::of(path)?;
        if height == 0 || width == 0 || frames == 0 || height.max(width) > 1 << 16 || frames > 1 << 24 {
            return Err(OutputError::format(path, format!("{frames} frames of {height}×{width} are no clip")));
        }
        if !(1..=1000).contains(&metadata.fps) {
            return Err(OutputError::format(path, format!("{} frames a second; it must be 1 to 1000", metadata.fps)));
        }
        let size = (height, width);
        let sink = match format {
            #[cfg(feature = "mp4")]
            ClipFormat::Mp4 => Sink::Mp4(Box::new(Av1Mp4::create(path, size, &metadata)?)),
            #[cfg(not(feature = "mp4"))]
            ClipFormat::Mp4 => {
                return Err(OutputError::format(path, "this build has no MP4 (feature `mp4`); use .png or .gif"));
            }
            ClipFormat::Frames => Sink::Frames(AtomicFolder::create(path)?),
            ClipFormat::AnimatedPng => Sink::AnimatedPng(Box::new(AnimatedPng::create(path, size, frames, &metadata)?)),
            ClipFormat::WebP => Sink::WebP(Box::new(AnimatedWebp::create(path, size, frames, &metadata)?)),
            ClipFormat::Gif => Sink::Gif(Box::new(AnimatedGif::create(path, size, &metadata)?)),
            ClipFormat::Tensors => Sink::Tensors(FrameTensor::create(path, size, frames, &metadata)?),
        };
        let path = path.to_path_buf();
        Ok(ClipWriter { path, size, frames, metadata, sink, written: 0, health: FrameHealth::default() })
    }

    /// Whether a file of this name may lie in a folder of frames.
    pub(crate) fn is_part(name: &OsStr) -> bool {
        let name = name.to_string_lossy();
        name == NOTE || (name.starts_with(FRAME) && name.ends_with(".png"))
    }

    /// Writes the next frame.
    ///
    /// # Errors
    /// A frame of another size, or one too many; what the encoder or the file system refuses.
    pub fn push(&mut self, frame: &VideoFrame) -> Result<(), OutputError> {
        let announced = |what: String| OutputError::Frames { path: self.path.clone(), reason: what };
        if (frame.height(), frame.width()) != self.size {
            let (height, width) = self.size;
            let have = format!("{}×{}", frame.height(), frame.width());
            return Err(announced(format!("a frame of {have} in a clip of {height}×{width}")));
        }
        if self.written == self.frames {
            return Err(announced(format!("more than the {} frames announced", self.frames)));
        }
        self.health.add(frame.health());
        self.written += 1;
        match &mut self.sink {
            Sink::Frames(folder) => {
                let path = folder.join(&format!("{FRAME}{:05}.png", self.written));
                let out = File::create(&path).map_err(OutputError::io("write", folder.path()))?;
                write_picture(out, folder.path(), self.size, &frame.to_bytes(), None)
            }
            #[cfg(feature = "mp4")]
            Sink::Mp4(video) => video.push(frame),
            Sink::AnimatedPng(animation) => animation.push(frame),
            Sink::WebP(animation) => animation.push(frame),
            Sink::Gif(animation) => animation.push(frame),
            Sink::Tensors(tensor) => tensor.push(frame),
        }
    }

    /// Puts the clip in its place.
    ///
    /// # Errors
    /// Fewer frames than announced; what the encoder or the file system refuses.
    pub fn finish(self) -> Result<ClipReport, OutputError> {
        if self.written != self.frames {
            let reason = format!("{} frames of the {} announced", self.written, self.frames);
            return Err(OutputError::Frames { path: self.path, reason });
        }
        match self.sink {
            Sink::Frames(folder) => {
                let fail = OutputError::io("write", folder.path());
                std::fs::write(folder.join(NOTE), self.metadata.json() + "\n").map_err(fail)?;
                folder.commit()?;
            }
            #[cfg(feature = "mp4")]
            Sink::Mp4(video) => video.finish()?,
            Sink::AnimatedPng(animation) => animation.finish()?,
            Sink::WebP(animation) => animation.finish()?,
            Sink::Gif(animation) => animation.finish()?,
            Sink::Tensors(tensor) => tensor.finish()?,
        }
        Ok(ClipReport { frames: self.written, health: self.health })
    }
}
