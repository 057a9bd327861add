//! Co-run records of several models (BIDENT 3.1: "the profiler also profiles each model pair–PU pair combination"): by how
//! much a model on its unit is slowed while others run on theirs. They lie in the journal like all other measurements, so
//! that whoever plans the same models together again need not measure again.

use crate::clock::{load_average, now_utc};
use crate::journal::{Journal, journal_key};
use crate::{ProfileError, cache};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use trefoil_core::{Conditions, Machine, Measurement, MeasurementId, Origin, Outcome, Samples, Subject, Unit};

/// Something that runs while others do.
#[derive(Debug, Clone, Copy)]
pub struct CoRunning<'a> {
    /// What: a whole model, or one operator.
    pub subject: &'a Subject,
    /// Where.
    pub unit: &'a Unit,
}

/// The co-run records of this machine.
#[derive(Debug)]
pub struct CoRuns {
    journal: Journal,
    machine: Machine,
}

impl CoRuns {
    /// Opens the journal of a cache folder.
    ///
    /// # Errors
    /// [`ProfileError::Io`] when it cannot be read or created.
    pub fn open(cache_dir: &Path, machine: Machine) -> Result<Self, ProfileError> {
        Ok(Self { journal: Journal::open(&cache::journal_path(cache_dir))?, machine })
    }

    /// The slowdown factor of `slowed` beside `others`, as measured with the care that `class` stands for; `None` if that was
    /// not measured yet, or with other versions.
    pub fn get(&self, slowed: CoRunning<'_>, others: &[CoRunning<'_>], class: &str) -> Option<&Measurement> {
        let (subject, units) = place(slowed, others);
        self.journal.get(&journal_key(&self.machine, class, &subject, &units))
    }

    /// Keeps a factor that was measured just now.
    ///
    /// # Errors
    /// [`ProfileError::Io`] when the journal cannot be written.
    pub fn put(
        &mut self,
        slowed: CoRunning<'_>,
        others: &[CoRunning<'_>],
        class: &str,
        factor: Samples,
        conditions: &Conditions,
    ) -> Result<Measurement, ProfileError> {
        let (subject, units) = place(slowed, others);
        let addresses: Vec<_> = units.iter().map(|unit| unit.address.clone()).collect();
        let mut versions = BTreeMap::new();
        for address in &addresses {
            if let Some(version) = self.machine.versions.get(&address.backend) {
                versions.insert(address.backend.clone(), version.clone());
            }
        }
        let measurement = Measurement {
            id: MeasurementId::new(&subject, &addresses, 0),
            subject: subject.clone(),
            units: addresses,
            origin: if units.iter().any(|unit| unit.simulated) { Origin::Simulated } else { Origin::Measured },
            outcome: Outcome::Value { value: factor },
            conditions: Conditions { load: load_average(), ..conditions.clone() },
            versions,
            taken_at: now_utc(),
        };
        self.journal.put(&journal_key(&self.machine, class, &subject, &units), &measurement)?;
        Ok(measurement)
    }
}

/// The slowed one first.
fn place<'a>(slowed: CoRunning<'a>, others: &[CoRunning<'a>]) -> (Subject, Vec<&'a Unit>) {
    let all = || std::iter::once(&slowed).chain(others);
    let subjects = all().map(|one| one.subject.key()).collect();
    (Subject::CoRun { subjects }, all().map(|one| one.unit).collect())
}

/// Appends measurements to a file, one JSON object a line. What the file holds already stays.
///
/// # Errors
/// [`ProfileError::Io`] when it cannot be written.
pub fn append_measurements(path: &Path, measurements: &[Measurement]) -> Result<(), ProfileError> {
    let mut text = Vec::new();
    for measurement in measurements {
        serde_json::to_writer(&mut text, measurement).expect("a measurement serialises");
        text.push(b'\n');
    }
    let mut file =
        std::fs::OpenOptions::new().create(true).append(true).open(path).map_err(ProfileError::io("open", path))?;
    // In one piece, so that a crash leaves whole lines but perhaps the last.
    file.write_all(&text).map_err(ProfileError::io("write", path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use trefoil_core::{Resource, UnitKind, UnitLimits};

    fn unit(address: &str, core: u32) -> Unit {
        Unit {
            address: address.parse().unwrap(),
            kind: UnitKind::Cpu,
            resources: [Resource::Core(core)].into(),
            limits: UnitLimits::default(),
            simulated: false,
            description: None,
        }
    }

    #[test]
    fn a_factor_is_found_again_for_the_same_models_units_and_care_only() {
        let folder = tempfile::tempdir().unwrap();
        let machine = trefoil_units::machine();
        let (first, second) = (unit("rten:CPU@0", 0), unit("rten:CPU@1", 1));
        let model = |name: &str| Subject::WholeModel { model: name.to_owned() };
        let (a, b) = (model("a"), model("b"));
        let of = |subject, unit| CoRunning { subject, unit };
        let mut log = CoRuns::open(folder.path(), machine.clone()).unwrap();
        let factor = Samples::from_values(&mut [1.1, 1.2, 1.3]).unwrap();
        let conditions = Conditions { warmup: 3, fresh_process: true, ..Conditions::default() };
        let kept = log.put(of(&a, &first), &[of(&b, &second)], "care", factor, &conditions).unwrap();
        assert_eq!(kept.id.0, "corun/model/a&model/b|rten:CPU@0|rten:CPU@1#0");
        // Another process finds it in the file.
        let log = CoRuns::open(folder.path(), machine).unwrap();
        let found = log.get(of(&a, &first), &[of(&b, &second)], "care").unwrap();
        assert_eq!(*found, kept);
        assert!(log.get(of(&b, &second), &[of(&a, &first)], "care").is_none(), "the other direction is another record");
        assert!(log.get(of(&a, &second), &[of(&b, &first)], "care").is_none());
        assert!(log.get(of(&a, &first), &[of(&b, &second)], "more care").is_none());
        assert!(log.get(of(&a, &first), &[], "care").is_none());

        let file = folder.path().join("out.jsonl");
        append_measurements(&file, std::slice::from_ref(&kept)).unwrap();
        append_measurements(&file, &[kept.clone(), kept.clone()]).unwrap();
        let text = std::fs::read_to_string(&file).unwrap();
        let lines: Vec<Measurement> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines, [kept.clone(), kept.clone(), kept]);
        assert!(append_measurements(&folder.path().join("no/out"), &lines).unwrap_err().to_string().contains("no/out"));
    }
}
