//! `trefoil bench plan`: how good and how fast planning is.

mod speed;

use crate::cli::{BenchPlanArgs, now_ms};
use crate::context::{self, ProgressLine, print, print_json};
use crate::error::CliError;
use serde::{Deserialize, Serialize};
use serde_json::json;
use speed::{anytime, budget_table, budgets, speed_table, speeds};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use trefoil_core::Profile;
use trefoil_plan::contest::{Arena, Contender};
use trefoil_plan::generate::{GraphSpec, instance, suite};
use trefoil_plan::{Budget, Clock, PlanOptions, PlanRequest};
use trefoil_report::{TableFormat, format};

/// Milliseconds that `dag` may search on each graph.
const SEARCH_MS: f64 = 250.0;
const QUICK_SEARCH_MS: f64 = 60.0;

/// One graph.
#[derive(Debug, Serialize, Deserialize)]
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

#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    gap: f64,
    planned_ms: f64,
}

/// Runs the command.
pub fn run(args: &BenchPlanArgs) -> Result<(), CliError> {
    let line = ProgressLine::new("bench plan", args.json);
    let search_ms = if args.quick { QUICK_SEARCH_MS } else { SEARCH_MS };
    let mut graphs = Vec::new();
    let mut done = Done::read(args.resume.as_deref())?;
    for spec in suite(args.quick) {
        let name = spec.to_string();
        line.step(&name);
        if let Some(known) = done.graphs.remove(&name) {
            graphs.push(known);
            continue;
        }
        let made = instance(&spec);
        let graph = quality(&name, &family(&spec), &PlanRequest::new(&made.profile, &made.graph), search_ms)?;
        done.append(&graph)?;
        graphs.push(graph);
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
    let budgets = budgets(args.quick, &line)?;
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
            "budgets": budgets,
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
    text += &budget_table(&budgets);
    let _ = writeln!(text, "{}", anytime.describe());
    print(&text)
}

/// Results of graphs from an earlier run that was interrupted, one JSON object a line.
struct Done {
    path: Option<PathBuf>,
    graphs: BTreeMap<String, Graph>,
}

impl Done {
    fn read(path: Option<&Path>) -> Result<Self, CliError> {
        let Some(path) = path else { return Ok(Self { path: None, graphs: BTreeMap::new() }) };
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(source) => return Err(CliError::File { action: "read", path: path.to_owned(), source }),
        };
        // The last line may have been cut off when the run ended.
        let lines: Vec<&str> = text.split_inclusive('\n').filter(|line| line.ends_with('\n')).collect();
        let graphs = lines
            .into_iter()
            .map(|line| {
                let graph: Graph = serde_json::from_str(line).map_err(|error| {
                    CliError::Usage(format!("{} is no list of results of this command: {error}", path.display()))
                })?;
                Ok((graph.name.clone(), graph))
            })
            .collect::<Result<_, CliError>>()?;
        Ok(Self { path: Some(path.to_owned()), graphs })
    }

    fn append(&self, graph: &Graph) -> Result<(), CliError> {
        let Some(path) = &self.path else { return Ok(()) };
        let fail = |source| CliError::File { action: "write", path: path.clone(), source };
        let line = serde_json::to_string(graph).map_err(|error| CliError::Failed(error.to_string()))?;
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path).map_err(fail)?;
        file.write_all((line + "\n").as_bytes()).map_err(fail)
    }
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
    let claimed = own.own.as_ref().map_or(own.claimed, |own| own.value);
    let proven = trefoil_plan::certificate(std::slice::from_ref(request), &own)?.bound.map_or(0.0, |bound| bound.value);
    Ok(Graph {
        name: name.to_owned(),
        family: family.to_owned(),
        operators: arena.operators(),
        units: arena.units(),
        reference_ms,
        optimum_known: optimum.is_some(),
        sequential_own_gap: over(claimed, proven),
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
