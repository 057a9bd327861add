//! Engines as the command line names them: `KIND[:DEVICE][@CORES][=SHAPE]`.
//!
//! `cpu@0`, `cpu@0-3`; `opencl@1` on the device that suits best, `opencl:0@1` on the first one that `trefoil probe` lists,
//! `opencl:adreno` on the one with that in its name; shaped ones `cpu@0=12.8ms` or, alone and with the other, `opencl@1=12.6:12.8ms`.

use super::Shape;
use crate::VideoError;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Kinds of engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineKind {
    /// The CPU kernels.
    Cpu,
    /// The OpenCL kernels, on a GPU or on this processor.
    OpenCl,
}

impl EngineKind {
    /// All kinds.
    pub const ALL: [EngineKind; 2] = [EngineKind::Cpu, EngineKind::OpenCl];

    /// The name used in commands and results.
    pub fn as_str(self) -> &'static str {
        match self {
            EngineKind::Cpu => "cpu",
            EngineKind::OpenCl => "opencl",
        }
    }
}

/// What an unknown kind is answered with.
const KINDS: &str =
    "write cpu@CORES or opencl@CORES, like cpu@0, cpu@0-3, opencl@1 or, on a device of your choice, opencl:0@1";

/// An engine to make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineSpec {
    /// Kind.
    pub kind: EngineKind,
    /// Which OpenCL device: its number, or a part of its name or its platform's. `None` leaves the choice to the engine.
    pub device: Option<String>,
    /// Cores as given; empty means all that this process may use.
    pub cores: Vec<usize>,
    /// What a block shall take, for a shaped unit.
    pub shape: Option<Shape>,
}

impl EngineSpec {
    /// A CPU engine on `cores`.
    pub fn cpu(cores: &[usize]) -> EngineSpec {
        EngineSpec { kind: EngineKind::Cpu, device: None, cores: cores.to_vec(), shape: None }
    }

    /// The OpenCL engine on the device that suits best, and `cores`.
    pub fn opencl(cores: &[usize]) -> EngineSpec {
        EngineSpec { kind: EngineKind::OpenCl, ..EngineSpec::cpu(cores) }
    }

    /// The same engine on other cores, unshaped.
    #[must_use]
    pub fn on(&self, cores: &[usize]) -> EngineSpec {
        EngineSpec { cores: cores.to_vec(), shape: None, ..self.clone() }
    }

    /// The cores to use.
    pub fn resolved_cores(&self) -> Vec<usize> {
        if self.cores.is_empty() { allowed_cores() } else { self.cores.clone() }
    }
}

impl fmt::Display for EngineSpec {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.kind.as_str())?;
        if let Some(device) = &self.device {
            write!(formatter, ":{device}")?;
        }
        let mut rest = self.cores.as_slice();
        let mut separator = '@';
        while let Some(&first) = rest.first() {
            let run = rest.iter().zip(first..).take_while(|&(&core, want)| core == want).count();
            match run {
                1 => write!(formatter, "{separator}{first}")?,
                _ => write!(formatter, "{separator}{first}-{}", rest[run - 1])?,
            }
            separator = '+';
            rest = &rest[run..];
        }
        match self.shape {
            None => Ok(()),
            Some(Shape { solo, corun }) if solo == corun => write!(formatter, "={}ms", milliseconds(solo)),
            Some(Shape { solo, corun }) => {
                write!(formatter, "={}:{}ms", milliseconds(solo), milliseconds(corun))
            }
        }
    }
}

impl FromStr for EngineSpec {
    type Err = VideoError;

    fn from_str(text: &str) -> Result<EngineSpec, VideoError> {
        let fail = |reason: &str| VideoError::Engine { engine: text.to_string(), reason: reason.to_string() };
        let (text, shape) = match text.split_once('=') {
            Some((engine, shape)) => (
                engine,
                Some(parse_shape(shape).ok_or_else(|| {
                    fail("a shape is the time of a block, like 12.8ms, or alone and with the other, like 12.6:12.8ms")
                })?),
            ),
            None => (text, None),
        };
        let (kind, cores) = text.split_once('@').map_or((text, None), |(kind, cores)| (kind, Some(cores)));
        let (kind, device) = kind.split_once(':').map_or((kind, None), |(kind, device)| (kind, Some(device)));
        let kind = match EngineKind::ALL.into_iter().find(|known| known.as_str() == kind) {
            Some(kind) => kind,
            None if kind == "hexagon" || kind == "openvino" => {
                return Err(fail(&format!("this build has no such engine; {KINDS}")));
            }
            None => return Err(fail(&format!("unknown kind; {KINDS}"))),
        };
        match (kind, device) {
            (EngineKind::Cpu, Some(_)) => return Err(fail("cpu has no devices to choose from; write cpu@CORES")),
            (EngineKind::OpenCl, Some("")) => {
                return Err(fail(
                    "name a device after the colon: its number in `trefoil probe`, or a part of its name",
                ));
            }
            _ => {}
        }
        let mut numbers = Vec::new();
        for part in cores.into_iter().flat_map(|cores| cores.split('+')) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            match (first.parse::<usize>(), last.parse::<usize>()) {
                (Ok(first), Ok(last)) if first <= last && last < 4096 => numbers.extend(first..=last),
                _ => return Err(fail("cores are written like 0, 0-3 or 0+2")),
            }
        }
        numbers.sort_unstable();
        if numbers.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(fail("a core is named twice"));
        }
        Ok(EngineSpec { kind, device: device.map(str::to_string), cores: numbers, shape })
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_micros() as f64 / 1e3
}

