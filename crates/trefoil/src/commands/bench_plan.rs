//! `trefoil bench plan`: how good and how fast planning is.

use crate::cli::{BenchPlanArgs, now_ms};
use crate::context::{self, ProgressLine, print, print_json};
use crate::error::CliError;
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use trefoil_core::Profile;
use trefoil_plan::contest::{Arena, Contender};
use trefoil_plan::generate::{GraphSpec, Shape, instance, suite};
use trefoil_plan::{Budget, Clock, PairCosts, PlanOptions, PlanRequest, joint_dp};
use trefoil_report::{TableFormat, format};

/// Milliseconds that `dag` may search on each graph.
const SEARCH_MS: f64 = 250.0;
const QUICK_SEARCH_MS: f64 = 60.0;

/// One graph.
#[derive(Debug, Serialize)]
struct Graph {
    name: String,
    family: String,
    operators: usize,
    units: usize,
    /// Best known lower bound, or the optimum.
    reference_ms: f64,
    /// Whether the reference is the optimum.
    optimum_known: bool,
    /// Relative distance of BIDENT's sequential plan to the optimum of its own model.
    sequential_own_gap: f64,
    /// Per contender: relative distance of its makespan to the reference, and the milliseconds it planned for.
    contenders: BTreeMap<String, Entry>,
}

#[derive(Debug, Serialize)]
struct Entry {
    gap: f64,
    planned_ms: f64,
}

/// A timing of planning itself.
#[derive(Debug, Serialize)]
struct Speed {
    what: String,
    median_ms: f64,
    /// What DESIGN or the issue asks for, in milliseconds.
    asked_ms: Option<f64>,
    runs: usize,
}

/// Runs the command.
pub fn run(args: &BenchPlanArgs) -> Result<(), CliError> {
    let line = ProgressLine::new("bench plan", args.json);
    let search_ms = if args.quick { QUICK_SEARCH_MS } else { SEARCH_MS };
    let mut graphs = Vec::new();
    for spec in suite(args.quick) {
        line.step(&spec.to_string());
        let made = instance(&spec);
        let family = family(&spec);
        graphs.push(quality(&spec.to_string(), &family, &PlanRequest::new(&made.profile, &made.graph), search_ms)?);
    }
    if let Some(folder) = &args.profiles {
        for (name, profile) in profiles(folder)? {
            line.step(&name);
            for graph in &profile.models {
                graphs.push(quality(&name, "profiles", &PlanRequest::new(&profile, graph), search_ms)?);
            }
        }
    }
    let speeds = speeds(args.quick, &line)?;
    let anytime = anytime(args.quick, &line)?;
    drop(line);
    let machine = trefoil_units::machine();
    if args.json {
        return print_json(&json!({
            "machine": machine,
            "origin": { "times": "measured", "graphs": "simulated" },
            "search_ms": search_ms,
            "quality": families(&graphs),
            "graphs": graphs,
            "speed": speeds,
            "anytime": anytime,
        }));
    }
    let mut text = format!(
        "{}, {} core(s) allowed, one used; trefoil {}\n",
        machine.cpu,
        machine.cores.len(),
        env!("CARGO_PKG_VERSION")
    );
    let _ = writeln!(
        text,
        "{} graphs (costs simulated), `dag` with {search_ms} ms each; gap = makespan over the optimum where it is known, else over a lower bound. The optimum is known where somebody's plan meets \
         the bound, or `dag` searched everything (small graphs: there its gap is 0 by construction)",
        graphs.len()
    );
    text += &quality_table(&graphs);
    text += &speed_table(&speeds);
    let _ = writeln!(text, "{}", anytime.describe());
    print(&text)
}

fn family(spec: &GraphSpec) -> String {
    let size = match spec.operators {
        0..=8 => "up to 8",
        9..=100 => "up to 100",
        101..=600 => "up to 600",
        601..=5_000 => "up to 5,000",
        _ => "above 5,000",
    };
    format!("{}, {size}", spec.shape)
}

/// Every profile of a folder, by name.
fn profiles(folder: &Path) -> Result<Vec<(String, Profile)>, CliError> {
    let fail = |source| CliError::File { action: "read", path: folder.to_owned(), source };
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        if path.extension().is_some_and(|extension| extension == "json") {
            paths.push(path);
        }
    }
    paths.sort();
    paths.into_iter().map(|path| Ok((path.display().to_string(), trefoil_profile::load_profile(&path)?))).collect()
}

