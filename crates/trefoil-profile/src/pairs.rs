//! Records that take two units: transfers and slowdowns. How they are measured is in the worker's `pairs` module.

use crate::protocol::{Answer, Item, Job};
use crate::session::{Session, leniency_for, outcome_of, unexpected};
use crate::{ProfileError, StoreWriter, cache};
use std::collections::BTreeSet;
use std::path::PathBuf;
use trefoil_core::{
    DataType, HostTensor, OperatorClass, OperatorGraph, OperatorId, Outcome, Profile, Samples, Subject, TensorInfo,
    Timing, Unit,
};
use trefoil_onnx::builder::ModelBuilder;
use trefoil_units::{CompileOptions, SubModel};

/// Class in the journal.
const CLASS: &str = "pairs";

/// Hand-over times for every ordered pair of units and every size.
pub(crate) fn transfers(session: &mut Session<'_>, profile: &mut Profile, units: &[Unit]) -> Result<(), ProfileError> {
    for (index, first) in units.iter().enumerate() {
        for second in &units[index + 1..] {
            for &bytes in session.options.transfer_sizes() {
                transfer(session, profile, first, second, bytes)?;
            }
            session.retire(&slot_name(first, second));
        }
    }
    Ok(())
}

fn slot_name(first: &Unit, second: &Unit) -> String {
    format!("{} and {}", first.address, second.address)
}

/// One job tells both directions; each is a record of its own.
fn transfer(
    session: &mut Session<'_>,
    profile: &mut Profile,
    first: &Unit,
    second: &Unit,
    bytes: u64,
) -> Result<(), ProfileError> {
    let subject = Subject::Transfer { bytes };
    let class = format!("{CLASS} {}", session.options.class());
    let mut backward = None;
    let label = format!("transfer of {bytes} bytes between {} and {}", first.address, second.address);
    session.record(profile, &subject, &[first, second], &class, &label, |session| {
        let (forward, other) = transfer_both(session, first, second, bytes)?;
        backward = Some(other);
        Ok(forward)
    })?;
    session.record(profile, &subject, &[second, first], &class, &label, |session| match backward.take() {
        Some(outcome) => Ok(outcome),
        None => Ok(transfer_both(session, first, second, bytes)?.1),
    })?;
    Ok(())
}

fn transfer_both(
    session: &mut Session<'_>,
    first: &Unit,
    second: &Unit,
    bytes: u64,
) -> Result<(Outcome, Outcome), ProfileError> {
    let (model, store) = trivial_operator(session, bytes)?;
    let item = |unit: &Unit| Item {
        model: model.clone(),
        unit: unit.clone(),
        options: CompileOptions::default(),
        stores: vec![store.clone()],
        compare: None,
        keep: None,
    };
    let job = Job::Transfer { first: item(first), second: item(second), sampling: session.options.pair_sampling() };
    let limit = session.options.timeout;
    Ok(match session.call(&slot_name(first, second), &job, limit)? {
        Ok(Answer::Transferred { forward, backward }) => (ok(forward), ok(backward)),
        Ok(_) => (outcome_of(Err(unexpected())), outcome_of(Err(unexpected()))),
        Err(failure) => (outcome_of(Err(failure.clone())), outcome_of(Err(failure))),
    })
}

fn ok(total: Samples) -> Outcome {
    let timing = Timing { total: Some(total), ..Timing::default() };
    Outcome::Ok { timing, error_to_peak: None, nodes: Vec::new() }
}

/// A Relu over `bytes` of f32, in the cache, with a store that holds its input.
fn trivial_operator(session: &Session<'_>, bytes: u64) -> Result<(SubModel, PathBuf), ProfileError> {
    let folder = cache::transfer_path(&session.options.cache_dir);
    std::fs::create_dir_all(&folder).map_err(ProfileError::io("create", &folder))?;
    let info = |name: &str| TensorInfo::new(name, DataType::F32, [bytes / 4]);
    let path = folder.join(format!("relu-{bytes}.onnx"));
    if !path.exists() {
        ModelBuilder::new("transfer", 13)
            .input(&info("x"))
            .output(&info("y"))
            .node("Relu", &["x"], &["y"], &[])
            .save(&path)?;
    }
    let store = folder.join(format!("relu-{bytes}.tensors"));
    if !store.exists() {
        let mut writer = StoreWriter::create(&store)?;
        writer.push(&HostTensor::zeros(info("x")))?;
        writer.finish()?;
    }
    Ok((SubModel { path, inputs: vec![info("x")], outputs: vec![info("y")] }, store))
}

