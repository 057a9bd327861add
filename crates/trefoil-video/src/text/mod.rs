//! Prompts to text states: cleaning, tokenizer, umT5 encoder.

mod clean;
mod config;
mod encoder;
mod error;
mod layout;
mod tokenizer;
mod weights;

pub use clean::clean;
pub use config::TextConfig;
pub use encoder::{TextEncoder, TextStates};
pub use error::TextError;
pub use tokenizer::{Tokenised, Tokenizer};
pub use weights::{TextPath, pack_text};
