//! Simulated measurements of generated graphs.

use super::{Entry, GraphSpec, KINDS, MOST_UNITS, Random};
use crate::testing::ok;
use std::collections::{BTreeMap, BTreeSet};
use trefoil_core::{
    Conditions, Measurement, MeasurementId, OperatorClass, Origin, Outcome, Profile, Samples, Signature, Subject,
    UnitAddress,
};

/// Busy watts by unit, in the order of [`unit`]; idle last.
const WATTS: [f64; MOST_UNITS] = [18.0, 26.0, 9.0, 6.0, 40.0];
const IDLE_WATTS: f64 = 3.0;
/// Milliseconds to start anything, by unit.
const DISPATCH: [f64; MOST_UNITS] = [0.003, 0.012, 0.03, 0.02, 0.015];
/// Typical speed by unit: compute-bound and memory-bound work.
const SPEED: [[f64; 2]; MOST_UNITS] = [[1.0, 1.0], [3.0, 1.1], [2.2, 0.5], [1.2, 0.7], [4.0, 1.3]];
/// One operator in so many does not compile on the third and fourth unit.
const UNSUPPORTED: usize = 12;

pub(super) struct Records<'a> {
    pub profile: &'a mut Profile,
}

impl Records<'_> {
    fn push(&mut self, subject: Subject, units: Vec<UnitAddress>, outcome: Outcome) {
        self.profile.measurements.push(Measurement {
            // Every subject is recorded once.
            id: MeasurementId::new(&subject, &units, 0),
            subject,
            units,
            origin: Origin::Simulated,
            outcome,
            conditions: Conditions::default(),
            versions: BTreeMap::new(),
            taken_at: "1970-01-01T00:00:00Z".to_owned(),
        });
    }

    fn address(&self, unit: usize) -> UnitAddress {
        self.profile.units[unit].address.clone()
    }

    pub fn operators(&mut self, catalogue: &[Entry], used: &BTreeSet<usize>, spec: &GraphSpec, random: &mut Random) {
        for unit in 0..spec.units {
            let address = self.address(unit);
            let taste: Vec<f64> = KINDS.iter().map(|_| random.log_uniform(0.4, 2.5)).collect();
            for (index, entry) in catalogue.iter().enumerate() {
                let kind = KINDS.iter().position(|kind| kind.0 == entry.kind).unwrap_or(0);
                let speed = SPEED[unit][usize::from(entry.class == OperatorClass::Memory)];
                let ms = DISPATCH[unit] + entry.work / (speed * taste[kind]) * random.log_uniform(0.8, 1.25);
                let unsupported = matches!(unit, 2 | 3) && random.below(UNSUPPORTED) == 0;
                if !used.contains(&index) {
                    continue;
                }
                let subject = Subject::Operator { signature: Signature(format!("{:016x}{index:016x}", spec.seed)) };
                let outcome = if unsupported {
                    Outcome::Failed { stage: "compile".to_owned(), reason: format!("no {} kernel", entry.kind) }
                } else {
                    ok(ms)
                };
                self.push(subject, vec![address.clone()], outcome);
            }
        }
    }

    pub fn transfers(&mut self, random: &mut Random) {
        let count = self.profile.units.len();
        for from in 0..count {
            for to in (0..count).filter(|&to| to != from) {
                let start = random.log_uniform(0.004, 0.03);
                let per_megabyte = random.log_uniform(0.02, 0.15);
                for (bytes, ms) in [(1_000, start), (4_000_000, start + 4.0 * per_megabyte)] {
                    let pair = vec![self.address(from), self.address(to)];
                    self.push(Subject::Transfer { bytes }, pair, ok(ms));
                }
            }
        }
    }

    pub fn slowdowns(&mut self, most: f64, random: &mut Random) {
        if most <= 1.0 {
            return;
        }
        let classes = [OperatorClass::Compute, OperatorClass::Memory];
        let count = self.profile.units.len();
        for slowed in 0..count {
            for other in (0..count).filter(|&other| other != slowed) {
                let pair = random.between(1.0, most);
                for class in classes {
                    for interference in classes {
                        // Memory-bound work suffers and disturbs most.
                        let memory = [class, interference].iter().filter(|&&c| c == OperatorClass::Memory).count();
                        let factor = 1.0 + (pair - 1.0) * [0.3, 0.6, 1.0][memory];
                        let units = vec![self.address(slowed), self.address(other)];
                        let value = Outcome::Value { value: Samples::exactly(factor) };
                        self.push(Subject::Slowdown { class, interference }, units, value);
                    }
                }
            }
        }
    }

    pub fn powers(&mut self) {
        for (unit, watts) in WATTS.iter().enumerate().take(self.profile.units.len()) {
            let address = self.address(unit);
            self.push(Subject::Power, vec![address], Outcome::Value { value: Samples::exactly(*watts) });
        }
        self.profile.declared_watts.insert("idle".to_owned(), IDLE_WATTS);
    }
}
