//! How fast planning is, whether budgets are kept, and how near a short search is to a long one.

use crate::cli::now_ms;
use crate::context::{self, ProgressLine};
use crate::error::CliError;
use serde::Serialize;
use trefoil_plan::contest::{Arena, Contender};
use trefoil_plan::generate::{GraphSpec, Shape, instance};
use trefoil_plan::{Application, Budget, Clock, ConcurrentRequest, PairCosts, PlanOptions, PlanRequest, joint_dp};
use trefoil_report::{TableFormat, format};

/// A timing of planning itself.
#[derive(Debug, Serialize)]
pub(super) struct Speed {
    what: String,
    median_ms: f64,
    /// What DESIGN or the issue asks for, in milliseconds.
    asked_ms: Option<f64>,
    runs: usize,
}

pub(super) fn speed_table(speeds: &[Speed]) -> String {
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

pub(super) fn speeds(quick: bool, line: &ProgressLine) -> Result<Vec<Speed>, CliError> {
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
    for (operators, units, asked) in [(4_595, 3, None), (24_917, 3, Some(100.0))] {
        line.step(&format!("reading costs, {operators} operators"));
        let made = chain(operators, units);
        let request = PlanRequest::new(&made.profile, &made.graph);
        let mut failed = None;
        let runs = if quick { 2 } else { 9 };
        let time = median(runs, || failed = trefoil_plan::testing::read_costs(&request).err());
        if let Some(error) = failed {
            return Err(error.into());
        }
        let what = format!("reading the costs of {operators} × {units} from a profile in memory");
        speeds.push(Speed { what, median_ms: time, asked_ms: asked, runs });
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

/// How long a search with a time budget really took.
#[derive(Debug, Serialize)]
pub(super) struct Kept {
    what: String,
    budget_ms: f64,
    took_ms: f64,
}

/// Large questions with small budgets.
pub(super) fn budgets(quick: bool, line: &ProgressLine) -> Result<Vec<Kept>, CliError> {
    let mut kept = Vec::new();
    let large = if quick { 600 } else { 5_000 };
    for (shape, units, budget_ms) in [
        (Shape::Layered, 3, 100.0),
        (Shape::Layered, 3, 1_000.0),
        (Shape::SeriesParallel, 5, 250.0),
        (Shape::Network, 3, 500.0),
    ] {
        line.step(&format!("dag, {large} operators in {budget_ms} ms"));
        let made = instance(&GraphSpec { shape, operators: large, units, slowdown: 1.2, seed: 29 });
        let request = PlanRequest::new(&made.profile, &made.graph);
        let start = now_ms();
        let options = within(start, budget_ms);
        trefoil_plan::plan_with("dag", &request, &options)?;
        let what = format!("dag, {shape}, {large} × {units}");
        kept.push(Kept { what, budget_ms, took_ms: now_ms() - start });
    }
    for budget_ms in [200.0, 1_000.0] {
        line.step(&format!("concurrent, 9 inferences in {budget_ms} ms"));
        let made =
            instance(&GraphSpec { shape: Shape::Network, operators: large / 5, units: 3, slowdown: 1.2, seed: 31 });
        let applications = vec![Application::new(&made.profile, &made.graph).every(3, 0.0, 10.0); 3];
        let start = now_ms();
        trefoil_plan::concurrent(&ConcurrentRequest::new(applications), &within(start, budget_ms))?;
        let what = format!("concurrent, 3 models × 3 items of {}", large / 5);
        kept.push(Kept { what, budget_ms, took_ms: now_ms() - start });
    }
    Ok(kept)
}

fn within(start: f64, budget_ms: f64) -> PlanOptions {
    let clock = Clock { now_ms, end_ms: start + budget_ms };
    PlanOptions { budget: Budget::Until(clock), ..PlanOptions::default() }
}

pub(super) fn budget_table(budgets: &[Kept]) -> String {
    let headings = ["search with a time budget", ">budget", ">took (measured)"].map(str::to_owned);
    let rows = budgets
        .iter()
        .map(|kept| {
            let cells = [kept.what.clone(), format::time(kept.budget_ms), format::time(kept.took_ms)];
            cells.into_iter().map(|cell| (cell, false)).collect()
        })
        .collect();
    let title = "Budgets, one core, from a profile in memory to a plan";
    format!("\n{}", trefoil_report::text_table(title, &headings, rows).render(TableFormat::Text, context::width()))
}

/// How near an anytime search is to a long one after a second.
#[derive(Debug, Serialize)]
pub(super) struct Anytime {
    operators: usize,
    units: usize,
    short_s: f64,
    long_s: f64,
    short_ms: f64,
    long_ms: f64,
    bound_ms: f64,
}

impl Anytime {
    pub(super) fn describe(&self) -> String {
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

pub(super) fn anytime(quick: bool, line: &ProgressLine) -> Result<Anytime, CliError> {
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