fn quality(name: &str, family: &str, request: &PlanRequest<'_>, search_ms: f64) -> Result<Graph, CliError> {
    let arena = Arena::new(request)?;
    let mut makespans: Vec<(Contender, f64, f64)> = Vec::new();
    let mut optimum: Option<f64> = None;
    for contender in Contender::ALL {
        let start = now_ms();
        let clock = Clock { now_ms, end_ms: start + search_ms };
        let options = PlanOptions { budget: Budget::Until(clock), ..PlanOptions::default() };
        let reached = arena.run(contender, &options)?;
        let planned = now_ms() - start;
        if let Some(reached) = reached {
            makespans.push((contender, reached.makespan_ms, planned));
            if reached.exact {
                optimum = Some(optimum.map_or(reached.makespan_ms, |known| known.min(reached.makespan_ms)));
            }
        }
    }
    let reference_ms = optimum.unwrap_or(arena.bound.value);
    let over = |value: f64, reference: f64| {
        if reference > 0.0 { (value / reference - 1.0).max(0.0) } else { 0.0 }
    };
    let own = trefoil_plan::plan("sequential", request)?;
    let proven = trefoil_plan::certificate(std::slice::from_ref(request), &own)?.bound.map_or(0.0, |bound| bound.value);
    Ok(Graph {
        name: name.to_owned(),
        family: family.to_owned(),
        operators: arena.operators(),
        units: arena.units(),
        reference_ms,
        optimum_known: optimum.is_some(),
        sequential_own_gap: over(own.claimed, proven),
        contenders: makespans
            .into_iter()
            .map(|(contender, makespan, planned_ms)| {
                (contender.to_string(), Entry { gap: over(makespan, reference_ms), planned_ms })
            })
            .collect(),
    })
}

/// Mean and largest gap of some graphs.
#[derive(Debug, Clone, Copy, Default, Serialize)]
struct Gaps {
    graphs: usize,
    mean: f64,
    largest: f64,
}

impl Gaps {
    fn of(gaps: impl Iterator<Item = f64>) -> Self {
        let mut sum = Self::default();
        for gap in gaps {
            sum.graphs += 1;
            sum.mean += gap;
            sum.largest = sum.largest.max(gap);
        }
        sum.mean /= sum.graphs.max(1) as f64;
        sum
    }

    fn text(self) -> String {
        if self.graphs == 0 {
            return format::ABSENT.to_owned();
        }
        format!("{:.2}% ({:.1}%)", self.mean * 100.0, self.largest * 100.0)
    }
}

/// A line of the quality table.
#[derive(Debug, Serialize)]
struct Family {
    /// Name in JSON: `family`.
    #[serde(rename = "family")]
    name: String,
    graphs: usize,
    optimum_known: usize,
    sequential_own: Gaps,
    contenders: BTreeMap<String, Gaps>,
    dag_planned_ms: f64,
}

fn families(graphs: &[Graph]) -> Vec<Family> {
    let line = |name: &str, members: &[&Graph]| {
        let contenders = Contender::ALL.iter().map(|contender| {
            let name = contender.to_string();
            let gaps = Gaps::of(members.iter().filter_map(|graph| graph.contenders.get(&name)).map(|entry| entry.gap));
            (name, gaps)
        });
        let planned = members.iter().filter_map(|graph| graph.contenders.get("dag")).map(|entry| entry.planned_ms);
        Family {
            name: name.to_owned(),
            graphs: members.len(),
            optimum_known: members.iter().filter(|graph| graph.optimum_known).count(),
            sequential_own: Gaps::of(members.iter().map(|graph| graph.sequential_own_gap)),
            contenders: contenders.collect(),
            dag_planned_ms: planned.sum::<f64>() / members.len().max(1) as f64,
        }
    };
    let mut names: Vec<&str> = Vec::new();
    for graph in graphs {
        if !names.contains(&graph.family.as_str()) {
            names.push(&graph.family);
        }
    }
    let mut lines: Vec<Family> = names
        .into_iter()
        .map(|name| line(name, &graphs.iter().filter(|graph| graph.family == name).collect::<Vec<_>>()))
        .collect();
    let known: Vec<&Graph> = graphs.iter().filter(|graph| graph.optimum_known).collect();
    let unknown: Vec<&Graph> = graphs.iter().filter(|graph| !graph.optimum_known).collect();
    lines.push(line("all, to the optimum", &known));
    lines.push(line("all, to a bound", &unknown));
    lines
}

fn quality_table(graphs: &[Graph]) -> String {
    let mut headings = ["graphs", ">how many", ">optimum known", ">sequential, own model"].map(str::to_owned).to_vec();
    headings.extend(Contender::ALL.iter().map(|contender| format!(">{contender}")));
    headings.push(">dag's time (measured)".to_owned());
    let rows =
        families(graphs)
            .into_iter()
            .map(|family| {
                let mut cells = vec![
                    family.name,
                    family.graphs.to_string(),
                    family.optimum_known.to_string(),
                    family.sequential_own.text(),
                ];
                cells.extend(Contender::ALL.iter().map(|contender| {
                    family.contenders.get(&contender.to_string()).copied().unwrap_or_default().text()
                }));
                cells.push(format::time(family.dag_planned_ms));
                cells.into_iter().map(|cell| (cell, false)).collect()
            })
            .collect();
    let title = "Gap of makespans, mean (largest); graphs simulated";
    format!("\n{}", trefoil_report::text_table(title, &headings, rows).render(TableFormat::Text, context::width()))
}

