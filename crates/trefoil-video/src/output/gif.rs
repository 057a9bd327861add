//! Animated GIF: 256 colours a frame, for places that show nothing else.

use super::atomic::AtomicFile;
use super::{ClipMetadata, OutputError, VideoFrame};
use gif::{AnyExtension, Encoder, Extension, Frame, Repeat};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Effort of choosing colours, 1 (best) to 30.
const SPEED: i32 = 10;

/// A GIF being written.
pub(super) struct AnimatedGif {
    file: AtomicFile,
    encoder: Encoder<BufWriter<File>>,
    fps: u32,
    frames: u32,
}

impl std::fmt::Debug for AnimatedGif {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("AnimatedGif").field("file", &self.file).finish_non_exhaustive()
    }
}

impl AnimatedGif {
    pub(super) fn create(
        path: &Path,
        (height, width): (usize, usize),
        metadata: &ClipMetadata,
    ) -> Result<AnimatedGif, OutputError> {
        let (Ok(width), Ok(height)) = (u16::try_from(width), u16::try_from(height)) else {
            return Err(OutputError::format(
                path,
                format!("a GIF has at most 65535 pixels a side, not {width}×{height}"),
            ));
        };
        let file = AtomicFile::create(path)?;
        let fail = |error: gif::EncodingError| OutputError::encode(path, error);
        let mut encoder = Encoder::new(BufWriter::new(file.handle()?), width, height, &[]).map_err(fail)?;
        encoder.set_repeat(Repeat::Infinite).map_err(fail)?;
        for (keyword, text) in metadata.entries() {
            let comment = AnyExtension(Extension::Comment as u8);
            encoder.write_raw_extension(comment, &[format!("{keyword}: {text}").as_bytes()]).map_err(fail)?;
        }
        Ok(AnimatedGif { file, encoder, fps: metadata.fps, frames: 0 })
    }

    pub(super) fn push(&mut self, frame: &VideoFrame) -> Result<(), OutputError> {
        let mut picture = Frame::from_rgb_speed(frame.width() as u16, frame.height() as u16, &frame.to_bytes(), SPEED);
        picture.delay = delay(self.frames, self.fps);
        self.frames += 1;
        let path = self.file.path();
        self.encoder.write_frame(&picture).map_err(|error| OutputError::encode(path, error))
    }

    pub(super) fn finish(self) -> Result<(), OutputError> {
        let path = self.file.path().to_path_buf();
        let mut out = self.encoder.into_inner().map_err(|error| OutputError::encode(&path, error))?;
        out.flush().map_err(OutputError::io("write", &path))?;
        drop(out);
        self.file.commit()
    }
}

/// Hundredths of a second that frame `index` stays, so that the clip as a whole keeps its rate.
fn delay(index: u32, fps: u32) -> u16 {
    let end = |index: u32| (u64::from(index) * 100 + u64::from(fps) / 2) / u64::from(fps);
    (end(index + 1) - end(index)) as u16
}

#[cfg(test)]
mod tests {
    use super::delay;

    #[test]
    fn delays_keep_the_rate_over_the_clip() {
        let sum = |fps: u32, frames: u32| (0..frames).map(|index| u32::from(delay(index, fps))).sum::<u32>();
        assert_eq!((sum(16, 16), sum(16, 160), sum(24, 48), sum(10, 10)), (100, 1000, 200, 100));
        assert!((0..64).all(|index| (6..=7).contains(&delay(index, 16))));
    }
}
