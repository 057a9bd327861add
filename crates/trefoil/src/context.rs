//! What every command needs: caches, workers, the stop flag, progress on standard error.

use crate::cli::{MeasureArgs, ModelArgs};
use crate::error::CliError;
use crate::shapes::{self, Shapes};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use trefoil_core::{HostTensor, Unit, UnitAddress};
use trefoil_onnx::npz;
use trefoil_profile::cache::{CacheUse, DEFAULT_LIMIT, LIMIT_VARIABLE, parse_limit};
use trefoil_profile::{Launcher, PrepareOptions, ProfileOptions, Progress};
use trefoil_report::format;
use trefoil_run::RunSampling;

/// Raised by Ctrl-C. A second Ctrl-C ends the program at once.
static STOP: AtomicBool = AtomicBool::new(false);

/// The stop flag, with the Ctrl-C handler installed.
pub fn stop_flag() -> &'static AtomicBool {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let handler = || {
            if STOP.swap(true, Ordering::SeqCst) {
                std::process::exit(130);
            }
        };
        // Without a handler Ctrl-C still ends the program; finished measurements are journalled either way.
        drop(ctrlc::set_handler(handler));
    });
    &STOP
}

/// The caches in use by this process; `None` for one that cannot be locked (a read-only folder), of which nothing is removed.
static CACHES: Mutex<BTreeMap<PathBuf, Option<CacheUse>>> = Mutex::new(BTreeMap::new());

/// The cache folder: as given, else the user's. It counts as in use until this process ends.
pub fn cache_dir(given: Option<&Path>) -> PathBuf {
    let folder = given.map_or_else(trefoil_profile::cache::default_cache_dir, Path::to_owned);
    let mut caches = CACHES.lock().unwrap_or_else(PoisonError::into_inner);
    // One lock for a folder, however it was spelt: two of one process would keep each other from removing anything.
    let spelt = std::path::absolute(&folder).unwrap_or_else(|_| folder.clone());
    caches.entry(spelt).or_insert_with(|| CacheUse::begin(&folder).ok());
    folder
}

/// The limit of the cache, from the environment.
///
/// # Errors
/// It is not a size.
pub fn cache_limit() -> Result<u64, CliError> {
    match std::env::var(LIMIT_VARIABLE) {
        Ok(text) => parse_limit(&text).map_err(|reason| CliError::Usage(format!("{LIMIT_VARIABLE}: {reason}"))),
        Err(_) => Ok(DEFAULT_LIMIT),
    }
}

/// Removes from the caches that were asked for what was used longest ago, where they have grown beyond `limit` bytes.
pub fn trim_caches(limit: u64) {
    for cache in CACHES.lock().unwrap_or_else(PoisonError::into_inner).values().flatten() {
        // What cannot be removed now is looked at again by the next run.
        if let Ok(trimmed) = cache.trim(limit)
            && trimmed.removed > 0
        {
            let (removed, before) = (format::bytes(trimmed.removed), format::bytes(trimmed.before));
            eprintln!(
                "cache: removed {removed} of {before}, what was used longest ago ({LIMIT_VARIABLE} sets the limit)"
            );
        }
    }
}

/// Resolves every address, or says which cannot be used and what would fix it.
pub fn resolve_units(addresses: &[UnitAddress]) -> Result<Vec<Unit>, CliError> {
    Ok(addresses.iter().map(trefoil_units::resolve).collect::<Result<_, _>>()?)
}

/// How to prepare the model of `args`, its input file read.
pub fn prepare_options(args: &ModelArgs) -> Result<PrepareOptions, CliError> {
    prepare_with(args, shapes::of_model(&args.model, &args.shapes)?)
}

/// The same with shapes that were found before, which stand for those of `args`.
pub fn prepare_with(args: &ModelArgs, shapes: Shapes) -> Result<PrepareOptions, CliError> {
    let mut options = PrepareOptions::new(Launcher::discover()?, cache_dir(args.cache.as_deref()));
    options.shapes = shapes;
    options.inputs = read_inputs(&args.input, &args.model)?;
    Ok(options)
}

/// How often plans are run in each fresh process.
pub fn run_sampling(measure: &MeasureArgs) -> RunSampling {
    if measure.quick { RunSampling::QUICK } else { RunSampling::thorough(measure.runs, measure.cap_ms) }
}

