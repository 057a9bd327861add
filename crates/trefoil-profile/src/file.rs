//! Profile files.
//!
//! A profile is one JSON object, [`trefoil_core::Profile`] serialised:
//!
//! | field | what |
//! |---|---|
//! | `format`, `version` | `"trefoil-profile"` and 1; a reader refuses other versions |
//! | `machine` | CPU, allowed cores, memory, system, instruction sets, versions of Trefoil and every backend |
//! | `units` | units profiled: address, processor kind, resources, limits, `simulated` |
//! | `models` | operator graphs: tensors (name, type, shape, bytes, producer, consumers) and operators (name, kind, nodes, inputs, outputs, signature, class, flops, weight bytes) |
//! | `declared_watts` | watts by unit address, and `idle`, as the user declared them |
//! | `notes` | what a reader should know: noise, substitutions, exclusions |
//! | `measurements` | append-only records; of one subject and unit the last one counts |
//!
//! A measurement has an `id` (`operator/3fa9…|ort:CPU@0#0`), a `subject`, `units` (for transfers from and to, for
//! slowdowns slowed and interfering), an `origin` (`measured`, `simulated`, …), an `outcome`, `conditions` (warm-up,
//! runs, cap, load, denormals), `versions` and `taken_at`. Outcomes are `ok` (time parts in milliseconds as median, p10,
//! p90, min, max, count; error against the reference), `wrong`, `failed` (stage and reason) and `value` (a slowdown
//! factor or watts). The median and percentiles are those of the typical batch (see [`crate::sampling`]); count, min
//! and max are over all. A part that a backend cannot tell is absent.
//!
//! Besides `units`, whole-model measurements may name further units: each CPU backend on one core and on all cores,
//! as baselines. A power measurement without units is the idle package.

use crate::ProfileError;
use serde::Deserialize;
use serde_json::Value;
use std::io::Write;
use std::path::Path;
use trefoil_core::profile::{PROFILE_FORMAT, PROFILE_VERSION};
use trefoil_core::{CoreError, Machine, Measurement, Operator, Profile, TensorEdge};
use trefoil_files::read_regular;

/// Writes a profile: to a temporary file in the same folder, then renamed.
pub fn save_profile(profile: &Profile, path: &Path) -> Result<(), ProfileError> {
    write_atomically(path, |file| {
        let mut writer = std::io::BufWriter::new(file);
        serde_json::to_writer_pretty(&mut writer, profile).map_err(std::io::Error::from)?;
        writer.write_all(b"\n")?;
        writer.flush()
    })
}

/// Writes a file under a temporary name and renames it; on an error nothing is left. A device or a pipe is written to, and
/// a link goes on pointing to what it points to.
///
/// # Errors
/// [`ProfileError::Io`].
pub fn write_atomically(
    path: &Path,
    write: impl FnOnce(&std::fs::File) -> std::io::Result<()>,
) -> Result<(), ProfileError> {
    if std::fs::metadata(path).is_ok_and(|about| !about.is_file() && !about.is_dir()) {
        let device = std::fs::OpenOptions::new().write(true).open(path).map_err(ProfileError::io("write", path))?;
        return write(&device).map_err(ProfileError::io("write", path));
    }
    trefoil_files::write_atomically(path, write).map_err(ProfileError::io("write", path))
}

/// Reads and checks a profile.
///
/// # Errors
/// [`ProfileError::Io`] when unreadable, [`ProfileError::Format`] when it is no profile, [`ProfileError::Core`] when its
/// version is another one or its contents contradict each other.
pub fn load_profile(path: &Path) -> Result<Profile, ProfileError> {
    let text = read_regular(path).map_err(ProfileError::io("read", path))?;
    let broken = |reason: String| ProfileError::Format { path: path.to_owned(), what: "trefoil profile", reason };
    // Format and version first: a newer file may have other fields, and the message should say so.
    let value: Value = serde_json::from_slice(&text).map_err(|error| {
        let lenient = serde_json::from_slice(&quoted(&text)).ok();
        let record = lenient.as_ref().and_then(malformed).map_or_else(String::new, |record| format!("; {record}"));
        broken(format!("not JSON: {error}{record}"))
    })?;
    match value.get("format").and_then(Value::as_str) {
        Some(PROFILE_FORMAT) => {}
        Some(other) => return Err(broken(format!("its format is `{other}`"))),
        None => return Err(broken("it has no `format` field".to_owned())),
    }
    match value.get("version").and_then(Value::as_u64) {
        Some(version) if version == u64::from(PROFILE_VERSION) => {}
        Some(version) => {
            let newer = version > u64::from(PROFILE_VERSION);
            return Err(ProfileError::Core(CoreError::Version {
                format: PROFILE_FORMAT.to_owned(),
                found: u32::try_from(version).unwrap_or(u32::MAX),
                supported: PROFILE_VERSION,
                hint: if newer { "update trefoil or profile again" } else { "profile again" }.to_owned(),
            }));
        }
        None => return Err(broken("it has no `version` number".to_owned())),
    }
    let profile =
        Profile::deserialize(&value).map_err(|error| broken(malformed(&value).unwrap_or_else(|| error.to_string())))?;
    profile.validate()?;
    Ok(profile)
}