const CLASSES: [OperatorClass; 2] = [OperatorClass::Compute, OperatorClass::Memory];

/// How many slowdown records there will be at most.
pub(crate) fn slowdown_count(graph: &OperatorGraph, units: &[Unit]) -> usize {
    let classes = CLASSES.iter().filter(|&&class| graph.operators.iter().any(|o| o.class == class)).count();
    ordered_pairs(units).count() * classes * classes
}

fn ordered_pairs(units: &[Unit]) -> impl Iterator<Item = (&Unit, &Unit)> {
    units.iter().flat_map(move |slowed| {
        units.iter().filter(move |other| slowed.is_disjoint(other)).map(move |other| (slowed, other))
    })
}

/// Slowdown factors for every ordered pair of units that may run at once, by class of the slowed and of the interfering
/// operator. Each class is represented by the operator of it that takes longest on the unit.
pub(crate) fn slowdowns(
    session: &mut Session<'_>,
    profile: &mut Profile,
    graph: &OperatorGraph,
    units: &[Unit],
) -> Result<(), ProfileError> {
    if ordered_pairs(units).next().is_none() {
        session.note("co-run: every two units share a resource, so none ever run at once".to_owned());
    }
    for (slowed, interfering) in ordered_pairs(units) {
        for class in CLASSES {
            for interference in CLASSES {
                let (Some(mine), Some(theirs)) =
                    (typical(profile, graph, slowed, class), typical(profile, graph, interfering, interference))
                else {
                    continue;
                };
                let subject = Subject::Slowdown { class, interference };
                let label = format!("slowdown of {} by {}", slowed.address, interfering.address);
                let class = format!(
                    "{CLASS} {} {} {}",
                    session.options.class(),
                    signature(graph, mine),
                    signature(graph, theirs)
                );
                session.record(profile, &subject, &[slowed, interfering], &class, &label, |session| {
                    slowdown(session, graph, (mine, slowed), (theirs, interfering))
                })?;
            }
        }
        session.retire(&slot_name(slowed, interfering));
    }
    Ok(())
}

fn signature(graph: &OperatorGraph, id: OperatorId) -> &str {
    &graph.operator(id).signature.0
}

/// The operator of a class that takes longest alone on a unit.
fn typical(profile: &Profile, graph: &OperatorGraph, unit: &Unit, class: OperatorClass) -> Option<OperatorId> {
    let index = profile.index();
    let time = |id: OperatorId| {
        let subject = Subject::Operator { signature: graph.operator(id).signature.clone() };
        Some(index.newest(&subject, std::slice::from_ref(&unit.address))?.total()?.median)
    };
    graph
        .ids()
        .filter(|&id| graph.operator(id).class == class)
        .filter_map(|id| Some((id, time(id)?)))
        .max_by(|a, b| a.1.total_cmp(&b.1))
        .map(|(id, _)| id)
}

fn slowdown(
    session: &mut Session<'_>,
    graph: &OperatorGraph,
    slowed: (OperatorId, &Unit),
    interfering: (OperatorId, &Unit),
) -> Result<Outcome, ProfileError> {
    let mut items = Vec::new();
    for (id, unit) in [slowed, interfering] {
        let set = BTreeSet::from([id]);
        match session.extract(graph, &set) {
            Ok(extracted) => items.push(session.item(&extracted, unit, leniency_for(graph, &set, unit), false)),
            Err(failure) => return Ok(outcome_of(Err(failure))),
        }
    }
    let (Some(interfering_item), Some(slowed_item)) = (items.pop(), items.pop()) else {
        return Ok(outcome_of(Err(unexpected())));
    };
    let sampling = session.options.pair_sampling();
    let job = Job::Slowdown { slowed: slowed_item, interfering: interfering_item, sampling };
    let limit = session.options.timeout;
    Ok(match session.call(&slot_name(slowed.1, interfering.1), &job, limit)? {
        Ok(Answer::Slowed { factor }) => Outcome::Value { value: factor },
        Ok(_) => outcome_of(Err(unexpected())),
        Err(failure) => outcome_of(Err(failure)),
    })
}
