//! Profiles a model on every available CPU backend, one core each, and prints what was found.
//!
//! `cargo run --release -p trefoil-profile --example profile_model -- MODEL.onnx [UNIT…] [--full] [--fresh] [--corun] [--refine SECONDS] [-o P.json]`
//!
//! The worker is `trefoil-worker` beside this program unless `TREFOIL_WORKER` names another.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use trefoil_core::{Granularity, Outcome, Profile, Subject, UnitAddress};
use trefoil_plan::PlanRequest;
use trefoil_profile::{Launcher, PrepareOptions, PreparedModel, ProfileOptions, prepare_model, profile, save_profile};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn launcher() -> Result<Launcher, Box<dyn std::error::Error>> {
    if std::env::var_os(trefoil_profile::WORKER_VARIABLE).is_some() {
        return Ok(Launcher::discover()?);
    }
    let here = std::env::current_exe()?;
    let folder = here.parent().and_then(std::path::Path::parent).ok_or("this program has no folder")?;
    Ok(Launcher::new(folder.join("trefoil-worker"), Vec::new()))
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let (mut model, mut addresses, mut full, mut fresh, mut output) = (None, Vec::new(), false, false, None);
    let (mut granularity, mut corun, mut refine) = (Granularity::Fused, false, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--full" => full = true,
            "--fresh" => fresh = true,
            "--corun" => corun = true,
            "--refine" => refine = arguments.next().map(|text| text.parse::<f64>()).transpose()?,
            "--node" => granularity = Granularity::Node,
            "--backend" => granularity = Granularity::Backend,
            "-o" => output = arguments.next().map(PathBuf::from),
            text if model.is_none() => model = Some(PathBuf::from(text)),
            text => addresses.push(text.parse::<UnitAddress>()?),
        }
    }
    let model = model.ok_or("give a model file")?;
    let cache = trefoil_profile::cache::default_cache_dir();
    let stop = AtomicBool::new(false);
    let launcher = launcher()?;
    let began = std::time::Instant::now();
    let prepared = prepare_model(&model, &PrepareOptions::new(launcher.clone(), cache.clone()), &stop)?;
    println!("prepared in {:.1} s; reference {}", began.elapsed().as_secs_f64(), prepared.reference.description);
    for note in &prepared.reference.notes {
        println!("  {note}");
    }
    if addresses.is_empty() {
        let core = trefoil_units::allowed_cores()[0];
        addresses =
            ["openvino", "ort", "rten"].map(|backend| UnitAddress::new(backend, "CPU").with_cores([core])).into();
    }
    let mut units = Vec::new();
    for address in &addresses {
        match trefoil_units::resolve(address) {
            Ok(unit) => units.push(unit),
            Err(error) => println!("left out: {error}"),
        }
    }
    let options = if full { ProfileOptions::new(launcher, cache) } else { ProfileOptions::quick(launcher, cache) };
    let options = ProfileOptions { granularity, fresh, corun, ..options };
    let began = std::time::Instant::now();
    let mut profile = profile(&prepared, &units, &options, &mut |_| {}, &stop)?;
    if let Some(seconds) = refine {
        refine_plan(&prepared, &mut profile, &options, seconds)?;
    }
    let graph = profile.model(None)?;
    println!(
        "{}: {} operators, {} distinct, {} records in {:.1} s",
        graph.model,
        graph.len(),
        graph.distinct(),
        profile.measurements.len(),
        began.elapsed().as_secs_f64()
    );
    for note in &profile.notes {
        println!("  note: {note}");
    }
    for measurement in &profile.measurements {
        let units: Vec<_> = measurement.units.iter().map(ToString::to_string).collect();
        match (&measurement.subject, &measurement.outcome) {
            (Subject::WholeModel { .. }, Outcome::Ok { timing, error_to_peak, nodes }) => {
                let total = timing.total.map_or(f64::NAN, |total| total.median);
                let nodes_ms = nodes.iter().fold(0.0, |sum, node| sum + node.ms);
                let matched = nodes.iter().filter(|node| !node.operators.is_empty()).count();
                println!(
                    "  whole {}: {total:.4} ms, error {error_to_peak:?}, {} nodes ({matched} matched) {nodes_ms:.4} ms",
                    units.join(" "),
                    nodes.len()
                );
            }
            (Subject::Transfer { bytes }, Outcome::Ok { timing, .. }) => {
                let total = timing.total.map_or(f64::NAN, |total| total.median);
                println!("  transfer {bytes} {}: {total:.5} ms", units.join(" → "));
            }
            (Subject::Slowdown { .. }, Outcome::Value { value }) => {
                println!("  {} {}: {:.3}", measurement.subject.key(), units.join(" by "), value.median);
            }
            _ => {}
        }
        if let Some(failure) = measurement.failure() {
            let kind = match &measurement.subject {
                Subject::Operator { signature } => graph
                    .operators
                    .iter()
                    .find(|operator| operator.signature == *signature)
                    .map_or_else(String::new, |operator| format!("{} {}", operator.kind, operator.name)),
                other => other.key(),
            };
            println!("  {} {kind}: {failure}", units.join(" "));
        }
    }
    for unit in &profile.units {
        let index = profile.index();
        let times: Option<Vec<f64>> = graph
            .operators
            .iter()
            .map(|operator| {
                let subject = Subject::Operator { signature: operator.signature.clone() };
                Some(index.newest(&subject, std::slice::from_ref(&unit.address))?.total()?.median)
            })
            .collect();
        match times {
            Some(times) => println!("  sum of operators {}: {:.4} ms", unit.address, times.iter().sum::<f64>()),
            None => println!("  sum of operators {}: some do not run", unit.address),
        }
    }
    if let Some(path) = output {
        save_profile(&profile, &path)?;
    }
    Ok(())
}

fn refine_plan(
    prepared: &PreparedModel,
    profile: &mut Profile,
    options: &ProfileOptions,
    seconds: f64,
) -> Result<(), Box<dyn std::error::Error>> {
    let graph = profile.model(None)?.clone();
    let budget = std::time::Duration::from_secs_f64(seconds);
    let mut propose = |profile: &Profile| trefoil_plan::plan("interval", &PlanRequest::new(profile, &graph));
    let stop = AtomicBool::new(false);
    let refinement =
        trefoil_profile::refine(prepared, &graph, profile, options, budget, &mut propose, None, &mut |_| {}, &stop)?;
    println!(
        "refined: finished {}, {} rounds, {} segments measured, lower bounds {}, claimed {:.4} ms in {} segments",
        refinement.finished,
        refinement.rounds.len(),
        refinement.measured,
        refinement.estimates_were_lower_bounds,
        refinement.plan.claimed,
        refinement.plan.segments.len()
    );
    for (number, round) in refinement.rounds.iter().enumerate() {
        println!("  round {number}: claimed {:.4} in {} segments", round.claimed, round.segments);
        for audit in &round.measured {
            let failure = audit.failure.as_deref().unwrap_or("");
            println!(
                "    {} operators on {}: predicted {:.4}, measured {:.4?} {failure}",
                audit.operators, audit.unit, audit.predicted_ms, audit.measured_ms
            );
        }
    }
    for segment in &refinement.plan.segments {
        println!("  {} operators on {}: {:.4} ms", segment.operators.len(), segment.unit, segment.cost.ms);
    }
    Ok(())
}
