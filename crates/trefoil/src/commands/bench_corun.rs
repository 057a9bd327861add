//! `trefoil bench corun`: BIDENT's Observation 3 (2.3), three pairs of operators on every two units that can work at once; or the
//! same for pairs of models (3.1: each model pair on each unit pair). What is measured is kept for `trefoil run A B`.

use crate::cli::BenchCorunArgs;
use crate::commands::bench_operators::{available_units, seven_operators};
use crate::context::{self, ProgressLine, print, print_json, width};
use crate::error::CliError;
use crate::several::{self, Question, Reading, Ready, candidate_units, corun_class, corun_ms, make_ready};
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;
use trefoil_core::{Conditions, Measurement, OperatorClass, Samples, Subject, Unit, UnitAddress, UnitKind};
use trefoil_plan::{PlanOptions, together};
use trefoil_profile::{CoRunning, CoRuns, append_measurements};
use trefoil_report::{TableFormat, format};
use trefoil_run::RunSampling;
use trefoil_run::together::{SlowdownReport, slowdown};

/// The paper's pairs, and the speed-up that it published for the best placement (GPU beside CPU of a Lunar Lake).
const PAIRS: [(&str, &str, &str, f64); 3] =
    [("P1", "MatMul", "Conv2D", 1.41), ("P2", "MatMul", "CumSum", 1.38), ("P3", "Conv2D", "DWConv", 1.46)];

/// Two models on two units.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Placement {
    /// Unit of the first and of the second.
    units: [UnitAddress; 2],
    /// Milliseconds of each alone there.
    alone_ms: [f64; 2],
    /// Time beside the other, which runs again and again, over time alone.
    slowdown: [Samples; 2],
    /// Milliseconds from starting both at one moment until both have ended.
    together_ms: Samples,
    /// Time of both one after the other on the best single unit over `together_ms`.
    speed_up: f64,
    /// Whether a factor varied by more than 30 % from batch to batch, also when measured again.
    noisy: bool,
}

/// Two models on all placements.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Pair {
    name: String,
    models: [String; 2],
    classes: [Option<OperatorClass>; 2],
    /// Best single unit for one after the other, and its milliseconds.
    serial: Option<(UnitAddress, f64)>,
    placements: Vec<Placement>,
    /// Published speed-up of the paper's best placement.
    published: Option<f64>,
    /// Placements that failed.
    failures: Vec<String>,
}

/// Runs the command.
pub fn run(args: &BenchCorunArgs) -> Result<(), CliError> {
    if args.models.len() == 1 {
        return Err(CliError::Usage("one model has nothing to run beside; name a second one, or none".to_owned()));
    }
    context::check_outputs(&[args.output.as_deref()], &args.models)?;
    let asked = if args.units.is_empty() { available_units() } else { args.units.clone() };
    let (_, units) = candidate_units(&asked)?;
    let placements = placements(&units);
    if placements.is_empty() {
        let names: Vec<_> = units.iter().map(|unit| unit.address.to_string()).collect();
        return Err(CliError::Usage(format!("no two of {} can work at once: they share resources", names.join(", "))));
    }
    let folder = tempfile::tempdir().map_err(|source| CliError::File {
        action: "create",
        path: std::env::temp_dir(),
        source,
    })?;
    let paths = if args.models.is_empty() { operators(folder.path())? } else { args.models.clone() };
    let shapes = crate::shapes::of_models(&paths, &args.shapes)?;
    let reading = Reading {
        granularity: crate::cli::GranularityArg::Fused,
        cache: args.cache.as_deref(),
        measure: &args.measure,
        strict: false,
        quiet: args.json,
        log: false,
    };
    let ready = make_ready(&paths, &shapes, &asked, &reading)?;
    let question = question(args, &asked, &units);
    let mut bench = Bench { ready: &ready, question: &question, units: &units, alone: BTreeMap::new() };
    let mut log = CoRuns::open(&question.cache, trefoil_units::machine())?;
    let (mut pairs, mut kept): (Vec<Pair>, Vec<Measurement>) = (Vec::new(), Vec::new());
    let line = ProgressLine::new("bench corun", args.json);
    for (name, which, published) in wanted(&ready, args.models.is_empty()) {
        match bench.pair(name, which, published, &placements, &mut log, &mut kept, &line) {
            Ok(pair) => pairs.push(pair),
            Err(_) if context::stop_flag().load(Ordering::SeqCst) => break,
            Err(error) => return Err(error),
        }
        if context::stop_flag().load(Ordering::SeqCst) {
            break;
        }
    }
    drop(line);
    if let Some(path) = &args.output {
        append_measurements(path, &kept)?;
    }
    if args.json {
        return print_json(&json!({
            "pairs": pairs,
            "origin": "measured",
            "measurements": kept.len(),
            "machine": trefoil_units::machine(),
        }));
    }
    print(&describe(&pairs, args, kept.len()))
}

