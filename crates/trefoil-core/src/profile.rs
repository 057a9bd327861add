//! The profile: measurements of models on one machine. Cost tables are views of it.

use crate::quantity::MOST_BYTES;
use crate::{
    CoreError, Machine, Measurement, MeasurementId, OperatorGraph, Outcome, Quantity, Subject, Unit, UnitAddress,
};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::OnceLock;

/// Name of the file format, first field of every profile.
pub const PROFILE_FORMAT: &str = "trefoil-profile";
/// Version of the file format that this build writes and reads.
pub const PROFILE_VERSION: u32 = 1;

/// Measurements of one or several models on one machine. Append-only: measuring again adds a record with the next
/// number, and views use the newest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    /// Always [`PROFILE_FORMAT`].
    pub format: String,
    /// Format version.
    pub version: u32,
    /// Where it was measured.
    pub machine: Machine,
    /// Units measured.
    pub units: Vec<Unit>,
    /// Other core counts of those units (each CPU backend on one core and on all), on which only the whole model was
    /// measured: small models often run faster on one core, so the best single unit may be one of these.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub modes: Vec<Unit>,
    /// Models measured, as operators.
    pub models: Vec<OperatorGraph>,
    /// Declared power in watts by unit, plus `idle`, where no sensor told (recorded as declared).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub declared_watts: BTreeMap<String, f64>,
    /// What a reader should know: noise flags, substitutions, limits that were hit.
    #[serde(default)]
    pub notes: Vec<String>,
    /// The records.
    pub measurements: Vec<Measurement>,
}

impl Profile {
    /// An empty profile of `machine`.
    pub fn new(machine: Machine) -> Self {
        Self {
            format: PROFILE_FORMAT.to_owned(),
            version: PROFILE_VERSION,
            machine,
            units: Vec::new(),
            modes: Vec::new(),
            models: Vec::new(),
            declared_watts: BTreeMap::new(),
            notes: Vec::new(),
            measurements: Vec::new(),
        }
    }

    /// Looks up newest measurements and dangling references in constant time. Build once, query often.
    pub fn index(&self) -> ProfileIndex<'_> {
        let mut newest = HashMap::with_capacity(self.measurements.len());
        for (at, measurement) in self.measurements.iter().enumerate() {
            newest.insert((&measurement.subject, measurement.units.as_slice()), at);
        }
        ProfileIndex { profile: self, newest, by_id: OnceLock::new() }
    }

    /// The model named or fingerprinted `want`; the only one if `want` is `None`.
    ///
    /// # Errors
    /// [`CoreError::NoModel`], [`CoreError::WrongModel`] or [`CoreError::SeveralModels`].
    pub fn model(&self, want: Option<&str>) -> Result<&OperatorGraph, CoreError> {
        let found: Vec<_> = self
            .models
            .iter()
            .filter(|graph| want.is_none_or(|want| graph.model == want || graph.fingerprint == want))
            .collect();
        let names = || self.models.iter().map(|graph| format!("`{}`", graph.model)).collect::<Vec<_>>().join(", ");
        match (found.as_slice(), want) {
            ([graph], _) => Ok(graph),
            _ if self.models.is_empty() => Err(CoreError::NoModel),
            ([], Some(want)) => Err(CoreError::WrongModel { want: want.to_owned(), have: names() }),
            _ => Err(CoreError::SeveralModels { count: self.models.len(), have: names() }),
        }
    }

    /// The unit at `address`, be it of [`Profile::units`] or of [`Profile::modes`].
    ///
    /// # Errors
    /// [`CoreError::UnknownUnit`] listing what there is.
    pub fn unit(&self, address: &UnitAddress) -> Result<&Unit, CoreError> {
        self.units
            .iter()
            .chain(&self.modes)
            .find(|unit| unit.address == *address)
            .ok_or_else(|| CoreError::UnknownUnit { want: address.to_string(), have: self.unit_names() })
    }

    /// `ort:CPU, openvino:CPU; of the whole model also openvino:CPU@0`.
    fn unit_names(&self) -> String {
        let names = |units: &[Unit]| units.iter().map(|unit| unit.address.to_string()).collect::<Vec<_>>().join(", ");
        match self.modes.as_slice() {
            [] => names(&self.units),
            modes => format!("{}; of the whole model also {}", names(&self.units), names(modes)),
        }
    }

    /// The id that the next measurement of `subject` on `units` must carry.
    pub fn next_id(&self, subject: &Subject, units: &[UnitAddress]) -> MeasurementId {
        let number = self.measurements.iter().filter(|m| m.subject == *subject && m.units == units).count();
        MeasurementId::new(subject, units, number as u32)
    }

    /// Checks that watts are powers, and that no unit draws less while it works than the idle machine: the energy of a plan is
    /// idle power for as long as it takes and what the busy units draw above that, and no bound on it allows for less.
    ///
    /// # Errors
    /// [`CoreError::BadNumber`], [`CoreError::BelowIdle`].
    pub fn check_watts(&self) -> Result<(), CoreError> {
        for (name, &watts) in &self.declared_watts {
            Quantity::Power.check(watts, || format!("declared power of {name}"))?;
        }
        let Some(&idle) = self.declared_watts.get("idle") else { return Ok(()) };
        // The newest reading counts, and what was declared where the last one failed.
        let mut watts = self.declared_watts.clone();
        for measurement in &self.measurements {
            let (Subject::Power, [unit]) = (&measurement.subject, measurement.units.as_slice()) else { continue };
            let unit = unit.to_string();
            let declared = self.declared_watts.get(&unit).copied();
            let measured =
                if let Outcome::Value { value } = &measurement.outcome { Some(value.median) } else { declared };
            match measured {
                Some(measured) => watts.insert(unit, measured),
                None => watts.remove(&unit),
            };
        }
        watts.iter().try_for_each(|(unit, &watts)| above_idle(unit, watts, idle))
    }

    /// Checks format, version, units (none twice), graphs, numbers (see [`Quantity`]) and watts ([`Profile::check_watts`]).
    ///
    /// # Errors
    /// The first [`CoreError`] found, naming the place.
    pub fn validate(&self) -> Result<(), CoreError> {
        if self.format != PROFILE_FORMAT || self.version != PROFILE_VERSION {
            return Err(CoreError::Version {
                format: self.format.clone(),
                found: self.version,
                supported: PROFILE_VERSION,
                hint: "profile again".to_owned(),
            });
        }
        for list in [&self.units, &self.modes] {
            let mut seen = BTreeSet::new();
            if let Some(unit) = list.iter().find(|unit| !seen.insert(&unit.address)) {
                return Err(CoreError::RepeatedUnit { unit: unit.address.to_string() });
            }
        }
        self.check_watts()?;
        for graph in &self.models {
            graph.validate()?;
        }
        self.measurements.iter().try_for_each(|measurement| self.check_numbers(measurement))
    }

    fn check_numbers(&self, measurement: &Measurement) -> Result<(), CoreError> {
        let refused = |quantity: Quantity, number: f64| Err(quantity.refused(number, self.place_of(measurement)));
        let spread = |quantity: Quantity, numbers: &[f64]| match numbers.iter().find(|one| !quantity.spreads_to(**one))
        {
            Some(&bad) => refused(quantity, bad),
            None => Ok(()),
        };
        let typical = |quantity: Quantity, number: f64| {
            if quantity.holds(number) { Ok(()) } else { refused(quantity, number) }
        };
        if let Subject::Transfer { bytes } = measurement.subject
            && bytes > MOST_BYTES
        {
            return Err(CoreError::BadNumber {
                place: self.place_of(measurement),
                value: bytes.to_string(),
                what: format!("number of bytes up to {MOST_BYTES}"),
            });
        }
        match &measurement.outcome {
            Outcome::Ok { timing, nodes, .. } => {
                let parts = [&timing.total, &timing.h2d, &timing.dispatch, &timing.exec, &timing.d2h];
                for one in parts.into_iter().flatten() {
                    typical(Quantity::Time, one.median)?;
                    spread(Quantity::Time, &[one.p10, one.p90, one.min, one.max])?;
                }
                nodes.iter().try_for_each(|node| typical(Quantity::Time, node.ms))
            }
            Outcome::Value { value } => {
                let quantity = if measurement.subject == Subject::Power { Quantity::Power } else { Quantity::Factor };
                typical(quantity, value.median)?;
                spread(quantity, &[value.p10, value.p90])
            }
            Outcome::Wrong { .. } | Outcome::Failed { .. } => Ok(()),
        }
    }

    /// A measurement by id, and by the first operator that it is of.
    fn place_of(&self, measurement: &Measurement) -> String {
        let id = &measurement.id;
        let Subject::Operator { signature } = &measurement.subject else { return format!("measurement `{id}`") };
        let operators = self.models.iter().flat_map(|graph| graph.operators.iter().enumerate());
        match operators.into_iter().find(|(_, operator)| operator.signature == *signature) {
            Some((at, operator)) => {
                format!("measurement `{id}` of operator {at} `{}` ({})", operator.name, operator.kind)
            }
            None => format!("measurement `{id}`"),
        }
    }
}

