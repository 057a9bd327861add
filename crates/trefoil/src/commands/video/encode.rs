//! `trefoil video encode`: prompts to text states.

use super::cache::packed;
use super::shared::{CoresArg, TensorArg, check_folder, kernels};
use crate::context::{self, print, print_json};
use crate::error::CliError;
use clap::Args;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::Instant;
use trefoil_kernels::Kernels;
use trefoil_report::format;
use trefoil_video::Tensor;
use trefoil_video::output::{NamedTensor, write_tensors};
use trefoil_video::text::{TextEncoder, TextPath, TextStates, Tokenizer, pack_text};
use trefoil_weights::checkpoint::{Checkpoint, SourceType};

/// Largest file of prompts.
const MAX_PROMPT_FILE: u64 = 16 << 20;

/// `trefoil video encode`.
#[derive(Debug, Args)]
pub struct EncodeArgs {
    /// Pipeline folder (with `text_encoder/` and `tokenizer/`), encoder folder or safetensors file
    #[arg(value_name = "MODEL_DIR")]
    pub model: PathBuf,
    /// Prompts, one a line; empty lines and lines that begin with # are skipped
    #[arg(value_name = "PROMPTS.txt", required_unless_present = "ids", conflicts_with = "ids")]
    pub prompts: Option<PathBuf>,
    /// Token ids instead: `[tokens]` or `[prompts, tokens]`, padded with zeros or not
    #[arg(long, value_name = "I.safetensors:KEY")]
    pub ids: Option<TensorArg>,
    /// Where to write the states: `text_embeds` `[1, tokens, width]`, or `text_embeds.0`, `text_embeds.1`, … of several prompts
    #[arg(short, long, value_name = "T.safetensors")]
    pub output: PathBuf,
    /// The tokenizer, if it is elsewhere
    #[arg(long, value_name = "tokenizer.json|DIR", conflicts_with = "ids")]
    pub tokenizer: Option<PathBuf>,
    /// What the encoder's matrices are: f32, or int8, packed into the cache on first use
    #[arg(long, value_name = "PATH", default_value_t = TextPath::F32)]
    pub text_path: TextPath,
    /// Folder for packed models
    #[arg(long, value_name = "DIR", env = "TREFOIL_CACHE", hide_env_values = true)]
    pub cache: Option<PathBuf>,
    /// Cores to use, such as 0-3,7 [default: all]
    #[arg(long, value_name = "CORES")]
    pub cores: Option<CoresArg>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: &EncodeArgs) -> Result<(), CliError> {
    check_folder(&args.model)?;
    let inputs = [args.prompts.clone(), args.ids.as_ref().map(|ids| ids.path.clone())];
    context::check_distinct(&[Some(args.output.as_path())], &inputs.into_iter().flatten().collect::<Vec<_>>())?;
    context::check_replaceable(Some(args.output.as_path()))?;
    let source = TextSource { model: &args.model, path: args.text_path, cache: args.cache.as_deref() };
    let encoder = source.open()?;
    let mut notes = Vec::new();
    let mut texts = Vec::new();
    let ids = match (&args.prompts, &args.ids) {
        (_, Some(ids)) => read_ids(ids, encoder.config().pad_token_id)?,
        (Some(prompts), None) => {
            texts = read_prompts(prompts)?;
            let folder = args.tokenizer.as_deref().unwrap_or(&args.model);
            tokenise(&encoder, folder, &texts, &mut notes)?
        }
        (None, None) => return Err(CliError::Usage("name a file of prompts or --ids".to_owned())),
    };
    let tokens = ids.iter().map(Vec::len).sum();
    let working = encoder.working_bytes(tokens);
    if !args.json {
        print(&format!(
            "{} prompt(s), {tokens} tokens · working memory {}, layers streamed from {}\n",
            ids.len(),
            format::bytes(working as u64),
            encoder.path().display()
        ))?;
    }
    let kernels = kernels(args.cores.as_ref())?;
    let start = Instant::now();
    let states = encoder.encode(&kernels, &ids)?;
    let seconds = start.elapsed().as_secs_f64();
    let names: Vec<String> = match ids.len() {
        1 => vec!["text_embeds".to_owned()],
        count => (0..count).map(|index| format!("text_embeds.{index}")).collect(),
    };
    let shape = [1, states.text_len, states.width];
    let tensors: Vec<NamedTensor<'_>> = names
        .iter()
        .enumerate()
        .map(|(index, name)| NamedTensor { name, shape: &shape, values: states.prompt(index) })
        .collect();
    let mut metadata = vec![("lengths", json!(states.lengths).to_string())];
    metadata.push(("text_path", encoder.text_path().to_string()));
    match texts.as_slice() {
        [] => {}
        [prompt] => metadata.push(("prompt", prompt.clone())),
        prompts => metadata.push(("prompts", json!(prompts).to_string())),
    }
    write_tensors(&args.output, &tensors, &metadata)?;
    if args.json {
        return print_json(&json!({
            "output": context::shown(&args.output),
            "keys": names,
            "shape": shape,
            "lengths": states.lengths,
            "ids": ids,
            "isa": kernels.isa().name(),
            "threads": kernels.pool().threads(),
            "seconds": seconds,
            "working_bytes": working,
            "text_path": encoder.text_path(),
            "notes": notes,
        }));
    }
    for note in &notes {
        eprintln!("note: {note}");
    }
    print(&format!(
        "wrote {}: {} of {}×{} in {seconds:.2} s on {} thread(s) ({})\n",
        args.output.display(),
        names.join(", "),
        states.text_len,
        states.width,
        kernels.pool().threads(),
        kernels.isa()
    ))
}

