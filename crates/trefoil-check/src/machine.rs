//! What the profile says of units: resources, transfers, slowdowns, powers.

use crate::CheckError;
use crate::json::{Reader, text};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

const PROFILE: Reader = Reader("profile");

/// Class of work, for slowdowns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    Compute,
    Memory,
}

impl Class {
    pub fn read(name: Option<&str>) -> Self {
        if name == Some("compute") { Self::Compute } else { Self::Memory }
    }
}

#[derive(Debug)]
pub struct Unit {
    pub address: String,
    pub accelerator: bool,
    pub resources: BTreeSet<String>,
    pub watts: Option<f64>,
    pub memory_bytes: Option<f64>,
    pub max_nodes: Option<f64>,
    /// Whether it is another core count of a unit, of which the profile knows the whole model only.
    pub is_mode: bool,
}

/// The units that the certificate's plan could choose from.
#[derive(Debug)]
pub struct Machine {
    pub units: Vec<Unit>,
    pub idle_watts: Option<f64>,
    /// (slowed, interfering) → (class, class of the interference) → factor.
    slowdowns: BTreeMap<(usize, usize), BTreeMap<(Class, Class), f64>>,
}

/// What one profile says of moving data between the units.
#[derive(Debug)]
pub struct Transfers {
    units: usize,
    /// Row-major from × to: `(bytes, ms)` ascending.
    points: Vec<Vec<(f64, f64)>>,
}

impl Transfers {
    pub fn read<'r>(records: impl Iterator<Item = &'r Value>, machine: &Machine) -> Self {
        let units = machine.units.len();
        let mut points = vec![Vec::new(); units * units];
        for record in records.filter(|record| text(&record["subject"], "kind") == Some("transfer")) {
            let Some((from, to)) = machine.pair_of(record) else { continue };
            // Only the caller's own total counts for a transfer.
            let total = record["outcome"]["timing"]["total"]["median"].as_f64();
            if let (Some(bytes), Some(total)) = (record["subject"]["bytes"].as_f64(), total) {
                points[from * units + to].push((bytes, total));
            }
        }
        for points in &mut points {
            points.sort_by(|a: &(f64, f64), b| a.0.total_cmp(&b.0));
        }
        Self { units, points }
    }

    /// Piecewise linear between measured sizes, constant below, the last slope above.
    pub fn ms(&self, from: usize, to: usize, bytes: f64) -> f64 {
        if from == to {
            return 0.0;
        }
        let points = &self.points[from * self.units + to];
        let Some(&first) = points.first() else { return 0.0 };
        if points.len() == 1 || bytes <= first.0 {
            return first.1;
        }
        let right = points.iter().position(|point| point.0 >= bytes).unwrap_or(points.len() - 1).max(1);
        let (low, high) = (points[right - 1], points[right]);
        if high.0 <= low.0 {
            return high.1;
        }
        (low.1 + (high.1 - low.1) * (bytes - low.0) / (high.0 - low.0)).max(0.0)
    }
}

/// The newest record of every subject on its units: of equal ones the last counts.
pub fn newest(profile: &Value) -> Result<BTreeMap<String, &Value>, CheckError> {
    let mut found = BTreeMap::new();
    for record in PROFILE.list(profile, "measurements")? {
        found.insert(key(&record["subject"], &record["units"]), record);
    }
    Ok(found)
}

/// Key of a subject on units.
pub fn key(subject: &Value, units: &Value) -> String {
    format!("{subject}|{units}")
}

/// `(ms, h2d, d2h)` of a record that ran: the caller's total, else dispatch and execution.
pub fn time(record: &Value) -> Option<(f64, Option<f64>, Option<f64>)> {
    let outcome = &record["outcome"];
    if text(outcome, "result") != Some("ok") {
        return None;
    }
    let part = |name: &str| outcome["timing"][name]["median"].as_f64();
    let parts = match (part("dispatch"), part("exec")) {
        (None, None) => None,
        (dispatch, exec) => Some(dispatch.unwrap_or(0.0) + exec.unwrap_or(0.0)),
    };
    Some((part("total").or(parts)?, part("h2d"), part("d2h")))
}

impl Machine {
    /// The machine of some profiles, in the order of the models that they are of: what an earlier one tells counts.
    pub fn read(certificate: &Value, profiles: &[&Value]) -> Result<Self, CheckError> {
        Self::of(Reader("certificate").list(certificate, "units")?, profiles)
    }