/// The tensors of `--input`; `None` for `random`. Names in a `.npz` may carry the prefix `in_` (reference files do), and
/// entries with the prefix `out_` are expectations, not inputs.
pub fn read_inputs(input: &str, model: &Path) -> Result<Option<Vec<HostTensor>>, CliError> {
    if input == "random" {
        return Ok(None);
    }
    let path = Path::new(input);
    if path.extension().is_some_and(|extension| extension == "npy") {
        let ports = trefoil_onnx::Model::load(model)?.inputs();
        let [port] = ports.as_slice() else {
            return Err(CliError::Usage(format!(
                "a .npy file holds one tensor, but {} has {} inputs; give a .npz keyed by input names",
                model.display(),
                ports.len()
            )));
        };
        let mut tensor = npz::read_npy(path)?;
        tensor.set_name(port.name.clone());
        return Ok(Some(vec![tensor]));
    }
    let mut tensors = npz::read_npz(path)?;
    if tensors.iter().any(|tensor| tensor.info().name.starts_with("in_")) {
        tensors.retain(|tensor| tensor.info().name.starts_with("in_"));
        for tensor in &mut tensors {
            let name = tensor.info().name["in_".len()..].to_owned();
            tensor.set_name(name);
        }
    }
    Ok(Some(tensors))
}

/// How to measure.
pub fn profile_options(model: &ModelArgs, measure: &MeasureArgs, strict: bool) -> Result<ProfileOptions, CliError> {
    let mut options = ProfileOptions::new(Launcher::discover()?, cache_dir(model.cache.as_deref()));
    options.granularity = model.granularity.into();
    options.warmup = measure.warmup;
    options.runs = measure.runs;
    options.cap_ms = measure.cap_ms;
    options.quick = measure.quick;
    options.corun = measure.corun;
    options.fresh = measure.fresh;
    options.strict = strict;
    options.watts = watts(measure);
    Ok(options)
}

fn watts(measure: &MeasureArgs) -> BTreeMap<String, f64> {
    measure.watts.iter().map(|entry| (entry.unit.clone(), entry.watts)).collect()
}

/// A progress line on standard error, shown only on a terminal and never with `quiet`.
pub struct ProgressLine(ProgressBar);

