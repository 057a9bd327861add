//! SoC descriptions: the file format, its checks, and where descriptions are found.

use crate::UnitError;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use trefoil_core::{OperatorClass, UnitKind};

/// First field of every description.
pub const SOC_FORMAT: &str = "trefoil-soc";
/// Version of the format that this build reads.
pub const SOC_VERSION: u32 = 1;
/// Folders (separated like `PATH`) with further descriptions, one `.json` file each. They win over built-in ones of the
/// same name.
pub const SIM_PATH_VARIABLE: &str = "TREFOIL_SIM_PATH";

/// A number with where it comes from: a place in a paper, or the word `assumed` with what it was chosen by.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sourced {
    /// The number, in the unit that the field's name tells.
    pub value: f64,
    /// Paper, section and what it says; or `assumed`, with the reason.
    pub source: String,
}

/// What a rate counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkMeasure {
    /// Arithmetic operations, multiply and add counted apart.
    Operations,
    /// Bytes read and written: activations in and out, and weights.
    Bytes,
}

/// How fast a device works through a kind of operator, by size. Exact at the points, linear between them on
/// logarithmic axes, constant outside.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rate {
    /// ONNX operator types; the rule applies to an operator that contains one of them. Empty means any.
    #[serde(default)]
    pub operators: Vec<String>,
    /// Only operators of this class, if given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<OperatorClass>,
    /// Only operators with (`true`) or without (`false`) 8-bit operands, if given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub int8: Option<bool>,
    /// What is counted.
    pub measure: WorkMeasure,
    /// `[amount of work, amount per second]`, ascending.
    pub per_second: Vec<[f64; 2]>,
    /// See [`Sourced::source`].
    pub source: String,
}

/// An operator type that does not run on a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unsupported {
    /// ONNX operator type.
    pub operator: String,
    /// Only with an input of this rank, if given (a 3-D convolution is a `Conv` with an input of rank 5).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<usize>,
    /// See [`Sourced::source`].
    pub source: String,
}

/// Time of a named piece of work that is no ONNX operator (a DiT block, a decoder), as published.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamedTask {
    /// Name, such as `dit-block`.
    pub task: String,
    /// Under which condition: `solo`, `co-run`, or what the source calls it.
    pub condition: String,
    /// Milliseconds.
    pub ms: f64,
    /// See [`Sourced::source`].
    pub source: String,
}

/// One processing unit of the SoC.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Name in unit addresses: `sim:SOC/NAME`.
    pub name: String,
    /// Kind of processor.
    pub kind: UnitKind,
    /// Human-readable name.
    pub title: String,
    /// Submitting one operator, in milliseconds.
    pub dispatch_ms: Sourced,
    /// Power while it works, in watts.
    pub watts: Sourced,
    /// Memory it can use, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<Sourced>,
    /// Operators it does not run.
    #[serde(default)]
    pub unsupported: Vec<Unsupported>,
    /// Rates; the first rule that applies counts. The last must apply to everything.
    pub rates: Vec<Rate>,
    /// Published times of work that is no operator.
    #[serde(default)]
    pub tasks: Vec<NamedTask>,
}

/// Handing data from one device to another: `latency + bytes / bandwidth`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Transfer {
    /// Device that has the data.
    pub from: String,
    /// Device that needs it.
    pub to: String,
    /// Milliseconds for any size.
    pub latency_ms: f64,
    /// Bytes a second.
    pub bytes_per_second: f64,
    /// See [`Sourced::source`].
    pub source: String,
}

/// How much longer a device takes while another works. Below 1 if it gets faster.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slowdown {
    /// The device that is slowed.
    pub slowed: String,
    /// The device that works beside it.
    pub busy: String,
    /// Ratio to its time alone.
    pub factor: f64,
    /// See [`Sourced::source`].
    pub source: String,
}

/// A system on chip as numbers. Every time, rate and power of a `sim:` unit comes from one of these.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SocDescription {
    /// Always [`SOC_FORMAT`].
    pub format: String,
    /// Format version.
    pub version: u32,
    /// Name in unit addresses.
    pub name: String,
    /// Human-readable name.
    pub title: String,
    /// What the numbers as a whole can and cannot tell.
    pub notes: Vec<String>,
    /// Package power while nothing runs, in watts.
    pub idle_watts: Sourced,
    /// Processing units.
    pub devices: Vec<Device>,
    /// One entry per ordered pair of devices.
    pub transfers: Vec<Transfer>,
    /// Factors other than 1.
    #[serde(default)]
    pub slowdowns: Vec<Slowdown>,
}

