//! What can go wrong while planning. Messages are lowercase fragments that name the thing and say what to do next.

use thiserror::Error;
use trefoil_core::CoreError;

/// Errors of every planner, of the simulator and of `explain`.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum PlanError {
    /// The profile, the graph or their match is at fault: a missing measurement (named), a bad number, an operator
    /// that runs nowhere (with every reason), an unknown unit, another model.
    #[error(transparent)]
    Core(#[from] CoreError),
    /// No planner of that name.
    #[error("there is no planning method `{want}`; there are {have}")]
    UnknownMethod {
        /// As given.
        want: String,
        /// Names of [`crate::METHODS`].
        have: String,
    },
    /// A planner of one model got several.
    #[error("method `{method}` plans one model, but {given} were given; {several} plan several models together")]
    OneModel {
        /// The method.
        method: String,
        /// Number of models.
        given: usize,
        /// Names of [`crate::SEVERAL_METHODS`].
        several: String,
    },
    /// Neither the request nor the profile names a unit.
    #[error("the profile has no units to plan for; profile the model with `-u UNIT` first")]
    NoUnits,
    /// Changes of the machine take every unit away that is planned for.
    #[error("{changes} leaves no unit to plan for; keep one, or ask for more units")]
    NoUnitLeft {
        /// The changes that take units away.
        changes: String,
    },
    /// A pin did not parse.
    #[error("`{text}` is not a pin ({reason}); write PATTERN=UNIT, like 'Conv*=openvino:CPU'")]
    PinSyntax {
        /// As given.
        text: String,
        /// What is wrong.
        reason: String,
    },
    /// A pin's pattern matches no operator's name or kind.
    #[error("pin `{pin}` matches no operator of model `{model}`; `trefoil inspect` lists their names and kinds")]
    PinMatchesNothing {
        /// The pin.
        pin: String,
        /// The model.
        model: String,
    },
    /// A pin names a unit that is not planned for.
    #[error("pin `{pin}` names a unit that is not among those planned for ({have}); add it with `-u`")]
    PinUnit {
        /// The pin.
        pin: String,
        /// The units planned for.
        have: String,
    },
    /// Two pins put one operator on different units.
    #[error("pins {pins} disagree on operator {operator} `{name}` ({kind}); narrow one of the patterns")]
    PinConflict {
        /// Both pins.
        pins: String,
        /// Operator index.
        operator: u32,
        /// Operator name.
        name: String,
        /// Operator kind.
        kind: String,
    },
    /// The plan that the method makes exceeds a unit's memory.
    #[error(
        "method `{method}` finds no plan within the memory limits of units: {unit} would hold {held} bytes of weights and has {most}; {advice}"
    )]
    Memory {
        /// The method.
        method: String,
        /// The unit.
        unit: String,
        /// Bytes of weights on it.
        held: u64,
        /// Its memory in bytes.
        most: u64,
        /// What to do.
        advice: String,
    },
    /// A pin forces an operator onto a unit that cannot run it.
    #[error("pin `{pin}` puts operator {operator} `{name}` ({kind}) on a unit that cannot run it: {reason}")]
    PinImpossible {
        /// The pin.
        pin: String,
        /// Operator index.
        operator: u32,
        /// Operator name.
        name: String,
        /// Operator kind.
        kind: String,
        /// Why the unit cannot run it.
        reason: String,
    },
    /// Energy was asked for and the power of a unit is unknown.
    #[error(
        "energy cannot be planned: no power is known for {units}; measure it where a sensor exists or declare it with `--watts {example}`"
    )]
    NoPower {
        /// Units without power.
        units: String,
        /// An example of the flag's value.
        example: String,
    },
    /// Only the whole model was measured on a mode of a unit.
    #[error(
        "only the whole model was measured on {unit}, so {what}; plan it with `--method single:{unit}`, or profile with `-u {unit}` for all else"
    )]
    OnlyWhole {
        /// The mode.
        unit: String,
        /// What cannot be done.
        what: String,
    },
    /// The method does not serve the objective.
    #[error(
        "method `{method}` cannot minimise {objective}; for throughput `pipeline` plans a stream of one model and `concurrent` rounds of several, all else is for latency or energy"
    )]
    Objective {
        /// The method.
        method: String,
        /// The objective.
        objective: String,
    },
    /// A set of operators cannot run on the unit it was put on.
    #[error("{unit} cannot run {what} of model `{model}`: {reason}")]
    Unrunnable {
        /// The unit.
        unit: String,
        /// `the whole`, `operator 3 \`x\` (Conv)`, `a segment of 7 operators`.
        what: String,
        /// The model.
        model: String,
        /// Why not.
        reason: String,
    },
    /// No split of the model into segments that all can run was found.
    #[error("no split of model `{model}` over {units} runs everywhere: {reason}")]
    NoSplit {
        /// The model.
        model: String,
        /// The units.
        units: String,
        /// What stands in the way.
        reason: String,
    },
    /// A hand-made assignment is not one unit for each operator.
    #[error("the given split of model `{model}` is no assignment: {reason}")]
    Assignment {
        /// The model.
        model: String,
        /// What is wrong, with the operator.
        reason: String,
    },
    /// An operator id is out of range.
    #[error("model `{model}` has no operator {operator}; it has {count}, numbered from 0")]
    NoOperator {
        /// The model.
        model: String,
        /// As given.
        operator: u32,
        /// Number of operators.
        count: usize,
    },
    /// Two requests cannot be planned together.
    #[error("the two requests cannot be planned together: {reason}")]
    Pair {
        /// What does not fit, and what to do.
        reason: String,
    },
    /// A stream of items cannot be planned.
    #[error("the stream cannot be planned: {reason}")]
    Stream {
        /// What is wrong with it.
        reason: String,
    },
    /// A plan's tasks wait for each other or for a resource order that never comes.
    #[error("the plan cannot run: {reason}")]
    Stuck {
        /// Which tasks wait for what.
        reason: String,
    },
    /// A change of the machine did not parse.
    #[error("`{text}` is no change of the machine ({reason}); write slow:UNIT=1.5, without:UNIT or busy:UNIT=4")]
    WhatIfSyntax {
        /// As given.
        text: String,
        /// What is wrong.
        reason: String,
    },
    /// A hand-made scheduling problem contradicts itself.
    #[error("the scheduling problem is malformed: {reason}")]
    Problem {
        /// What is wrong, with the job's operator.
        reason: String,
    },
    /// Models that are planned together were not measured on the same machine or units.
    #[error("model `{model}` cannot be planned with the others: {reason}")]
    Workload {
        /// The model.
        model: String,
        /// Why not.
        reason: String,
    },
}
