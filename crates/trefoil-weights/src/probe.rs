//! Finding the largest region that each engine maps, by trying (HeteroVDiff 3.2).
//!
//! Platforms do not tell: Adreno advertises 1,024 MiB, gralloc refuses 2²⁹ bytes, 511 MiB works. So every attempt runs in a
//! child process of its own, and a crash, a hang or a kill is a finding like a refusal. Sizes double until one fails, then
//! the gap is bisected.

use crate::WeightsError;
use crate::region::{Region, RegionKind};
use serde::{Deserialize, Serialize};
use std::any::Any;
use std::ffi::OsString;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// Bytes between two marks that the child writes and engines can check.
pub const MARK_STRIDE: usize = 1 << 20;
/// Begins the child's answer, so that what libraries print is not mistaken for it.
const ANSWER: &str = "trefoil-probe-answer ";
/// How often a running child is looked at.
const POLL: Duration = Duration::from_millis(2);

/// What an engine keeps while a region is mapped; dropping it unmaps.
pub type Mapped = Box<dyn Any>;

/// An engine that can map regions.
pub trait MapProbe {
    /// Name in reports, such as `cpu` or `opencl:0`.
    fn name(&self) -> &str;

    /// Maps the region as the engine would for weights, touches it if it can ([`check_marks`]), and returns what keeps it
    /// mapped, because the question is what several engines map at once. Runs in a child process: crashing is allowed.
    fn try_map(&self, region: &Region) -> Result<Mapped, String>;
}

/// The processor: maps the descriptor a second time and checks the marks through that mapping.
#[derive(Debug, Clone, Copy, Default)]
pub struct CpuProbe;

impl MapProbe for CpuProbe {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn try_map(&self, region: &Region) -> Result<Mapped, String> {
        let descriptor = region.descriptor().try_clone_to_owned().map_err(|error| error.to_string())?;
        let (block, kind, access) = (region.block(), region.kind(), region.access());
        let twin = Region::from_descriptor(descriptor, block, kind, access, region.offset(), region.len())
            .map_err(|error| error.to_string())?;
        check_marks(twin.bytes().map_err(|error| error.to_string())?)?;
        Ok(Box::new(twin))
    }
}

/// Whether the bytes hold the marks that the probe wrote: at every [`MARK_STRIDE`] and at the end.
pub fn check_marks(bytes: &[u8]) -> Result<(), String> {
    match marks(bytes.len()).find(|&(at, mark)| bytes[at] != mark) {
        Some((at, mark)) => Err(format!("byte {at} of {} is {} instead of {mark}", bytes.len(), bytes[at])),
        None => Ok(()),
    }
}

/// Positions and values of the marks in a region of `len` bytes.
fn marks(len: usize) -> impl Iterator<Item = (usize, u8)> {
    (0..len).step_by(MARK_STRIDE).chain(len.checked_sub(1)).map(|at| (at, (at / MARK_STRIDE) as u8 ^ 0x5a))
}

/// How the child is started: this program with a hidden argument, whose handler calls [`probe_child_main`].
#[derive(Debug, Clone)]
pub struct ChildCommand {
    /// Program.
    pub program: PathBuf,
    /// Arguments that lead to [`probe_child_main`].
    pub arguments: Vec<OsString>,
}

impl ChildCommand {
    /// The running program with other arguments.
    pub fn this_program(arguments: &[&str]) -> Result<ChildCommand, WeightsError> {
        let program =
            std::env::current_exe().map_err(WeightsError::io("find", std::path::Path::new("this program")))?;
        Ok(ChildCommand { program, arguments: arguments.iter().map(OsString::from).collect() })
    }
}

/// What to try.
#[derive(Debug, Clone)]
pub struct ProbeOptions {
    /// Kinds of memory.
    pub kinds: Vec<RegionKind>,
    /// No size above this is tried; reports say so where it ended the search.
    pub cap_bytes: u64,
    /// First size, and the precision of the answer.
    pub step_bytes: u64,
    /// How long one attempt may take.
    pub timeout: Duration,
    /// How attempts are started.
    pub child: ChildCommand,
}

impl ProbeOptions {
    /// All kinds, up to 4 GiB or half of the available memory, to 1 MiB, 20 s an attempt.
    pub fn new(child: ChildCommand) -> ProbeOptions {
        let available = crate::memory::available_bytes().unwrap_or(1 << 30);
        ProbeOptions {
            kinds: RegionKind::ALL.to_vec(),
            cap_bytes: (available / 2).min(4 << 30),
            step_bytes: 1 << 20,
            timeout: Duration::from_secs(20),
            child,
        }
    }
}