    /// The same without the modes, which must be listed last: bounds are over what operators cost, and modes have no operators.
    pub fn without_modes(&self, certificate: &Value, profiles: &[&Value]) -> Result<Self, CheckError> {
        let units = self.units.iter().take_while(|unit| !unit.is_mode).count();
        if self.units[units..].iter().any(|unit| !unit.is_mode) {
            return Err(Reader("certificate").fail("it lists a unit after a mode"));
        }
        Self::of(&Reader("certificate").list(certificate, "units")?[..units], profiles)
    }

    /// The least that a whole model takes on any mode that a profile knows, in milliseconds.
    pub fn least_on_modes(profile: &Value, graph: &Value) -> Result<f64, CheckError> {
        let records = newest(profile)?;
        let subject = json!({ "kind": "whole-model", "model": graph["fingerprint"] });
        let modes = profile.get("modes").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let known = modes.iter().filter_map(|mode| records.get(&key(&subject, &json!([mode["address"]]))));
        Ok(known.filter_map(|record| time(record)).map(|time| time.0).fold(f64::INFINITY, f64::min))
    }

    fn of(names: &[Value], profiles: &[&Value]) -> Result<Self, CheckError> {
        let first = profiles.first().ok_or_else(|| PROFILE.fail("there is none"))?;
        let described = PROFILE.list(first, "units")?;
        // Other core counts of the units, of which the profile knows whole models only.
        let modes = first.get("modes").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let mut units = Vec::new();
        for (place, name) in names.iter().enumerate() {
            // Limits and transfers are counted by unit, so one that is listed twice would have twice its memory.
            if names[..place].contains(name) {
                return Err(Reader("certificate").fail(format!("it lists the unit {name} twice")));
            }
            let is_here = |unit: &&Value| unit["address"] == *name;
            let is_mode = !described.iter().any(|unit| is_here(&unit));
            let listed = if is_mode { modes } else { described };
            let mut found = listed.iter().filter(is_here);
            let unit = found.next().ok_or_else(|| CheckError::OtherProfile(format!("it has no unit {name}")))?;
            if found.next().is_some() {
                return Err(PROFILE.fail(format!("it lists the unit {name} twice")));
            }
            let address = name.as_str().unwrap_or_default().to_owned();
            let mut resources: BTreeSet<String> =
                PROFILE.list(unit, "resources")?.iter().filter_map(Value::as_str).map(str::to_owned).collect();
            if resources.is_empty() {
                resources.insert(format!("unit:{address}"));
            }
            units.push(Unit {
                accelerator: text(unit, "kind") != Some("cpu"),
                watts: None,
                is_mode,
                memory_bytes: unit["limits"]["memory_bytes"].as_f64(),
                max_nodes: unit["limits"]["max_nodes"].as_f64(),
                resources,
                address,
            });
        }
        for profile in profiles {
            let lists = [profile.get("units"), profile.get("modes")];
            let knows = |address: &str| {
                lists
                    .iter()
                    .flatten()
                    .filter_map(|list| list.as_array())
                    .flatten()
                    .any(|unit| unit["address"] == *address)
            };
            if let Some(unit) = units.iter().find(|unit| !knows(&unit.address)) {
                return Err(CheckError::OtherProfile(format!("one of them has no unit {}", unit.address)));
            }
        }
        let mut machine = Self { idle_watts: None, slowdowns: BTreeMap::new(), units };
        for profile in profiles {
            machine.add(profile)?;
        }
        // The bounds on energy take every unit to draw at least what the idle machine draws.
        if let Some(idle) = machine.idle_watts
            && let Some(unit) = machine.units.iter().find(|unit| unit.watts.is_some_and(|watts| watts < idle))
        {
            return Err(PROFILE.fail(format!("{} draws less while it works than the idle machine", unit.address)));
        }
        Ok(machine)
    }

    /// Powers and slowdowns that no earlier profile told.
    fn add(&mut self, profile: &Value) -> Result<(), CheckError> {
        let records = newest(profile)?;
        self.idle_watts = self.idle_watts.or_else(|| profile["declared_watts"]["idle"].as_f64());
        for unit in &mut self.units {
            let power = records.get(&key(&json!({ "kind": "power" }), &json!([unit.address])));
            let watts = power.and_then(|record| record["outcome"]["value"]["median"].as_f64());
            unit.watts = unit.watts.or(watts).or_else(|| profile["declared_watts"][&unit.address].as_f64());
        }
        for record in records.values() {
            let subject = &record["subject"];
            let Some(pair) = self.pair_of(record) else { continue };
            if let (Some("slowdown"), Some(factor)) =
                (text(subject, "kind"), record["outcome"]["value"]["median"].as_f64())
            {
                let classes = (Class::read(text(subject, "class")), Class::read(text(subject, "interference")));
                self.slowdowns.entry(pair).or_default().entry(classes).or_insert(factor);
            }
        }
        Ok(())
    }