fn speed_table(speeds: &[Speed]) -> String {
    let headings = ["planning", ">time (measured)", ">asked for", ">runs"].map(str::to_owned);
    let rows = speeds
        .iter()
        .map(|speed| {
            let asked =
                speed.asked_ms.map_or_else(|| format::ABSENT.to_owned(), |ms| format!("≤ {}", format::time(ms)));
            let cells = [speed.what.clone(), format::time(speed.median_ms), asked, speed.runs.to_string()];
            cells.into_iter().map(|cell| (cell, false)).collect()
        })
        .collect();
    let title = "Planning speed, one core, median";
    format!("\n{}", trefoil_report::text_table(title, &headings, rows).render(TableFormat::Text, context::width()))
}

/// Median milliseconds of some runs.
fn median(runs: usize, mut body: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..runs)
        .map(|_| {
            let start = std::time::Instant::now();
            body();
            start.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    trefoil_core::Samples::from_values(&mut times).map_or(0.0, |samples| samples.median)
}

fn chain(operators: usize, units: usize) -> trefoil_plan::generate::Instance {
    instance(&GraphSpec { shape: Shape::Chain, operators, units, slowdown: 0.0, seed: 17 })
}

fn speeds(quick: bool, line: &ProgressLine) -> Result<Vec<Speed>, CliError> {
    let mut speeds = Vec::new();
    let mut numbers = trefoil_plan::testing::Numbers(3);
    for (operators, asked) in [(4_595, 0.05), (24_917, 1.0)] {
        line.step(&format!("sequential, {operators} operators"));
        let mut table = || -> Vec<f64> { numbers.by_ref().take(operators * 3).collect() };
        let (w, h2d, d2h) = (table(), table(), table());
        let time = median(if quick { 20 } else { 200 }, || {
            std::hint::black_box(trefoil_plan::sequential_dp(&w, &h2d, &d2h, &[false, true, true], 3));
        });
        speeds.push(Speed {
            what: format!("sequential (recurrence), {operators} × 3"),
            median_ms: time,
            asked_ms: Some(asked),
            runs: if quick { 20 } else { 200 },
        });
    }
    let mut table = |operators: usize| -> Vec<f64> { numbers.by_ref().take(operators * 3).collect() };
    for (first, second, asked) in [(500, 500, 20.0), (4_595, 500, 200.0)] {
        line.step(&format!("joint, {first} and {second} operators"));
        let (w0, c0, w1, c1) = (table(first), table(first), table(second), table(second));
        let runs = if quick { 3 } else { 20 };
        let time = median(runs, || {
            let one = PairCosts { solo: &w0, concurrent: &c0 };
            std::hint::black_box(joint_dp(one, PairCosts { solo: &w1, concurrent: &c1 }, 3));
        });
        speeds.push(Speed {
            what: format!("joint (recurrence), {first} × {second} × 3"),
            median_ms: time,
            asked_ms: Some(asked),
            runs,
        });
    }
    for (method, operators) in [("sequential", 4_595), ("interval", 600), ("interval", 4_595)] {
        line.step(&format!("{method}, {operators} operators"));
        let made = chain(operators, 3);
        let request = PlanRequest::new(&made.profile, &made.graph);
        let mut failed = None;
        let runs = if quick { 1 } else { 5 };
        let time = median(runs, || failed = trefoil_plan::plan(method, &request).err());
        if let Some(error) = failed {
            return Err(error.into());
        }
        let what = format!("{method} from a profile to a plan, chain of {operators} × 3");
        speeds.push(Speed { what, median_ms: time, asked_ms: None, runs });
    }
    Ok(speeds)
}

/// How near an anytime search is to a long one after a second.
#[derive(Debug, Serialize)]
struct Anytime {
    operators: usize,
    units: usize,
    short_s: f64,
    long_s: f64,
    short_ms: f64,
    long_ms: f64,
    bound_ms: f64,
}

impl Anytime {
    fn describe(&self) -> String {
        format!(
            "dag on {} operators × {} units (simulated): {:.3} ms after {} s, {:.3} ms after {} s ({:+.2}%); lower bound {:.3} ms",
            self.operators,
            self.units,
            self.short_ms,
            self.short_s,
            self.long_ms,
            self.long_s,
            100.0 * (self.short_ms / self.long_ms - 1.0),
            self.bound_ms
        )
    }
}

fn anytime(quick: bool, line: &ProgressLine) -> Result<Anytime, CliError> {
    let (operators, long_s) = if quick { (600, 4.0) } else { (5_000, 60.0) };
    let spec = GraphSpec { shape: Shape::SeriesParallel, operators, units: 3, slowdown: 1.2, seed: 23 };
    let made = instance(&spec);
    let arena = Arena::new(&PlanRequest::new(&made.profile, &made.graph))?;
    let search = |seconds: f64| -> Result<f64, CliError> {
        line.step(&format!("dag, {operators} operators, {seconds} s"));
        let clock = Clock { now_ms, end_ms: now_ms() + seconds * 1e3 };
        let options = PlanOptions { budget: Budget::Until(clock), ..PlanOptions::default() };
        Ok(arena.run(Contender::Dag, &options)?.map_or(f64::NAN, |reached| reached.makespan_ms))
    };
    Ok(Anytime {
        operators,
        units: spec.units,
        short_s: 1.0,
        long_s,
        short_ms: search(1.0)?,
        long_ms: search(long_s)?,
        bound_ms: arena.bound.value,
    })
}