/// How one attempt ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "outcome")]
pub enum Attempt {
    /// All asked engines mapped it at once.
    Mapped,
    /// Somebody said no.
    Refused {
        /// Who and why, one line.
        reason: String,
    },
    /// The child died from a signal.
    Crashed {
        /// Signal number.
        signal: i32,
        /// Last line it wrote to its error output.
        message: String,
    },
    /// The child ended without an answer.
    NoAnswer {
        /// Exit code.
        code: i32,
        /// Last line it wrote to its error output.
        message: String,
    },
    /// The child was killed after the timeout.
    TimedOut {
        /// Milliseconds waited.
        after_ms: u64,
    },
}

/// The largest region that some engines map.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EngineLimit {
    /// The engines that had to map it at once.
    pub engines: Vec<String>,
    /// Largest size that worked, 0 if none did. Exact to the step.
    pub largest_bytes: u64,
    /// True where the cap ended the search: the real limit may be higher.
    pub capped: bool,
    /// Smallest size that failed, and how.
    pub first_failure: Option<(u64, Attempt)>,
    /// Attempts made.
    pub attempts: u32,
}

/// What is known about one kind of memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KindReport {
    /// Kind.
    pub kind: RegionKind,
    /// Why the kind does not exist here; then nothing was tried.
    pub unavailable: Option<String>,
    /// Each engine alone.
    pub engines: Vec<EngineLimit>,
    /// All engines on the same region at once.
    pub together: Option<EngineLimit>,
}

/// The answer of [`probe`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ProbeReport {
    /// Sizes above this were not tried.
    pub cap_bytes: u64,
    /// Precision.
    pub step_bytes: u64,
    /// One report a kind.
    pub kinds: Vec<KindReport>,
}

/// What a child is asked to do, as JSON on its standard input.
#[derive(Debug, Serialize, Deserialize)]
struct Request {
    kind: RegionKind,
    bytes: u64,
    engines: Vec<String>,
}

/// Finds the limits. Only names of `engines` are used here; the children call them.
///
/// # Errors
/// Only where children cannot be started at all; everything that happens in them is in the report.
pub fn probe(engines: &[&dyn MapProbe], options: &ProbeOptions) -> Result<ProbeReport, WeightsError> {
    let names: Vec<String> = engines.iter().map(|engine| engine.name().to_string()).collect();
    let mut kinds = Vec::new();
    for &kind in &options.kinds {
        if let Err(error) = kind.check() {
            kinds.push(KindReport { kind, unavailable: Some(error.to_string()), engines: Vec::new(), together: None });
            continue;
        }
        let limits: Vec<EngineLimit> =
            names.iter().map(|name| find_limit(kind, std::slice::from_ref(name), options)).collect::<Result<_, _>>()?;
        let together = if names.len() > 1 { Some(find_limit(kind, &names, options)?) } else { limits.first().cloned() };
        kinds.push(KindReport { kind, unavailable: None, engines: limits, together });
    }
    Ok(ProbeReport { cap_bytes: options.cap_bytes, step_bytes: options.step_bytes, kinds })
}

/// Doubles from one step until a size fails or the cap is reached, then bisects.
fn find_limit(kind: RegionKind, engines: &[String], options: &ProbeOptions) -> Result<EngineLimit, WeightsError> {
    let step = options.step_bytes.max(1);
    let mut limit =
        EngineLimit { engines: engines.to_vec(), largest_bytes: 0, capped: false, first_failure: None, attempts: 0 };
    let mut next = step.min(options.cap_bytes);
    loop {
        let attempt = attempt(&Request { kind, bytes: next, engines: engines.to_vec() }, options)?;
        limit.attempts += 1;
        if attempt == Attempt::Mapped {
            limit.largest_bytes = next;
        } else {
            limit.first_failure = Some((next, attempt));
        }
        next = match &limit.first_failure {
            None if limit.largest_bytes >= options.cap_bytes => {
                limit.capped = true;
                return Ok(limit);
            }
            None => limit.largest_bytes.saturating_mul(2).min(options.cap_bytes),
            Some((failed, _)) if failed - limit.largest_bytes <= step => return Ok(limit),
            // Sizes stay multiples of the step, so that the bisection ends with neighbours.
            Some((failed, _)) => limit.largest_bytes + ((failed - limit.largest_bytes) / 2 / step).max(1) * step,
        };
    }
}