fn question(args: &BenchCorunArgs, asked: &[UnitAddress], units: &[Unit]) -> Question {
    Question {
        method: "auto".to_owned(),
        options: PlanOptions::default(),
        given: None,
        asked: asked.to_vec(),
        units: units.to_vec(),
        baseline_units: units.to_vec(),
        items: 1,
        energy: false,
        arrivals: None,
        duration: Duration::ZERO,
        rounds: 1,
        sampling: RunSampling::default(),
        give_up: None,
        measure: args.measure.clone(),
        cache: context::cache_dir(args.cache.as_deref()),
        strict: false,
        quiet: args.json,
    }
}

/// The operators of the paper's pairs as models of their own.
fn operators(folder: &std::path::Path) -> Result<Vec<PathBuf>, CliError> {
    let named = |name: &&str| PAIRS.iter().any(|pair| pair.1 == *name || pair.2 == *name);
    let mut paths = Vec::new();
    for (name, _, model) in seven_operators().into_iter().filter(|(name, ..)| named(name)) {
        let path = folder.join(format!("{name}.onnx"));
        model.save(&path)?;
        paths.push(path);
    }
    Ok(paths)
}

/// Name, models and published speed-up of every pair.
fn wanted(ready: &[Ready], operators: bool) -> Vec<(String, [usize; 2], Option<f64>)> {
    if operators {
        let find = |name: &str| ready.iter().position(|model| model.name == name);
        let pair = |&(name, first, second, published): &(&str, &str, &str, f64)| {
            Some((format!("{name}: {first} ‖ {second}"), [find(first)?, find(second)?], Some(published)))
        };
        return PAIRS.iter().filter_map(pair).collect();
    }
    let mut pairs = Vec::new();
    for first in 0..ready.len() {
        for second in first + 1..ready.len() {
            pairs.push((format!("{} ‖ {}", ready[first].name, ready[second].name), [first, second], None));
        }
    }
    pairs
}

/// Ordered pairs of units that share nothing; cores are taken to be alike, so that one pair stands for all of its kind.
fn placements(units: &[Unit]) -> Vec<[usize; 2]> {
    let kind = |unit: &Unit| {
        let alike = unit.kind == UnitKind::Cpu;
        let cores = if alike { Vec::new() } else { unit.address.cores.clone() };
        (unit.address.backend.clone(), unit.address.device.clone(), unit.address.precision, unit.resources.len(), cores)
    };
    let mut found: Vec<[usize; 2]> = Vec::new();
    for first in 0..units.len() {
        for second in 0..units.len() {
            let key = [kind(&units[first]), kind(&units[second])];
            let known = found.iter().any(|&[one, other]| [kind(&units[one]), kind(&units[other])] == key);
            if units[first].is_disjoint(&units[second]) && !known {
                found.push([first, second]);
            }
        }
    }
    found
}

struct Bench<'a> {
    ready: &'a [Ready],
    question: &'a Question,
    units: &'a [Unit],
    /// Milliseconds of a model alone on a unit, measured in this invocation.
    alone: BTreeMap<(usize, usize), Option<f64>>,
}

