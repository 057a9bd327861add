//! Errors of the vocabulary itself: malformed addresses, inconsistent graphs, profiles that lack a measurement.

use thiserror::Error;

/// What can be wrong with a value of this crate. Messages are lowercase fragments that say what to do next.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CoreError {
    /// A unit address did not parse.
    #[error(
        "`{text}` is not a unit address ({reason}); write backend:device[@cores][+precision], like openvino:CPU@0-1"
    )]
    UnitAddress {
        /// The text as given.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
    /// An operator graph breaks one of its invariants.
    #[error("operator graph of model `{model}`: {reason}")]
    Graph {
        /// Model name.
        model: String,
        /// Which invariant, with names.
        reason: String,
    },
    /// The profile holds neither a cost nor a failure for an operator on a unit.
    #[error(
        "the profile has no measurement `{id}` (operator {operator} `{name}`, {kind}, on {unit}); run `trefoil profile` again with that unit"
    )]
    MissingMeasurement {
        /// The id that the measurement would have.
        id: String,
        /// Operator index in the graph.
        operator: u32,
        /// Operator name.
        name: String,
        /// Operator kind, such as `Conv+Relu`.
        kind: String,
        /// Unit address.
        unit: String,
    },
    /// The profile tells of no transfer between two units.
    #[error("the profile has no measured transfer from {from} to {to}; run `trefoil profile` again with both units")]
    MissingTransfer {
        /// Unit that the data is on.
        from: String,
        /// Unit that needs it.
        to: String,
    },
    /// A plan or a derived measurement cites a measurement id that the profile does not hold.
    #[error(
        "{citer} cites measurement `{id}`, which the profile does not hold; use the profile the plan was made from"
    )]
    DanglingMeasurement {
        /// Who cites it.
        citer: String,
        /// The cited id.
        id: String,
    },
    /// No unit of the profile can run an operator.
    #[error("operator {operator} `{name}` ({kind}) runs on no unit of the profile: {reasons}")]
    Unplaceable {
        /// Operator index in the graph.
        operator: u32,
        /// Operator name.
        name: String,
        /// Operator kind.
        kind: String,
        /// Per unit, why not.
        reasons: String,
    },
    /// The profile does not hold the asked model.
    #[error("the profile holds model(s) {have}, not `{want}`; profile this model first")]
    WrongModel {
        /// What was asked for.
        want: String,
        /// What the profile holds.
        have: String,
    },
    /// The profile holds no model at all.
    #[error("the profile holds no model; profile one with `trefoil profile MODEL.onnx -o PROFILE.json`")]
    NoModel,
    /// The profile holds several models and nobody said which.
    #[error("the profile holds {count} models ({have}) where one is needed; profile each into a file of its own")]
    SeveralModels {
        /// How many.
        count: usize,
        /// Their names.
        have: String,
    },
    /// The profile lists a unit more than once.
    #[error("the profile lists unit `{unit}` twice; delete one of the entries or profile again")]
    RepeatedUnit {
        /// The unit.
        unit: String,
    },
    /// The profile does not hold the asked unit.
    #[error("the profile has no unit `{want}`; it has {have}")]
    UnknownUnit {
        /// What was asked for.
        want: String,
        /// What the profile holds.
        have: String,
    },
    /// A number that is none of what it stands for: NaN, negative or too large, see [`crate::Quantity`].
    #[error("{place} holds {value}, which is no {what}; the file is damaged or was written by hand")]
    BadNumber {
        /// Where it stands.
        place: String,
        /// The number as text.
        value: String,
        /// What it should be.
        what: String,
    },
    /// A unit that draws less while it works than the machine does while nothing runs.
    #[error(
        "{unit} is said to draw {watts} W while it works, less than the {idle} W of the idle machine; correct either (`--watts {unit}=…`, `--watts idle=…`)"
    )]
    BelowIdle {
        /// The unit.
        unit: String,
        /// Its power as text.
        watts: String,
        /// The idle machine's power as text.
        idle: String,
    },
    /// A file of a version this build does not read.
    #[error("{format} version {found} is not readable by this Trefoil (it reads {supported}); {hint}")]
    Version {
        /// File format name.
        format: String,
        /// Version found.
        found: u32,
        /// Version supported.
        supported: u32,
        /// What to do.
        hint: String,
    },
    /// A tensor whose bytes do not fit its type and shape.
    #[error("tensor `{name}` of {dtype} {shape:?} needs {want} bytes but has {have}")]
    TensorBytes {
        /// Tensor name.
        name: String,
        /// Element type.
        dtype: String,
        /// Shape.
        shape: Vec<u64>,
        /// Bytes its type and shape ask for.
        want: u64,
        /// Bytes there are.
        have: u64,
    },
}
