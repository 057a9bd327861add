//! Files of decoded clips: pictures, animations, raw tensors; each appears whole or not at all, and says how it was made.

mod atomic;
mod clip;
mod error;
mod frame;
mod gif;
mod metadata;
#[cfg(feature = "mp4")]
mod mp4;
mod png;
mod strip;
mod tensors;
mod webp;

pub use self::png::ContactSheet;
pub(crate) use atomic::TEMPORARY;
pub use clip::{ClipFormat, ClipReport, ClipWriter};
pub use error::OutputError;
pub use frame::{FrameHealth, VideoFrame};
pub use metadata::ClipMetadata;
pub use strip::{ClipStrip, write_job_sheet};
pub use tensors::{NamedTensor, write_tensors};