impl Bench<'_> {
    #[allow(clippy::too_many_arguments)] // where it goes and what it is about
    fn pair(
        &mut self,
        name: String,
        which: [usize; 2],
        published: Option<f64>,
        placements: &[[usize; 2]],
        log: &mut CoRuns,
        kept: &mut Vec<Measurement>,
        line: &ProgressLine,
    ) -> Result<Pair, CliError> {
        let (mut found, mut failures) = (Vec::new(), Vec::new());
        for &placement in placements {
            let units = placement.map(|unit| self.units[unit].address.clone());
            line.step(&format!("{name} on {} and {}", units[0], units[1]));
            match self.measure(&which, &placement) {
                Ok(report) => {
                    kept.extend(self.keep(log, which, placement, &report)?);
                    for (model, unit) in which.into_iter().zip(placement) {
                        let ms = report.alone_ms[usize::from(model != which[0])];
                        self.alone.entry((model, unit)).or_insert(Some(ms));
                    }
                    found.push((units, report));
                }
                Err(CliError::Run(error @ trefoil_run::RunError::Worker { .. })) => {
                    if context::stop_flag().load(Ordering::SeqCst) {
                        return Err(error.into());
                    }
                    failures.push(error.to_string());
                }
                Err(error @ CliError::Plan(_)) => failures.push(format!("{} and {}: {error}", units[0], units[1])),
                Err(error) => return Err(error),
            }
        }
        let serial = self.serial(which)?;
        let serial_ms = serial.as_ref().map_or(0.0, |(_, ms)| *ms);
        let placements = found.into_iter().map(|(units, report)| Placement {
            units,
            alone_ms: [report.alone_ms[0], report.alone_ms[1]],
            slowdown: [report.factors[0], report.factors[1]],
            speed_up: serial_ms / report.together_ms.median,
            noisy: report.is_noisy(),
            together_ms: report.together_ms,
        });
        let class = |model: usize| {
            let operators = &self.ready[model].graph.operators;
            if operators.len() == 1 { operators.first().map(|operator| operator.class) } else { None }
        };
        Ok(Pair {
            name,
            models: which.map(|model| self.ready[model].name.clone()),
            classes: which.map(class),
            serial,
            placements: placements.collect(),
            published,
            failures,
        })
    }

    /// Measures models on units of their own; a noisy result is taken again once, and the calmer one stands.
    fn measure(&self, which: &[usize], units: &[usize]) -> Result<SlowdownReport, CliError> {
        let request = several::request(self.ready, which, self.units, 1);
        let plan = together::on_units(&request, units)?;
        let probe = several::entrant(self.ready, which, "co-run", plan, false, false)?;
        let (graphs, stores) = (several::graphs(self.ready, which), several::stores(self.ready, which));
        let options = several::contest_options(self.question)?;
        let ms = corun_ms(self.question);
        let first = slowdown(&probe, &graphs, &stores, ms, &options)?;
        if !first.is_noisy() {
            return Ok(first);
        }
        let second = slowdown(&probe, &graphs, &stores, ms, &options)?;
        Ok(if second.worst_spread() < first.worst_spread() { second } else { first })
    }

    /// Keeps both factors in the cache, for whoever plans these models together.
    fn keep(
        &self,
        log: &mut CoRuns,
        which: [usize; 2],
        placement: [usize; 2],
        report: &SlowdownReport,
    ) -> Result<Vec<Measurement>, CliError> {
        let subjects = which.map(|model| Subject::WholeModel { model: self.ready[model].graph.fingerprint.clone() });
        let running = [0, 1].map(|at| CoRunning { subject: &subjects[at], unit: &self.units[placement[at]] });
        let ms = corun_ms(self.question);
        let conditions = Conditions {
            warmup: 3,
            runs: (report.executions / 2) as u32,
            cap_ms: Some(ms),
            load: None,
            denormals_flushed: true,
            fresh_process: true,
        };
        let class = corun_class(ms);
        let mut kept = Vec::new();
        for at in 0..2 {
            kept.push(log.put(running[at], &[running[1 - at]], &class, report.factors[at], &conditions)?);
        }
        Ok(kept)
    }

    /// The best single unit for one after the other, from times taken in this invocation.
    fn serial(&mut self, which: [usize; 2]) -> Result<Option<(UnitAddress, f64)>, CliError> {
        let mut best: Option<(UnitAddress, f64)> = None;
        for unit in 0..self.units.len() {
            let mut sum = Some(0.0);
            for model in which {
                if !self.alone.contains_key(&(model, unit)) {
                    let ms = match self.measure(&[model], &[unit]) {
                        Ok(report) => report.alone_ms.first().copied(),
                        Err(CliError::Plan(_) | CliError::Run(trefoil_run::RunError::Worker { .. })) => None,
                        Err(error) => return Err(error),
                    };
                    self.alone.insert((model, unit), ms);
                }
                sum = sum.zip(self.alone[&(model, unit)]).map(|(sum, ms)| sum + ms);
            }
            if let Some(sum) = sum.filter(|sum| best.as_ref().is_none_or(|(_, least)| sum < least)) {
                best = Some((self.units[unit].address.clone(), sum));
            }
        }
        Ok(best)
    }
}