impl ProgressLine {
    /// A line for `what`.
    pub fn new(what: &str, quiet: bool) -> Self {
        let target = if quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let bar = ProgressBar::with_draw_target(Some(0), target).with_prefix(what.to_owned());
        let style = ProgressStyle::with_template("{prefix} {pos}/{len} {wide_msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self(bar)
    }

    /// Shows how far profiling is.
    pub fn show(&self, progress: &Progress) {
        self.0.set_length(progress.total as u64);
        self.0.set_position(progress.done as u64);
        let eta = progress.eta.map_or_else(String::new, |eta| format!("about {} left · ", duration(eta)));
        self.0.set_message(format!("{eta}{}", progress.current));
    }

    /// Shows a step without a count.
    pub fn step(&self, message: &str) {
        self.0.set_message(message.to_owned());
        self.0.tick();
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// `2 min 5 s`, `12 s`.
fn duration(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds => format!("{} min {} s", seconds / 60, seconds % 60),
    }
}

/// A path as text, for JSON: one that is not UTF-8 is no reason to fail.
pub fn shown(path: &Path) -> String {
    path.display().to_string()
}

/// The command that runs, as its reports tell it.
pub fn command_line() -> String {
    let arguments = std::env::args_os().skip(1).map(|argument| argument.to_string_lossy().into_owned());
    format!("trefoil {}", arguments.collect::<Vec<_>>().join(" "))
}

/// All bytes of a file that the user named; not of a pipe, which would be waited for, or of a device.
pub fn read_file(path: &Path) -> Result<Vec<u8>, CliError> {
    trefoil_files::read_regular(path).map_err(CliError::file("read", path))
}

/// Writes `text` to `path` under a temporary name and renames it.
pub fn write_text(path: &Path, text: &str) -> Result<(), CliError> {
    Ok(trefoil_profile::file::write_atomically(path, |mut file| file.write_all(text.as_bytes()))?)
}

/// Writes `bytes` to `path` under a temporary name and renames it.
pub fn write_bytes(path: &Path, bytes: &[u8]) -> Result<(), CliError> {
    Ok(trefoil_profile::file::write_atomically(path, |mut file| file.write_all(bytes))?)
}

/// Fails early when an output could not be written at the end of a long run.
pub fn check_writable(path: Option<&Path>) -> Result<(), CliError> {
    path.map_or(Ok(()), |path| trefoil_files::check_writable(path).map_err(CliError::file("write", path)))
}

/// The same for what is only ever put into its place whole: a device or a pipe, which text may be written to, has no place for it.
pub fn check_replaceable(path: Option<&Path>) -> Result<(), CliError> {
    let Some(path) = path else { return Ok(()) };
    trefoil_files::NewFile::create(path).map(drop).map_err(CliError::file("write", path))
}

/// Fails early when a file that is read at the end of a long run is none, or cannot be read.
pub fn check_readable(path: &Path) -> Result<(), CliError> {
    trefoil_files::open_regular(path).map(drop).map_err(CliError::file("read", path))
}

/// Fails early when outputs could not be written, or would overwrite each other or an input.
pub fn check_outputs(outputs: &[Option<&Path>], inputs: &[PathBuf]) -> Result<(), CliError> {
    outputs.iter().try_for_each(|path| check_writable(*path))?;
    check_distinct(outputs, inputs)
}

/// Refuses outputs that would overwrite each other or an input.
pub fn check_distinct(outputs: &[Option<&Path>], inputs: &[PathBuf]) -> Result<(), CliError> {
    // However it is spelt, and whether or not it is there yet.
    let full = |path: &Path| {
        let folder = || Some(std::fs::canonicalize(trefoil_files::folder_of(path)).ok()?.join(path.file_name()?));
        std::fs::canonicalize(path).ok().or_else(folder).unwrap_or_else(|| path.to_owned())
    };
    let same = |one: &Path, other: &Path| full(one) == full(other);
    let outputs: Vec<&Path> = outputs.iter().flatten().copied().collect();
    for (at, output) in outputs.iter().enumerate() {
        if inputs.iter().any(|input| same(input, output)) {
            return Err(CliError::Usage(format!(
                "{} is read and would be overwritten; name another",
                output.display()
            )));
        }
        if outputs[..at].iter().any(|other| same(other, output)) {
            return Err(CliError::Usage(format!("two outputs are named {}; name another", output.display())));
        }
    }
    Ok(())
}

/// Text without control characters but for ends of lines and tabs: names and reasons of files may hold some, and a terminal
/// would obey them.
pub fn harmless(text: &str) -> String {
    escaped(text, |character| character.escape_default().to_string())
}

fn escaped(text: &str, escape: impl Fn(char) -> String) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() && !matches!(character, '\n' | '\t') {
            shown += &escape(character);
        } else {
            shown.push(character);
        }
    }
    shown
}

/// Prints text, control characters escaped; a closed pipe (`| head`) ends the program quietly.
pub fn print(text: &str) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    match out.write_all(harmless(text).as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        Err(source) => Err(CliError::File { action: "print", path: "standard output".into(), source }),
        Ok(()) => Ok(()),
    }
}

/// Prints a value as indented JSON.
pub fn print_json(value: &impl Serialize) -> Result<(), CliError> {
    let text =
        serde_json::to_string_pretty(value).map_err(|error| CliError::Usage(format!("cannot print JSON: {error}")))?;
    // What JSON lets stand in strings, but a terminal obeys, as JSON escapes it.
    print(&(escaped(&text, |character| format!("\\u{:04x}", character as u32)) + "\n"))
}

/// Width of the terminal, if standard output is one.
pub fn width() -> Option<u16> {
    use std::io::IsTerminal;
    if !std::io::stdout().is_terminal() {
        return None;
    }
    rustix::termios::tcgetwinsize(std::io::stdout()).ok().map(|size| size.ws_col).filter(|&columns| columns >= 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(harmless("a\tb\n→ \u{1b}[31m\r\u{9b}"), "a\tb\n→ \\u{1b}[31m\\r\\u{9b}");
    }
}
