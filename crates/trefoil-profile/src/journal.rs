//! The journal: every finished measurement, appended at once to a file in the cache, so that an interrupted profile
//! resumes and later models with the same operators need not measure them again.
//!
//! One JSON object a line: `{"key":"…","measurement":{…}}`. The key hashes all that the number depends on: subject,
//! units, machine (CPU, cores, instruction sets), backend versions, the class of the options and this crate's rules
//! version. A line that does not parse (the machine lost power while writing) is skipped. Two processes append whole lines
//! under a file lock.

use crate::ProfileError;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use trefoil_core::{Machine, Measurement, Subject, Unit};

/// Raised when the meaning of a journalled measurement changes (tolerances, timing rule, denormal rule).
const RULES: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Line {
    key: String,
    measurement: Measurement,
}

/// An open journal.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    known: HashMap<String, Measurement>,
}

impl Journal {
    /// Opens or creates the journal at `path` and reads what it holds.
    pub fn open(path: &Path) -> Result<Self, ProfileError> {
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(ProfileError::io("create", parent))?;
        }
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(ProfileError::io("open", path))?;
        let bytes = std::fs::read(path).map_err(ProfileError::io("read", path))?;
        let mut known = HashMap::new();
        for line in bytes.split(|&byte| byte == b'\n') {
            if let Ok(line) = serde_json::from_slice::<Line>(line) {
                known.insert(line.key, line.measurement);
            }
        }
        let mut journal = Self { path: path.to_owned(), file, known };
        if bytes.last().is_some_and(|&byte| byte != b'\n') {
            // Half a line from a crash: end it, so that the next record starts a line of its own.
            journal.append(b"\n")?;
        }
        Ok(journal)
    }

    /// The measurement under `key`, if there is one.
    pub fn get(&self, key: &str) -> Option<&Measurement> {
        self.known.get(key)
    }

    /// Appends a measurement.
    pub fn put(&mut self, key: &str, measurement: &Measurement) -> Result<(), ProfileError> {
        let line = Line { key: key.to_owned(), measurement: measurement.clone() };
        let mut text = serde_json::to_vec(&line).expect("a measurement serialises");
        text.push(b'\n');
        self.append(&text)?;
        self.known.insert(line.key, line.measurement);
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), ProfileError> {
        // Best effort on file systems without locks: whole lines in one write rarely interleave.
        let locked = rustix::fs::flock(&self.file, rustix::fs::FlockOperation::LockExclusive).is_ok();
        let outcome = self.file.write_all(bytes);
        if locked {
            let _ = rustix::fs::flock(&self.file, rustix::fs::FlockOperation::Unlock);
        }
        outcome.map_err(ProfileError::io("write", &self.path))
    }
}

/// The key of a measurement: see the module.
pub fn journal_key(machine: &Machine, class: &str, subject: &Subject, units: &[&Unit]) -> String {
    let mut hash = Sha256::new();
    let mut part = |text: &str| {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    };
    part(&RULES.to_string());
    part(&subject.key());
    part(class);
    part(&machine.cpu);
    part(&format!("{:?} {:?}", machine.cores, machine.features));
    part(machine.versions.get("trefoil").map_or("", String::as_str));
    for unit in units {
        part(&unit.address.to_string());
        part(&format!("{:?}", unit.resources));
        part(machine.versions.get(&unit.address.backend).map_or("", String::as_str));
        part(unit.description.as_deref().unwrap_or(""));
    }
    hex(&hash.finalize()[..16])
}

/// Lowercase hex digits of bytes.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use trefoil_core::{Conditions, MeasurementId, Origin, Outcome};

    fn measurement(reason: &str) -> Measurement {
        let subject = Subject::Transfer { bytes: 1 };
        Measurement {
            id: MeasurementId::new(&subject, &[], 0),
            subject,
            units: Vec::new(),
            origin: Origin::Measured,
            outcome: Outcome::Failed { stage: "run".into(), reason: reason.into() },
            conditions: Conditions::default(),
            versions: std::collections::BTreeMap::new(),
            taken_at: String::new(),
        }
    }

    #[test]
    fn records_survive_reopening_and_half_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cache/journal.jsonl");
        let mut journal = Journal::open(&path).unwrap();
        journal.put("a", &measurement("first")).unwrap();
        journal.put("b", &measurement("other")).unwrap();
        drop(journal);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes.truncate(bytes.len() - 9);
        std::fs::write(&path, &bytes).unwrap();
        let mut journal = Journal::open(&path).unwrap();
        assert!(journal.get("a").is_some() && journal.get("b").is_none(), "half a line is no record");
        journal.put("c", &measurement("third")).unwrap();
        journal.put("a", &measurement("again")).unwrap();
        let journal = Journal::open(&path).unwrap();
        assert_eq!(journal.get("a").unwrap(), &measurement("again"), "the newest record of a key counts");
        assert!(journal.get("c").is_some());
    }

    #[test]
    fn keys_depend_on_what_numbers_depend_on() {
        let machine = |cpu: &str, version: &str| Machine {
            cpu: cpu.into(),
            cores: vec![0],
            memory_bytes: 0,
            os: String::new(),
            features: Vec::new(),
            versions: [("rten".to_owned(), version.to_owned())].into(),
        };
        let unit = |text: &str| Unit {
            address: text.parse().unwrap(),
            kind: trefoil_core::UnitKind::Cpu,
            resources: std::collections::BTreeSet::new(),
            limits: trefoil_core::UnitLimits::default(),
            simulated: false,
            description: None,
        };
        let subject = Subject::Transfer { bytes: 4 };
        let base = journal_key(&machine("x", "1"), "quick", &subject, &[&unit("rten:CPU")]);
        assert_eq!(base, journal_key(&machine("x", "1"), "quick", &subject, &[&unit("rten:CPU")]));
        for other in [
            journal_key(&machine("y", "1"), "quick", &subject, &[&unit("rten:CPU")]),
            journal_key(&machine("x", "2"), "quick", &subject, &[&unit("rten:CPU")]),
            journal_key(&machine("x", "1"), "full", &subject, &[&unit("rten:CPU")]),
            journal_key(&machine("x", "1"), "quick", &Subject::Transfer { bytes: 5 }, &[&unit("rten:CPU")]),
            journal_key(&machine("x", "1"), "quick", &subject, &[&unit("rten:CPU@0")]),
        ] {
            assert_ne!(base, other);
        }
    }
}