fn describe(pairs: &[Pair], args: &BenchCorunArgs, kept: usize) -> String {
    let machine = trefoil_units::machine();
    let versions: Vec<_> = machine.versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
    let mut text = format!("{}, {} core(s); {}\n", machine.cpu, machine.cores.len(), versions.join(", "));
    for pair in pairs {
        let classed = |at: usize| match pair.classes[at] {
            Some(class) => format!("{} ({})", pair.models[at], format!("{class:?}").to_lowercase()),
            None => pair.models[at].clone(),
        };
        let headings = [
            format!("{} on", classed(0)),
            format!("{} on", classed(1)),
            ">first alone".to_owned(),
            ">second alone".to_owned(),
            ">both at once".to_owned(),
            ">first slowed".to_owned(),
            ">second slowed".to_owned(),
            ">speed-up".to_owned(),
            "noise".to_owned(),
        ];
        let best = pair.placements.iter().map(|placement| placement.speed_up).fold(0.0, f64::max);
        let factor = |samples: &Samples| {
            format!("{} ({})", format::ratio(samples.median), format::interval(samples.p10, samples.p90))
        };
        let rows = pair.placements.iter().map(|placement| {
            let cells = [
                placement.units[0].to_string(),
                placement.units[1].to_string(),
                format::time(placement.alone_ms[0]),
                format::time(placement.alone_ms[1]),
                format::time(placement.together_ms.median),
                factor(&placement.slowdown[0]),
                factor(&placement.slowdown[1]),
                format::ratio(placement.speed_up),
                if placement.noisy { "noisy" } else { "" }.to_owned(),
            ];
            let strong = placement.speed_up >= best;
            cells.into_iter().map(|cell| (cell, strong)).collect()
        });
        text.push('\n');
        text += &trefoil_report::text_table(&format!("{} (measured)", pair.name), &headings, rows.collect())
            .render(TableFormat::Text, width());
        if let Some((unit, ms)) = &pair.serial {
            let _ = writeln!(text, "best single unit, one after the other: {unit}, {} (measured)", format::time(*ms));
        }
        if let Some(published) = pair.published {
            let _ = writeln!(
                text,
                "the paper's best placement, GPU beside CPU of a Lunar Lake: {} (published)",
                format::ratio(published)
            );
        }
        for failure in &pair.failures {
            let _ = writeln!(text, "failed: {failure}");
        }
    }
    let _ = writeln!(text, "\n{} kept for `trefoil run` in the cache", format::plural(kept, "slowdown factor"));
    if let Some(path) = &args.output {
        let _ = writeln!(text, "appended to {}", path.display());
    }
    text
}
