//! Frames, width, height and rate of a clip: from the command line, else from the model folder, else the stock pipeline's.

use crate::error::CliError;
use std::fmt;
use std::io::ErrorKind;
use std::path::Path;
use std::str::FromStr;
use trefoil_video::MAX_TOKENS;
use trefoil_video::config::PATCH;
use trefoil_video::vae::VaeConfig;

/// Frames, size and rate where neither the command line nor the model folder says any: the stock pipeline's.
const STOCK: Size = Size { frames: 81, width: 832, height: 480, fps: 16 };
/// Largest width or height in pixels.
const MAX_SIDE: usize = 16_384;
/// Most frames of a clip's file.
const MAX_FRAMES: usize = 1 << 24;
/// Most frames a second.
const MAX_FPS: usize = 1000;

/// `WIDTHxHEIGHT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SizeArg {
    width: usize,
    height: usize,
}

impl SizeArg {
    /// A video of this size.
    pub(super) fn video(self, frames: usize) -> Size {
        Size { frames, width: self.width, height: self.height, fps: STOCK.fps }
    }
}

impl fmt::Display for SizeArg {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}×{}", self.width, self.height)
    }
}

impl FromStr for SizeArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let sides = text.split_once(['x', '×']).and_then(|(width, height)| {
            Some(Self { width: width.trim().parse().ok()?, height: height.trim().parse().ok()? })
        });
        match sides {
            Some(size) if (1..=MAX_SIDE).contains(&size.width) && (1..=MAX_SIDE).contains(&size.height) => Ok(size),
            _ => Err("write WIDTHxHEIGHT, like 832x480".to_owned()),
        }
    }
}

/// What a clip looks like from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) frames: usize,
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) fps: u32,
}

impl Size {
    /// What the command line says, else the model folder.
    pub(super) fn of(
        model: &Path,
        size: Option<SizeArg>,
        frames: Option<usize>,
        fps: Option<u32>,
    ) -> Result<Self, CliError> {
        let told = Self::of_folder(model)?;
        Ok(Self {
            frames: frames.unwrap_or(told.frames),
            width: size.map_or(told.width, |size| size.width),
            height: size.map_or(told.height, |size| size.height),
            fps: fps.unwrap_or(told.fps),
        })
    }

    /// What the model folder's sampler file says, else the stock pipeline's.
    pub(super) fn of_folder(model: &Path) -> Result<Self, CliError> {
        let file = model.join("scheduler/sampler.json");
        let bytes = match trefoil_files::read_regular(&file) {
            Ok(bytes) => bytes,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(STOCK),
            Err(error) => return Err(CliError::file("read", &file)(error)),
        };
        let refuse = |what: String| CliError::Usage(format!("{}: {what}; mend or remove it", file.display()));
        let sampler: serde_json::Value =
            serde_json::from_slice(&bytes).map_err(|error| refuse(format!("not JSON ({error})")))?;
        if !sampler.is_object() {
            return Err(refuse("a sampler should be a JSON object".to_owned()));
        }
        let told = |key: &str, stock: usize, most: usize| match &sampler[key] {
            serde_json::Value::Null => Ok(stock),
            value => value
                .as_u64()
                .map(|value| value as usize)
                .filter(|value| (1..=most).contains(value))
                .ok_or_else(|| refuse(format!("`{key}` is {value}, which is no whole number from 1 to {most}"))),
        };
        Ok(Self {
            frames: told("num_frames", STOCK.frames, MAX_FRAMES)?,
            width: told("width", STOCK.width, MAX_SIDE)?,
            height: told("height", STOCK.height, MAX_SIDE)?,
            fps: told("fps", STOCK.fps as usize, MAX_FPS)? as u32,
        })
    }

    /// Frames, rows and columns of the latent.
    pub(super) fn latent(self, vae: &VaeConfig, patch: usize) -> Result<[usize; 3], CliError> {
        let (space, time) = (vae.spatial_scale(), vae.temporal_scale());
        let step = space * patch;
        if !self.width.is_multiple_of(step) || !self.height.is_multiple_of(step) || self.width * self.height == 0 {
            return Err(CliError::Usage(format!(
                "{}×{} pixels; width and height must be multiples of {step}",
                self.width, self.height
            )));
        }
        if self.frames % time != 1 % time {
            let below = self.frames.saturating_sub(1) / time * time + 1;
            let above = below.saturating_add(time);
            return Err(CliError::Usage(format!(
                "{} frames; the decoder makes one more than a multiple of {time}, like {below} or {above}",
                self.frames
            )));
        }
        Ok([self.frames.div_ceil(time), self.height / space, self.width / space])
    }
}

/// Refuses a clip of more tokens than a transformer takes, however much memory there is. `latent` is frames, rows and columns.
pub(super) fn check_tokens(latent: [usize; 3], remedy: &str) -> Result<(), CliError> {
    let [frames, rows, columns] = latent;
    let tokens = [rows / PATCH, columns / PATCH].iter().fold(frames, |product, &side| product.saturating_mul(side));
    if tokens > MAX_TOKENS {
        return Err(CliError::Usage(format!(
            "a latent of {frames}×{rows}×{columns} has {tokens} tokens, and a clip may have {MAX_TOKENS}; {remedy}"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse() {
        assert_eq!("832x480".parse(), Ok(SizeArg { width: 832, height: 480 }));
        assert!("832".parse::<SizeArg>().is_err() && "0x9".parse::<SizeArg>().is_err());
    }

    #[test]
    fn a_folder_says_a_size_or_what_is_wrong_with_it() {
        let space = tempfile::tempdir().unwrap();
        assert_eq!(Size::of_folder(space.path()).unwrap(), STOCK);
        std::fs::create_dir(space.path().join("scheduler")).unwrap();
        assert_eq!(Size::of_folder(space.path()).unwrap(), STOCK);
        let told = |text: &str| {
            std::fs::write(space.path().join("scheduler/sampler.json"), text).unwrap();
            Size::of_folder(space.path()).map_err(|error| error.to_string())
        };
        assert_eq!(told(r#"{"width":64,"fps":null}"#), Ok(Size { width: 64, ..STOCK }));
        for (text, want) in [
            ("", "not JSON"),
            (r#"{"width":64,"#, "not JSON"),
            ("[64]", "a JSON object"),
            (r#"{"width":64.0}"#, "`width` is 64.0, which is no whole number from 1 to 16384"),
            (r#"{"height":-64}"#, "`height` is -64,"),
            (r#"{"num_frames":"17"}"#, "`num_frames` is \"17\","),
            (r#"{"fps":4294967312}"#, "`fps` is 4294967312, which is no whole number from 1 to 1000"),
            (r#"{"fps":0}"#, "`fps` is 0,"),
        ] {
            let message = told(text).unwrap_err();
            assert!(message.contains("scheduler/sampler.json: ") && message.contains(want), "{message}");
        }
    }

    #[test]
    fn more_tokens_than_a_transformer_takes_are_refused() {
        assert!(check_tokens([21, 60, 104], "x").is_ok() && check_tokens([1 << 20, 2, 2], "x").is_ok());
        let message = check_tokens([1_000_001, 8, 8], "choose less").unwrap_err().to_string();
        assert!(message.ends_with("has 16000016 tokens, and a clip may have 1048576; choose less"), "{message}");
        assert!(check_tokens([usize::MAX, 8, 8], "x").is_err());
    }
}