/// The first measurement, operator or tensor that is none.
fn malformed(value: &Value) -> Option<String> {
    let models = value["models"].as_array();
    malformed_measurement(value).or_else(|| models.into_iter().flatten().find_map(malformed_part))
}

/// The first operator or tensor of a model that is none.
fn malformed_part(model: &Value) -> Option<String> {
    let told = |what: &str, at: usize, part: &Value, error: serde_json::Error| {
        let name = part["name"].as_str().unwrap_or("without name");
        format!("{what} {at} `{name}` of model {}: {error}", model["model"])
    };
    let listed = |key: &str| model[key].as_array().into_iter().flatten().enumerate();
    let operator = |(at, part)| Some(told("operator", at, part, Operator::deserialize(part).err()?));
    let tensor = |(at, part)| Some(told("tensor", at, part, TensorEdge::deserialize(part).err()?));
    listed("operators").find_map(operator).or_else(|| listed("tensors").find_map(tensor))
}

/// The first measurement that is none, with its operator if it is of one.
fn malformed_measurement(value: &Value) -> Option<String> {
    let (at, record, error) = value["measurements"]
        .as_array()?
        .iter()
        .enumerate()
        .find_map(|(at, record)| Some((at, record, Measurement::deserialize(record).err()?)))?;
    let signature = record["subject"]["signature"].as_str();
    let operators = value["models"].as_array()?.iter().filter_map(|model| model["operators"].as_array()).flatten();
    let operator = signature.and_then(|signature| {
        operators.into_iter().find(|operator| operator["signature"] == signature)?["name"].as_str()
    });
    let of = operator.map_or_else(String::new, |name| format!(" of operator `{name}`"));
    let id = record["id"].as_str().unwrap_or("without id");
    Some(format!("measurement {at} (`{id}`){of}: {error}"))
}

/// The text with bare `NaN`, `Infinity` and `-Infinity`, which some programs write and which are no JSON, and with numbers larger than any,
/// as strings: to tell where they are.
fn quoted(text: &[u8]) -> Vec<u8> {
    let mut result = Vec::with_capacity(text.len());
    let (mut at, mut in_string) = (0, false);
    while at < text.len() {
        let bare = ["NaN", "Infinity", "-Infinity"].into_iter().find(|word| text[at..].starts_with(word.as_bytes()));
        let bare = bare.map(str::len).or_else(|| (!in_string).then(|| endless(&text[at..])).flatten());
        match (in_string, bare) {
            (false, Some(length)) => {
                result.push(b'"');
                result.extend_from_slice(&text[at..at + length]);
                result.push(b'"');
                at += length;
                continue;
            }
            (true, _) if text[at] == b'\\' => {
                result.extend_from_slice(&text[at..text.len().min(at + 2)]);
                at += 2;
                continue;
            }
            _ => in_string ^= text[at] == b'"',
        }
        result.push(text[at]);
        at += 1;
    }
    result
}

/// How long the number at the start of the text is, if it is larger than any number.
fn endless(text: &[u8]) -> Option<usize> {
    let length = text.iter().take_while(|byte| byte.is_ascii_digit() || b"+-.eE".contains(byte)).count();
    let number: f64 = std::str::from_utf8(&text[..length]).ok()?.parse().ok()?;
    number.is_infinite().then_some(length)
}