const BUILT_IN: [(&str, &str); 2] = [
    ("lunar-lake", include_str!("../../data/lunar-lake.json")),
    ("snapdragon-8-elite", include_str!("../../data/snapdragon-8-elite.json")),
];

/// The description of that name: a file of [`SIM_PATH_VARIABLE`]'s folders, else a built-in one.
///
/// # Errors
/// [`UnitError::Description`] when no description has the name (the error lists those there are), or a file called like
/// it is malformed.
pub fn description(name: &str) -> Result<SocDescription, UnitError> {
    let mut have: BTreeSet<String> = BUILT_IN.iter().map(|(name, _)| (*name).to_owned()).collect();
    let mut broken: Vec<UnitError> = Vec::new();
    for path in user_files()? {
        match read(&path) {
            Ok(soc) if soc.name == name => return Ok(soc),
            Ok(soc) => drop(have.insert(soc.name)),
            // A file that should be the one asked for must not be passed over; another one is not this request's business.
            Err(error) if path.file_stem().is_some_and(|stem| stem == name) => return Err(error),
            Err(error) => broken.push(error),
        }
    }
    if let Some((name, text)) = BUILT_IN.iter().find(|(known, _)| *known == name) {
        return parse(text, name);
    }
    let have = have.into_iter().collect::<Vec<_>>().join(", ");
    let reason = match broken.first() {
        None => format!(
            "there is no description of that name; there are {have}; set {SIM_PATH_VARIABLE} to a folder with more"
        ),
        Some(error) => {
            format!("there is no description of that name; there are {have}, and a file that is none: {error}")
        }
    };
    Err(UnitError::Description { what: format!("simulated SoC `{name}`"), reason })
}

/// Every description, user files first. Malformed user files come as their errors.
pub fn descriptions() -> Vec<Result<SocDescription, UnitError>> {
    let mut all = match user_files() {
        Ok(paths) => paths.iter().map(|path| read(path)).collect(),
        Err(error) => vec![Err(error)],
    };
    for (name, text) in BUILT_IN {
        if !all.iter().any(|soc| soc.as_ref().is_ok_and(|soc| soc.name == name)) {
            all.push(parse(text, name));
        }
    }
    all
}

fn user_files() -> Result<Vec<PathBuf>, UnitError> {
    let Some(folders) = std::env::var_os(SIM_PATH_VARIABLE).filter(|value| !value.is_empty()) else {
        return Ok(Vec::new());
    };
    let mut files = Vec::new();
    for folder in std::env::split_paths(&folders) {
        let list = std::fs::read_dir(&folder).map_err(|error| UnitError::Description {
            what: format!("{SIM_PATH_VARIABLE}={}", folder.display()),
            reason: format!("cannot be listed: {error}"),
        })?;
        let paths = list.filter_map(|entry| entry.ok().map(|entry| entry.path()));
        files.extend(paths.filter(|path| path.extension().is_some_and(|extension| extension == "json")));
    }
    files.sort();
    Ok(files)
}

/// Reads and checks a description file.
///
/// # Errors
/// [`UnitError::Description`].
pub fn read(path: &Path) -> Result<SocDescription, UnitError> {
    let what = path.display().to_string();
    let text = std::fs::read_to_string(path)
        .map_err(|error| UnitError::Description { what: what.clone(), reason: format!("cannot be read: {error}") })?;
    parse(&text, &what)
}

/// Parses and checks a description; `what` names it in errors.
///
/// # Errors
/// [`UnitError::Description`].
pub fn parse(text: &str, what: &str) -> Result<SocDescription, UnitError> {
    let fail = |reason: String| UnitError::Description { what: what.to_owned(), reason: crate::one_line(&reason) };
    let soc: SocDescription = serde_json::from_str(text).map_err(|error| fail(error.to_string()))?;
    soc.validate().map_err(fail)?;
    Ok(soc)
}

impl SocDescription {
    /// The device of that name.
    pub fn device(&self, name: &str) -> Option<&Device> {
        self.devices.iter().find(|device| device.name == name)
    }

    /// The host's device: the first CPU. Inputs come from it and results go to it.
    pub fn host(&self) -> &Device {
        self.devices.iter().find(|device| device.kind == UnitKind::Cpu).unwrap_or(&self.devices[0])
    }