/// Token ids of texts; what was cut or is unknown goes to `notes`.
fn tokenise(
    encoder: &TextEncoder,
    folder: &Path,
    texts: &[String],
    notes: &mut Vec<String>,
) -> Result<Vec<Vec<u32>>, CliError> {
    let text_len = encoder.config().text_len;
    let tokenizer = Tokenizer::open(folder, encoder.config().eos_token_id)?;
    let mut ids = Vec::with_capacity(texts.len());
    for (index, text) in texts.iter().enumerate() {
        let number = index + 1;
        let tokenised = tokenizer.encode(text, text_len, number)?;
        if tokenised.full_length > text_len {
            notes.push(format!("prompt {number}: {} tokens, cut to the first {text_len}", tokenised.full_length));
        }
        if tokenised.unknown > 0 {
            notes.push(format!("prompt {number}: {} token(s) that the vocabulary does not know", tokenised.unknown));
        }
        ids.push(tokenised.ids);
    }
    Ok(ids)
}

/// A pipeline folder's text encoder, and in which form.
#[derive(Debug, Clone, Copy)]
pub(super) struct TextSource<'a> {
    /// Pipeline folder, encoder folder or file.
    pub(super) model: &'a Path,
    /// What its matrices are.
    pub(super) path: TextPath,
    /// Folder for packed models.
    pub(super) cache: Option<&'a Path>,
}

impl TextSource<'_> {
    /// As the checkpoint has it.
    pub(super) fn plain(model: &Path) -> TextSource<'_> {
        TextSource { model, path: TextPath::F32, cache: None }
    }

    fn open(self) -> Result<TextEncoder, CliError> {
        let encoder = TextEncoder::open(self.model)?;
        if self.path == encoder.text_path() {
            return Ok(encoder);
        }
        if self.path == TextPath::F32 {
            return Err(CliError::Usage(format!("{} is packed in int8; give --text-path int8", self.model.display())));
        }
        let path = packed(&[encoder.path().to_owned()], "text.trefoil", self.cache, |path| {
            pack_text(encoder.path(), path, |_| {})?;
            Ok(())
        })?;
        Ok(TextEncoder::open(&path)?)
    }
}

/// Text states of the branch without the prompt, where the sampler has guidance: of `words`, or of the empty text where there are none.
pub(super) fn read_negative(
    source: TextSource<'_>,
    words: Option<&str>,
    has_guidance: bool,
    kernels: &Kernels,
    notes: &mut Vec<String>,
) -> Result<Option<Tensor>, CliError> {
    if !has_guidance {
        notes.extend(words.map(|_| "the sampler has no guidance, so --negative changes nothing".to_owned()));
        return Ok(None);
    }
    let states = if let Some(words) = said(words) {
        read_text(source, &[words.to_owned()], kernels, notes)?
    } else {
        let encoder = source.open()?;
        encoder.encode(kernels, &[vec![encoder.config().eos_token_id]])?
    };
    let values = states.prompt(0).to_vec();
    Ok(Some(Tensor::new("negative text", &[1, states.text_len, states.width], values)?))
}