/// `12.8ms` or `12.6:12.8ms`, to the microsecond.
fn parse_shape(text: &str) -> Option<Shape> {
    let text = text.strip_suffix("ms")?;
    let (solo, corun) = text.split_once(':').unwrap_or((text, text));
    let time = |text: &str| {
        let ms = text.parse::<f64>().ok().filter(|ms| (0.0..=1e7).contains(ms))?;
        Some(Duration::from_micros((ms * 1e3).round() as u64))
    };
    Some(Shape { solo: time(solo)?, corun: time(corun)? })
}

/// `cpu@0,cpu@1`: one engine or two, in the order they take the trajectory; parsed once, where a command reads its arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineList(pub Vec<EngineSpec>);

impl FromStr for EngineList {
    type Err = VideoError;

    fn from_str(text: &str) -> Result<EngineList, VideoError> {
        parse_engines(text).map(EngineList)
    }
}

impl std::ops::Deref for EngineList {
    type Target = [EngineSpec];

    fn deref(&self) -> &[EngineSpec] {
        &self.0
    }
}

/// Parses an [`EngineList`].
///
/// # Errors
/// Unknown engines, none or more than two, two on the same core.
pub fn parse_engines(text: &str) -> Result<Vec<EngineSpec>, VideoError> {
    let engines = text.split(',').map(|part| part.trim().parse()).collect::<Result<Vec<EngineSpec>, _>>()?;
    let fail = |reason: String| VideoError::Engine { engine: text.to_string(), reason };
    if engines.len() > 2 {
        return Err(fail(format!("{} engines; a trajectory has one cut, so at most two", engines.len())));
    }
    if let [first, second] = engines.as_slice() {
        let (first, second) = (first.resolved_cores(), second.resolved_cores());
        if let Some(core) = first.iter().find(|core| second.contains(core)) {
            return Err(fail(format!("both engines use core {core}; give each its own, like cpu@0,cpu@1")));
        }
    }
    Ok(engines)
}

/// Cores that this process may use, ascending.
pub fn allowed_cores() -> Vec<usize> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    if let Ok(set) = rustix::thread::sched_getaffinity(None) {
        return (0..rustix::thread::CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect();
    }
    (0..std::thread::available_parallelism().map_or(1, usize::from)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_named_by_kind_and_cores() {
        for (text, cores) in
            [("cpu", vec![]), ("cpu@1", vec![1]), ("cpu@0-2", vec![0, 1, 2]), ("cpu@0-1+4", vec![0, 1, 4])]
        {
            let spec: EngineSpec = text.parse().unwrap();
            assert_eq!((spec.cores.clone(), spec.to_string()), (cores, text.to_string()));
        }
        for (text, [solo, corun]) in [("cpu@0=12.8ms", [12_800, 12_800]), ("cpu@0-1=3.352:3.101ms", [3352, 3101])] {
            let spec: EngineSpec = text.parse().unwrap();
            let want = Shape { solo: Duration::from_micros(solo), corun: Duration::from_micros(corun) };
            assert_eq!((spec.shape, spec.to_string()), (Some(want), text.to_string()));
        }
        for (text, device, cores) in [
            ("opencl", None, vec![]),
            ("opencl@1", None, vec![1]),
            ("opencl:0@0-1", Some("0"), vec![0, 1]),
            ("opencl:Adreno 830@2=12.6:12.8ms", Some("Adreno 830"), vec![2]),
        ] {
            let spec: EngineSpec = text.parse().unwrap();
            assert_eq!((spec.kind, spec.device.as_deref()), (EngineKind::OpenCl, device));
            assert_eq!((spec.cores.clone(), spec.to_string()), (cores, text.to_string()));
        }
        let engines = parse_engines("cpu@0,opencl@1").unwrap();
        assert_eq!(engines, [EngineSpec::cpu(&[0]), EngineSpec::opencl(&[1])]);
        assert_eq!(engines[1].on(&[0, 1]).to_string(), "opencl@0-1");
        assert!(!allowed_cores().is_empty());
        assert_eq!(parse_engines("cpu@0, cpu@1").unwrap(), [EngineSpec::cpu(&[0]), EngineSpec::cpu(&[1])]);
        for (text, want) in [
            ("gpu@0", "unknown kind"),
            ("openvino@1", "this build has no such engine; write cpu@CORES or opencl@CORES"),
            ("cpu:0@1", "cpu has no devices"),
            ("opencl:@1", "name a device"),
            ("opencl:x@y", "cores are written like"),
            ("cpu@1,opencl@0-1", "both engines use core 1"),
            ("cpu@", "cores are written like"),
            ("cpu@2-1", "cores are written like"),
            ("cpu@0+0", "named twice"),
            ("cpu@0,cpu@0", "both engines use core 0"),
            ("cpu@0,cpu@1,cpu@2", "at most two"),
            ("", "unknown kind"),
            ("cpu@0=fast", "a shape is the time of a block"),
            ("cpu@0=-1ms", "a shape is the time of a block"),
        ] {
            let error = parse_engines(text).unwrap_err().to_string();
            assert!(error.contains(want), "{text}: {error}");
        }
    }
}
