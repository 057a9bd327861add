//! Prompts to token ids, through the public `tokenizer.json`.

use super::{TextError, clean};
use std::path::Path;

/// Longest prompt that is read; 512 tokens never need as much.
const MAX_PROMPT_BYTES: usize = 64 << 10;
/// Largest tokenizer file; the public one has 17 MB.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// A prompt as token ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tokenised {
    /// Ids with `</s>` at the end, no padding.
    pub ids: Vec<u32>,
    /// Ids before the prompt was cut to the text length; larger than `ids.len()` where it was.
    pub full_length: usize,
    /// Ids that the vocabulary does not know (`<unk>`).
    pub unknown: usize,
}

/// The tokenizer of a text encoder.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    eos: u32,
    unknown: Option<u32>,
}

impl Tokenizer {
    /// Opens `tokenizer.json`: the file, its folder, or a pipeline folder that holds `tokenizer/tokenizer.json`. `eos` is the
    /// encoder's end-of-sequence token.
    ///
    /// # Errors
    /// No such file (also where only a SentencePiece model is there), or one that is no tokenizer.
    pub fn open(path: &Path, eos: u32) -> Result<Tokenizer, TextError> {
        let file = [path.join("tokenizer").join("tokenizer.json"), path.join("tokenizer.json")]
            .into_iter()
            .find(|file| file.is_file())
            .unwrap_or_else(|| path.to_path_buf());
        let fail = |reason: String| TextError::Tokenizer { path: file.clone(), reason };
        if file.is_dir() {
            let hint = "no tokenizer.json in it; copy the model's tokenizer folder (a spiece.model alone is not read)";
            return Err(fail(hint.to_string()));
        }
        let length = std::fs::metadata(&file).map_err(|error| fail(error.to_string()))?.len();
        if length > MAX_FILE_BYTES {
            return Err(fail(format!("{length} bytes are more than the {MAX_FILE_BYTES} that are read")));
        }
        let bytes = std::fs::read(&file).map_err(|error| fail(error.to_string()))?;
        let mut inner = tokenizers::Tokenizer::from_bytes(&bytes)
            .map_err(|error| fail(format!("not a tokenizer.json ({error}); copy the model's own")))?;
        // Cutting and padding are done here, in the encoder's words.
        inner.with_truncation(None).map_err(|error| fail(error.to_string()))?;
        inner.with_padding(None);
        let unknown = inner.token_to_id("<unk>");
        Ok(Tokenizer { inner, eos, unknown })
    }

    /// Ids of a cleaned prompt ([`clean`]), at most `text_len` with `</s>` last: a longer prompt keeps its first
    /// `text_len − 1` tokens.
    ///
    /// # Errors
    /// A prompt of more than 64 KiB, or one without any text. `number` (from 1) names it.
    pub fn encode(&self, prompt: &str, text_len: usize, number: usize) -> Result<Tokenised, TextError> {
        let fail = |reason: String| TextError::Prompt { number, reason };
        if prompt.len() > MAX_PROMPT_BYTES {
            return Err(fail(format!(
                "{} bytes are more than {MAX_PROMPT_BYTES}; only about {text_len} words are used, shorten it",
                prompt.len()
            )));
        }
        let text = clean(prompt);
        if text.is_empty() {
            return Err(fail("it has no text; write what the video should show".to_string()));
        }
        let encoding =
            self.inner.encode(text.as_str(), true).map_err(|error| fail(format!("cannot be tokenised ({error})")))?;
        let mut ids = encoding.get_ids().to_vec();
        if ids.last() != Some(&self.eos) {
            ids.push(self.eos);
        }
        let full_length = ids.len();
        if full_length > text_len {
            ids.truncate(text_len);
            if let Some(last) = ids.last_mut() {
                *last = self.eos;
            }
        }
        let unknown = ids.iter().filter(|&&id| Some(id) == self.unknown).count();
        Ok(Tokenised { ids, full_length, unknown })
    }
}
