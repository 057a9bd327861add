//! Published numbers beside recomputed ones.

use crate::{Interval, PaperError};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use trefoil_core::Origin;

/// A number as a paper prints it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// As printed.
    pub value: String,
    /// Its unit; empty for counts.
    pub unit: String,
    /// Table, figure or section.
    pub place: String,
    /// What it is.
    pub what: String,
}

/// All numbers of one paper that Trefoil uses, by name.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PublishedNumbers {
    /// The paper.
    pub paper: String,
    numbers: BTreeMap<String, Published>,
}

impl PublishedNumbers {
    /// Reads a data file of this crate.
    pub(crate) fn parse(text: &str) -> Result<Self, PaperError> {
        let numbers: Self =
            serde_json::from_str(text).map_err(|error| PaperError::Data { reason: error.to_string() })?;
        match numbers.numbers.iter().find(|(_, number)| Interval::printed(&number.value).is_none()) {
            Some((name, number)) => {
                Err(PaperError::Data { reason: format!("`{name}` is `{}`, no number", number.value) })
            }
            None => Ok(numbers),
        }
    }

    /// The entry of that name.
    ///
    /// # Errors
    /// [`PaperError::Data`].
    pub fn get(&self, name: &str) -> Result<&Published, PaperError> {
        self.numbers
            .get(name)
            .ok_or_else(|| PaperError::Data { reason: format!("there is no published number `{name}`") })
    }

    /// What prints like the number of that name.
    ///
    /// # Errors
    /// [`PaperError::Data`].
    pub fn interval(&self, name: &str) -> Result<Interval, PaperError> {
        let number = self.get(name)?;
        Interval::printed(&number.value)
            .ok_or_else(|| PaperError::Data { reason: format!("`{name}` is `{}`, no number", number.value) })
    }

    /// The number of that name as printed.
    ///
    /// # Errors
    /// [`PaperError::Data`].
    pub fn value(&self, name: &str) -> Result<f64, PaperError> {
        Ok(self.interval(name)?.middle())
    }
}

/// How a recomputed number relates to the published one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Relation {
    /// It follows from other numbers of the paper by arithmetic.
    Follows,
    /// It is what the paper's model (or ours) predicts for something that the paper measured; the two may differ.
    Models,
    /// It is simulated on a described machine; only its size can be compared.
    Simulates,
}

/// What came of the comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Equal within what the printed digits allow.
    Agrees,
    /// Follows from the paper's own numbers, and the paper prints something else.
    Contradicts,
    /// A prediction that differs from a measurement.
    Differs,
    /// Above what the paper's other numbers allow under stated conditions.
    AboveCap,
    /// Nothing published gives it.
    Unpublished,
}

/// One comparison.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// Name of the published number, or of ours.
    pub name: String,
    /// Table, figure or section; empty for what is not published.
    pub place: String,
    /// What it is.
    pub what: String,
    /// As printed.
    pub published: Option<String>,
    /// Unit.
    pub unit: String,
    /// Recomputed.
    pub recomputed: Interval,
    /// Of the middles, relative to the published one.
    pub difference_percent: Option<f64>,
    /// Relation.
    pub relation: Relation,
    /// Verdict.
    pub verdict: Verdict,
    /// How the recomputed number was got.
    pub origin: Origin,
    /// From what.
    pub how: String,
}

/// Comparisons that belong together.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Section {
    /// Title.
    pub title: String,
    /// Rows.
    pub rows: Vec<Row>,
    /// What a reader should know.
    pub notes: Vec<String>,
}

impl Section {
    /// An empty section.
    pub fn new(title: &str) -> Self {
        Self { title: title.to_owned(), rows: Vec::new(), notes: Vec::new() }
    }

    /// Adds a comparison with the published number `name`.
    pub(crate) fn compare(
        &mut self,
        numbers: &PublishedNumbers,
        name: &str,
        relation: Relation,
        recomputed: impl Into<Interval>,
        how: &str,
    ) -> Result<(), PaperError> {
        let (published, recomputed) = (numbers.get(name)?, recomputed.into());
        let interval = numbers.interval(name)?;
        let verdict = match relation {
            _ if interval.meets(recomputed) => Verdict::Agrees,
            Relation::Follows => Verdict::Contradicts,
            Relation::Models | Relation::Simulates => Verdict::Differs,
        };
        self.rows.push(Row {
            name: name.to_owned(),
            place: published.place.clone(),
            what: published.what.clone(),
            published: Some(published.value.clone()),
            unit: published.unit.clone(),
            recomputed,
            difference_percent: Some(recomputed.difference_percent(interval)),
            relation,
            verdict,
            origin: if relation == Relation::Simulates { Origin::Simulated } else { Origin::Predicted },
            how: how.to_owned(),
        });
        Ok(())
    }

    /// Adds a cap: the published number must not be above it.
    pub(crate) fn cap(
        &mut self,
        numbers: &PublishedNumbers,
        name: &str,
        cap: f64,
        how: &str,
    ) -> Result<(), PaperError> {
        self.compare(numbers, name, Relation::Follows, cap, how)?;
        if let Some(row) = self.rows.last_mut() {
            let fits = numbers.interval(name)?.low <= cap;
            row.verdict = if fits { Verdict::Agrees } else { Verdict::AboveCap };
            row.what = format!("{} (cap)", row.what);
        }
        Ok(())
    }

    /// Adds a number that is not published.
    pub(crate) fn derive(&mut self, name: &str, what: &str, unit: &str, recomputed: impl Into<Interval>, how: &str) {
        self.rows.push(Row {
            name: name.to_owned(),
            place: String::new(),
            what: what.to_owned(),
            published: None,
            unit: unit.to_owned(),
            recomputed: recomputed.into(),
            difference_percent: None,
            relation: Relation::Follows,
            verdict: Verdict::Unpublished,
            origin: Origin::Predicted,
            how: how.to_owned(),
        });
    }

    pub(crate) fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }
}

/// Everything recomputed for one paper.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PaperReport {
    /// The paper.
    pub paper: String,
    /// Sections.
    pub sections: Vec<Section>,
    /// Published numbers that nothing published can check.
    pub cannot_be_checked: Vec<String>,
}

impl PaperReport {
    /// The row of that name.
    pub fn row(&self, name: &str) -> Option<&Row> {
        self.sections.iter().flat_map(|section| &section.rows).find(|row| row.name == name)
    }

    /// Rows with that verdict.
    pub fn with_verdict(&self, verdict: Verdict) -> impl Iterator<Item = &Row> {
        self.sections.iter().flat_map(|section| &section.rows).filter(move |row| row.verdict == verdict)
    }
}