/// Refuses what the other branch cannot have, as [`check_text`] does for prompts.
pub(super) fn check_negative(source: TextSource<'_>, words: Option<&str>) -> Result<(), CliError> {
    match said(words) {
        None => Ok(()),
        Some(words) => check_text(source, &[words.to_owned()])
            .map_err(|error| CliError::Usage(format!("--negative, as a prompt: {error}"))),
    }
}

/// Words that say something.
fn said(words: Option<&str>) -> Option<&str> {
    words.map(str::trim).filter(|words| !words.is_empty())
}

/// Text states of `texts` from a pipeline folder.
pub(super) fn read_text(
    source: TextSource<'_>,
    texts: &[String],
    kernels: &Kernels,
    notes: &mut Vec<String>,
) -> Result<TextStates, CliError> {
    let encoder = source.open()?;
    let ids = tokenise(&encoder, source.model, texts, notes)?;
    Ok(encoder.encode(kernels, &ids)?)
}

/// Refuses prompts that cannot be encoded, and a model without an encoder or a tokenizer, before anything is made.
pub(super) fn check_text(source: TextSource<'_>, texts: &[String]) -> Result<(), CliError> {
    let encoder = TextEncoder::open(source.model)?;
    tokenise(&encoder, source.model, texts, &mut Vec::new()).map(drop)
}

/// The prompts of a file, one a line.
pub(super) fn read_prompts(path: &Path) -> Result<Vec<String>, CliError> {
    let fail = |source| CliError::File { action: "read", path: path.to_owned(), source };
    let length = std::fs::metadata(path).map_err(fail)?.len();
    if length > MAX_PROMPT_FILE {
        return Err(CliError::Usage(format!(
            "{} has {length} bytes; a file of prompts has at most {MAX_PROMPT_FILE}",
            path.display()
        )));
    }
    let bytes = context::read_file(path)?;
    let text = match std::str::from_utf8(&bytes) {
        Ok(text) => text,
        Err(error) => {
            let line = bytes[..error.valid_up_to()].split(|&byte| byte == b'\n').count();
            return Err(CliError::Usage(format!(
                "{}: line {line} is not UTF-8; save the file as UTF-8",
                path.display()
            )));
        }
    };
    let prompts: Vec<String> = text
        .trim_start_matches('\u{feff}')
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(str::to_owned)
        .collect();
    if prompts.is_empty() {
        return Err(CliError::Usage(format!("{} holds no prompt; write one a line", path.display())));
    }
    Ok(prompts)
}

/// Rows of an integer tensor without their padding.
fn read_ids(ids: &TensorArg, pad: u32) -> Result<Vec<Vec<u32>>, CliError> {
    let fail = |reason: String| CliError::Usage(format!("`{}` of {}: {reason}", ids.key, ids.path.display()));
    let checkpoint = Checkpoint::open(&ids.path, &[])?;
    let tensor = checkpoint.tensor(&ids.key).ok_or_else(|| {
        let keys: Vec<&str> = checkpoint.tensors().map(|tensor| tensor.name.as_str()).take(12).collect();
        fail(format!("there is no such tensor; the file has {}", keys.join(", ")))
    })?;
    let width = match &tensor.dtype {
        SourceType::Raw { name } if name == "i32" => 4,
        SourceType::Raw { name } if name == "i64" => 8,
        other => return Err(fail(format!("its elements are {other:?}; token ids are i32 or i64"))),
    };
    let columns = match tensor.shape.as_slice() {
        &[tokens] | &[_, tokens] if tokens > 0 => tokens as usize,
        shape => return Err(fail(format!("its shape is {shape:?}; it must be [tokens] or [prompts, tokens]"))),
    };
    let window = checkpoint.window(tensor, 0, tensor.bytes)?;
    let mut rows = Vec::new();
    for row in window.bytes().chunks_exact(columns * width) {
        let mut row: Vec<u32> = row
            .chunks_exact(width)
            .map(|bytes| {
                let mut wide = [if bytes[width - 1] < 0x80 { 0 } else { 0xff }; 8];
                wide[..width].copy_from_slice(bytes);
                let id = i64::from_le_bytes(wide);
                u32::try_from(id).map_err(|_| fail(format!("it holds {id}, which is no token")))
            })
            .collect::<Result<_, _>>()?;
        let length = row.iter().rposition(|&id| id != pad).map_or(0, |last| last + 1);
        row.truncate(length);
        rows.push(row);
    }
    Ok(rows)
}