    /// The units of a record of two.
    fn pair_of(&self, record: &Value) -> Option<(usize, usize)> {
        let Some([from, to]) = record["units"].as_array().map(Vec::as_slice) else { return None };
        let place = |name: &Value| self.units.iter().position(|unit| *name == *unit.address);
        place(from).zip(place(to))
    }

    /// The measured factor of one unit's work beside another's: of exactly these classes, else the worst of the slowed class.
    fn pair(&self, slowed: (usize, Class), other: (usize, Class)) -> Option<f64> {
        let measured = self.slowdowns.get(&(slowed.0, other.0))?;
        let of_class = measured.iter().filter(|entry| entry.0.0 == slowed.1).map(|entry| *entry.1);
        measured.get(&(slowed.1, other.1)).copied().or_else(|| of_class.reduce(f64::max))
    }

    /// The least factor that any work on a unit can see while exactly the units of `set` are busy.
    pub fn least_beside(&self, unit: usize, set: &[usize]) -> f64 {
        let classes = [Class::Compute, Class::Memory];
        let of_class = |class: Class| {
            let others = set.iter().filter(|&&other| other != unit);
            let worst = others
                .filter_map(|&other| {
                    classes.iter().filter_map(|&its| self.pair((unit, class), (other, its))).reduce(f64::min)
                })
                .reduce(f64::max);
            worst.unwrap_or(1.0)
        };
        of_class(Class::Compute).min(of_class(Class::Memory))
    }

    /// Sets of units that share no resource and so can be busy at once; `None` when there are too many units to list them.
    pub fn busy_sets(&self) -> Option<Vec<Vec<usize>>> {
        let count = self.units.len();
        if count > 12 {
            return None;
        }
        let disjoint = |set: &[usize]| {
            set.iter().all(|&one| {
                set.iter().all(|&two| one == two || self.units[one].resources.is_disjoint(&self.units[two].resources))
            })
        };
        let sets = (1usize..1 << count).map(|code| (0..count).filter(|unit| code >> unit & 1 == 1).collect::<Vec<_>>());
        Some(sets.filter(|set| disjoint(set)).collect())
    }

    /// How much slower a unit works on `class` while `others` are busy.
    pub fn factor(&self, unit: usize, class: Class, others: &[(usize, Class)]) -> f64 {
        let mut worst: Option<f64> = None;
        for &(other, interference) in others {
            if let Some(factor) = self.pair((unit, class), (other, interference)) {
                worst = Some(worst.map_or(factor, |worst| worst.max(factor)));
            }
        }
        worst.unwrap_or(1.0)
    }

    /// The least factor that can apply to a unit's work of a class: below 1 only where some unit that can be busy beside it
    /// speeds it up.
    pub fn least_factor(&self, unit: usize, class: Class) -> f64 {
        let beside = |other: usize| self.units[unit].resources.is_disjoint(&self.units[other].resources);
        let own = self.slowdowns.iter().filter(|entry| entry.0.0 == unit && beside(entry.0.1));
        let factors = own.flat_map(|entry| entry.1.iter()).filter(|entry| entry.0.0 == class);
        factors.map(|entry| *entry.1).fold(1.0, f64::min)
    }

    /// Whether some units that work at once change each other's rates.
    pub fn slows(&self) -> bool {
        let apart =
            |&(one, other): &(usize, usize)| self.units[one].resources.is_disjoint(&self.units[other].resources);
        let pairs = self.slowdowns.iter().filter(|(pair, _)| apart(pair));
        pairs.flat_map(|(_, factors)| factors.values()).any(|factor| factor.to_bits() != 1f64.to_bits())
    }

    /// The objective's price of one busy millisecond on each unit.
    pub fn prices(&self, objective: &str) -> Result<Vec<f64>, CheckError> {
        match objective {
            "latency" | "throughput" => Ok(vec![1.0; self.units.len()]),
            "energy" => self
                .units
                .iter()
                .map(|unit| {
                    unit.watts
                        .map(|watts| watts / 1e3)
                        .ok_or_else(|| CheckError::OtherProfile(format!("it tells no power of {}", unit.address)))
                })
                .collect(),
            other => Err(Reader("certificate").fail(format!("objective `{other}`"))),
        }
    }
}