/// Checks that a unit draws no less while it works than the idle machine, see [`Profile::check_watts`].
///
/// # Errors
/// [`CoreError::BelowIdle`].
pub fn above_idle(unit: &str, watts: f64, idle: f64) -> Result<(), CoreError> {
    if watts >= idle {
        return Ok(());
    }
    Err(CoreError::BelowIdle { unit: unit.to_owned(), watts: watts.to_string(), idle: idle.to_string() })
}

/// Fast look-ups into a [`Profile`].
#[derive(Debug)]
pub struct ProfileIndex<'a> {
    /// The profile looked into.
    pub profile: &'a Profile,
    /// Place in the profile of the newest measurement of each subject on its units.
    newest: HashMap<(&'a Subject, &'a [UnitAddress]), usize>,
    by_id: OnceLock<HashMap<&'a MeasurementId, &'a Measurement>>,
}

impl<'a> ProfileIndex<'a> {
    /// The newest measurement of `subject` on exactly `units`.
    pub fn newest(&self, subject: &Subject, units: &[UnitAddress]) -> Option<&'a Measurement> {
        self.newest.get(&(subject, units)).map(|&at| &self.profile.measurements[at])
    }

    /// The measurement of that id.
    pub fn by_id(&self, id: &MeasurementId) -> Option<&'a Measurement> {
        let build = || self.profile.measurements.iter().map(|measurement| (&measurement.id, measurement)).collect();
        self.by_id.get_or_init(build).get(id).copied()
    }

    /// All newest measurements, in the profile's order.
    pub fn all_newest(&self) -> impl Iterator<Item = &'a Measurement> + '_ {
        self.newest_of(|_| true)
    }

    /// The newest measurements of some subjects, in the profile's order. Most records are of operators: asking for others
    /// only is much cheaper than looking through all.
    pub fn newest_of<'i>(
        &'i self,
        wanted: impl Fn(&Subject) -> bool + 'i,
    ) -> impl Iterator<Item = &'a Measurement> + 'i {
        let measurements = self.profile.measurements.iter().enumerate();
        measurements
            .filter(move |(_, measurement)| wanted(&measurement.subject))
            .filter(|(at, measurement)| self.newest.get(&(&measurement.subject, &measurement.units[..])) == Some(at))
            .map(|(_, measurement)| measurement)
    }
}
