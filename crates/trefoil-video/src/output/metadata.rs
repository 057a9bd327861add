//! What a clip's files say about how it was made.

use serde::{Deserialize, Serialize};

/// How a clip was made; written into every file that has room for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClipMetadata {
    /// Frames a second.
    pub fps: u32,
    /// Prompt, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt: Option<String>,
    /// Seed of the noise, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Numeric path of what made the latent and of the decoder, such as `w8a8, decoder f32`.
    pub numeric_path: String,
    /// Plan that ran, in one line, where there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<String>,
    /// Where the latent came from, where it was read from a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
}

impl ClipMetadata {
    /// Keyword and text pairs for formats with text entries (PNG's registered keywords where one fits).
    pub(super) fn entries(&self) -> Vec<(&'static str, String)> {
        let mut entries = vec![("Software", concat!("trefoil ", env!("CARGO_PKG_VERSION")).to_string())];
        if let Some(prompt) = &self.prompt {
            entries.push(("Description", prompt.clone()));
        }
        entries.push(("Comment", self.json()));
        entries
    }

    /// One line of JSON with all fields.
    pub fn json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}