/// Whether costs of `profile` hold on `machine`: same CPU, instruction sets and backend versions, and every core that a
/// profiled unit is pinned to is allowed. The kernel's version and the amount of memory may differ.
///
/// # Errors
/// [`ProfileError::OtherMachine`] with the first difference.
pub fn check_machine(profile: &Profile, machine: &Machine) -> Result<(), ProfileError> {
    // A simulated profile holds wherever it is read.
    if !profile.units.is_empty() && profile.units.iter().all(|unit| unit.simulated) {
        return Ok(());
    }
    let differ = |what: &str, then: &str, now: &str| {
        Err(ProfileError::OtherMachine { difference: format!("{what} `{then}` then, `{now}` now") })
    };
    let then = &profile.machine;
    if then.cpu != machine.cpu {
        return differ("cpu", &then.cpu, &machine.cpu);
    }
    if then.features != machine.features {
        return differ("instruction sets", &then.features.join(" "), &machine.features.join(" "));
    }
    for unit in profile.units.iter().filter(|unit| !unit.simulated) {
        let backend = &unit.address.backend;
        let (was, is) = (then.versions.get(backend), machine.versions.get(backend));
        if was != is {
            let text = |version: Option<&String>| version.map_or("absent", String::as_str).to_owned();
            return differ(&format!("version of {backend}"), &text(was), &text(is));
        }
        if let Some(core) = unit.address.cores.iter().find(|core| !machine.cores.contains(core)) {
            return differ(&format!("core {core} of {}", unit.address), "allowed", "not allowed");
        }
        if unit.address.cores.is_empty()
            && unit.kind == trefoil_core::UnitKind::Cpu
            && then.cores.len() != machine.cores.len()
        {
            return differ("number of cores", &then.cores.len().to_string(), &machine.cores.len().to_string());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Machine {
        Machine {
            cpu: "test".into(),
            cores: vec![0, 1],
            memory_bytes: 1,
            os: "test".into(),
            features: vec!["avx2".into()],
            versions: [("rten".to_owned(), "0.27".to_owned())].into(),
        }
    }

    fn load_text(text: &str) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("p.json");
        std::fs::write(&path, text).unwrap();
        let message = load_profile(&path).unwrap_err().to_string();
        assert!(!message.contains('\n'), "{message}");
        message
    }

    #[test]
    fn round_trip_leaves_no_temporary_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("p.json");
        let mut profile = Profile::new(machine());
        profile.notes.push("quiet".into());
        save_profile(&profile, &path).unwrap();
        save_profile(&profile, &path).unwrap();
        assert_eq!(load_profile(&path).unwrap(), profile);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        let error = save_profile(&profile, &folder.path().join("no/such/p.json")).unwrap_err().to_string();
        assert!(error.contains("no/such"), "{error}");
    }

    #[test]
    fn what_is_no_profile_is_told() {
        assert!(load_text("PK\u{3}").contains("not JSON"));
        assert!(load_text("[]").contains("no `format` field"));
        assert!(load_text(r#"{"format":"trefoil-plan","version":1}"#).contains("its format is `trefoil-plan`"));
        assert!(load_text(r#"{"format":"trefoil-profile"}"#).contains("no `version`"));
        let newer = load_text(r#"{"format":"trefoil-profile","version":9,"machine":5}"#);
        assert!(newer.contains("version 9") && newer.contains("update trefoil"), "{newer}");
        assert!(load_text(r#"{"format":"trefoil-profile","version":1}"#).contains("machine"));
    }

    #[test]
    fn malformed_measurements_are_told_with_their_operator() {
        let profile = |subject: &str, median: &str| {
            format!(
                r#"{{"format":"trefoil-profile","version":1,
                "machine":{{"cpu":"NaN \" NaN","cores":[0],"memory_bytes":1,"os":"x","features":[],"versions":{{}}}},
                "units":[],"notes":[],"declared_watts":{{}},
                "models":[{{"operators":[{{"name":"conv7","signature":"{:032x}"}}]}}],
                "measurements":[{{"id":"operator/7|a:CPU#0","subject":{subject},"units":["a:CPU"],"origin":"measured",
                "outcome":{{"result":"ok","timing":{{"total":{{"median":{median}}}}}}},"taken_at":""}}]}}"#,
                7
            )
        };
        let operator = format!(r#"{{"kind":"operator","signature":"{:032x}"}}"#, 7);
        for median in ["NaN", "Infinity", "-Infinity", "null", "\"fast\""] {
            let message = load_text(&profile(&operator, median));
            assert!(message.contains("of operator `conv7`") && message.contains("operator/7"), "{median}: {message}");
        }
        let message = load_text(&profile(r#"{"kind":"power"}"#, "NaN"));
        assert!(message.contains("measurement 0") && !message.contains("conv7"), "{message}");
        // Words in strings are no numbers, and what is no JSON for another reason is told as that.
        let message = load_text(r#"{"format": "NaN \\ NaN" x}"#);
        assert!(message.contains("not JSON") && !message.contains("measurement"), "{message}");
    }

    #[test]
    fn another_machine_is_refused_with_the_difference() {
        let unit = |text: &str| trefoil_core::Unit {
            address: text.parse().unwrap(),
            kind: trefoil_core::UnitKind::Cpu,
            resources: std::collections::BTreeSet::new(),
            limits: trefoil_core::UnitLimits::default(),
            simulated: false,
            description: None,
        };
        let mut profile = Profile::new(machine());
        profile.units = vec![unit("rten:CPU@1")];
        assert!(check_machine(&profile, &machine()).is_ok());
        let fails = |change: fn(&mut Machine)| {
            let mut here = machine();
            change(&mut here);
            check_machine(&profile, &here).unwrap_err().to_string()
        };
        assert!(fails(|m| m.cpu = "other".into()).contains("cpu `test` then, `other` now"));
        assert!(fails(|m| m.features.clear()).contains("avx2"));
        assert!(fails(|m| m.versions.clear()).contains("version of rten"));
        assert!(fails(|m| m.cores = vec![0]).contains("core 1"));
        let mut elsewhere = machine();
        elsewhere.os = "newer kernel".into();
        assert!(check_machine(&profile, &elsewhere).is_ok());
    }
}