    /// Checks names, numbers, completeness and that every number says where it comes from.
    fn validate(&self) -> Result<(), String> {
        if self.format != SOC_FORMAT || self.version != SOC_VERSION {
            return Err(format!(
                "is `{}` version {}, this build reads `{SOC_FORMAT}` version {SOC_VERSION}",
                self.format, self.version
            ));
        }
        check_name(&self.name)?;
        let names: BTreeSet<&str> = self.devices.iter().map(|device| device.name.as_str()).collect();
        if names.len() != self.devices.len() || names.is_empty() {
            return Err("needs at least one device, and device names must differ".to_owned());
        }
        check("idle_watts", self.idle_watts.value, &self.idle_watts.source)?;
        for device in &self.devices {
            device.validate().map_err(|reason| format!("device {}: {reason}", device.name))?;
            let (watts, idle) = (device.watts.value, self.idle_watts.value);
            if watts < idle {
                return Err(format!("device {}: watts: {watts} is less than idle_watts, {idle}", device.name));
            }
        }
        for transfer in &self.transfers {
            let place = format!("transfer {} to {}", transfer.from, transfer.to);
            check(&place, transfer.latency_ms, &transfer.source)?;
            check(&place, transfer.bytes_per_second, &transfer.source)?;
        }
        for slowdown in &self.slowdowns {
            let place = format!("slowdown of {} by {}", slowdown.slowed, slowdown.busy);
            check(&place, slowdown.factor, &slowdown.source)?;
            if slowdown.factor == 0.0 {
                return Err(format!("{place}: a factor of 0 means no time at all"));
            }
        }
        let pairs = self.transfers.iter().map(|transfer| (&transfer.from, &transfer.to));
        for (from, to) in pairs.chain(self.slowdowns.iter().map(|slowdown| (&slowdown.slowed, &slowdown.busy))) {
            if from == to || !names.contains(from.as_str()) || !names.contains(to.as_str()) {
                return Err(format!("`{from}`, `{to}` is no pair of two devices"));
            }
        }
        for from in &names {
            for to in names.iter().filter(|to| *to != from) {
                if self.transfers.iter().filter(|known| known.from == *from && known.to == *to).count() != 1 {
                    return Err(format!("needs exactly one transfer from {from} to {to}"));
                }
            }
        }
        Ok(())
    }
}

impl Device {
    fn validate(&self) -> Result<(), String> {
        check_name(&self.name)?;
        check("dispatch_ms", self.dispatch_ms.value, &self.dispatch_ms.source)?;
        check("watts", self.watts.value, &self.watts.source)?;
        if let Some(memory) = &self.memory_bytes {
            check("memory_bytes", memory.value, &memory.source)?;
        }
        for unsupported in &self.unsupported {
            check(&unsupported.operator, 0.0, &unsupported.source)?;
        }
        for task in &self.tasks {
            check(&task.task, task.ms, &task.source)?;
        }
        for (index, rate) in self.rates.iter().enumerate() {
            let place = format!("rate {index}");
            let ascending = rate.per_second.windows(2).all(|pair| pair[0][0] < pair[1][0]);
            if rate.per_second.is_empty() || !ascending {
                return Err(format!("{place}: needs points, ascending in work"));
            }
            for [work, per_second] in &rate.per_second {
                check(&place, *work, &rate.source)?;
                check(&place, *per_second, &rate.source)?;
                if *work <= 0.0 || *per_second <= 0.0 {
                    return Err(format!("{place}: work and rate must be above 0"));
                }
            }
        }
        let catches_all = |rate: &Rate| {
            rate.operators.is_empty()
                && rate.class.is_none()
                && rate.int8.is_none()
                && rate.measure == WorkMeasure::Bytes
        };
        if !self.rates.last().is_some_and(catches_all) {
            return Err("the last rate must count bytes and apply to every operator".to_owned());
        }
        Ok(())
    }
}

fn check_name(name: &str) -> Result<(), String> {
    let plain = name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'));
    if plain && !name.is_empty() { Ok(()) } else { Err(format!("`{name}` cannot be part of a unit address")) }
}

fn check(place: &str, value: f64, source: &str) -> Result<(), String> {
    if !value.is_finite() || value < 0.0 {
        return Err(format!("{place}: {value} is no time, rate, power or factor"));
    }
    if source.trim().is_empty() {
        return Err(format!("{place}: no source; name a paper's section or write `assumed`"));
    }
    Ok(())
}