/// Runs one attempt in a child.
fn attempt(request: &Request, options: &ProbeOptions) -> Result<Attempt, WeightsError> {
    let program = &options.child.program;
    let spool = || tempfile::tempfile().map_err(WeightsError::io("create a temporary file for", program));
    // Files rather than pipes: a child that writes without end must not wait for us, nor we for it.
    let (mut output, mut errors) = (spool()?, spool()?);
    let copy = |file: &File| file.try_clone().map_err(WeightsError::io("duplicate the output of", program));
    let mut child = Command::new(program)
        .args(&options.child.arguments)
        .stdin(Stdio::piped())
        .stdout(copy(&output)?)
        .stderr(copy(&errors)?)
        .spawn()
        .map_err(WeightsError::io("start", program))?;
    let start = Instant::now();
    if let Some(mut input) = child.stdin.take() {
        // A child that died already is noticed below.
        let _ = input.write_all(&serde_json::to_vec(request).unwrap_or_default());
    }
    let status = loop {
        if let Some(status) = child.try_wait().map_err(WeightsError::io("wait for", program))? {
            break status;
        }
        if start.elapsed() > options.timeout {
            let _ = child.kill();
            let _ = child.wait();
            return Ok(Attempt::TimedOut { after_ms: options.timeout.as_millis() as u64 });
        }
        std::thread::sleep(POLL);
    };
    let answer = tail(&mut output).lines().rev().find_map(|line| {
        let (_, json) = line.split_once(ANSWER)?;
        serde_json::from_str(json).ok()
    });
    let message = tail(&mut errors).lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("").trim().to_string();
    Ok(match (status.signal(), answer) {
        // A crash while unmapping counts: the engine did not survive the region.
        (Some(signal), _) => Attempt::Crashed { signal, message },
        (None, Some(answer)) => answer,
        (None, None) => Attempt::NoAnswer { code: status.code().unwrap_or(-1), message },
    })
}

/// The last 64 KiB of a spool file as text.
fn tail(file: &mut File) -> String {
    let mut bytes = Vec::new();
    let length = file.metadata().map_or(0, |metadata| metadata.len());
    if file.seek(SeekFrom::Start(length.saturating_sub(1 << 16))).is_ok() {
        let _ = file.take(1 << 16).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The child's side: reads one request from standard input, tries it, prints the answer. The program calls this for its
/// hidden argument, with the same engines as the parent.
pub fn probe_child_main(engines: &[&dyn MapProbe]) -> ExitCode {
    let mut text = String::new();
    let request: Request = match std::io::stdin()
        .take(1 << 16)
        .read_to_string(&mut text)
        .map_err(|error| error.to_string())
        .and_then(|_| serde_json::from_str(&text).map_err(|error| error.to_string()))
    {
        Ok(request) => request,
        Err(error) => {
            eprintln!("no probe request on standard input: {error}");
            return ExitCode::from(2);
        }
    };
    let answer = match try_request(&request, engines) {
        Ok(()) => Attempt::Mapped,
        Err(reason) => Attempt::Refused { reason: reason.split_whitespace().collect::<Vec<_>>().join(" ") },
    };
    match serde_json::to_string(&answer) {
        Ok(json) => println!("\n{ANSWER}{json}"),
        Err(error) => eprintln!("{error}"),
    }
    ExitCode::SUCCESS
}

fn try_request(request: &Request, engines: &[&dyn MapProbe]) -> Result<(), String> {
    let len = usize::try_from(request.bytes).map_err(|_| format!("{} bytes cannot be addressed", request.bytes))?;
    let region = Region::build(0, len, request.kind, None, |bytes| marks(len).for_each(|(at, mark)| bytes[at] = mark))
        .map_err(|error| error.to_string())?;
    // All stay mapped until the last has mapped.
    let mut held = Vec::new();
    for name in &request.engines {
        let engine = engines
            .iter()
            .find(|engine| engine.name() == name)
            .ok_or_else(|| format!("the child has no engine `{name}`"))?;
        held.push(engine.try_map(&region).map_err(|reason| format!("{name}: {reason}"))?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_cover_start_stride_and_end() {
        assert_eq!(marks(0).count(), 0);
        assert_eq!(marks(1).map(|(at, _)| at).collect::<Vec<_>>(), [0, 0]);
        assert_eq!(
            marks(MARK_STRIDE * 2 + 5).map(|(at, _)| at).collect::<Vec<_>>(),
            [0, MARK_STRIDE, 2 * MARK_STRIDE, 2 * MARK_STRIDE + 4]
        );
        let mut bytes = vec![0u8; MARK_STRIDE + 1];
        marks(bytes.len()).for_each(|(at, mark)| bytes[at] = mark);
        check_marks(&bytes).unwrap();
        bytes[MARK_STRIDE] ^= 1;
        assert!(check_marks(&bytes).unwrap_err().contains(&MARK_STRIDE.to_string()));
    }

    #[test]
    fn the_processor_maps_what_it_reads() {
        let region = Region::build(0, MARK_STRIDE * 3, RegionKind::Memfd, None, |bytes| {
            marks(bytes.len()).for_each(|(at, mark)| bytes[at] = mark);
        })
        .unwrap();
        CpuProbe.try_map(&region).unwrap();
        let blank = Region::build(0, MARK_STRIDE, RegionKind::Memfd, None, |_| ()).unwrap();
        assert!(CpuProbe.try_map(&blank).is_err());
    }
}
