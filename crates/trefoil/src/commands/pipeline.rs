//! `trefoil pipeline`: streams of items over several engines.

use crate::cli::PipelineArgs;
use crate::context::{self, print, print_json};
use crate::error::CliError;
use serde_json::json;
use std::fmt::Write as _;
use std::path::Path;
use trefoil_core::Origin;
use trefoil_plan::stream::{Cut, StreamPlan, StreamProblem, VideoRates, crossing, cut_at, one_cut, plan_stream};

/// Runs the command.
pub fn run(args: &PipelineArgs) -> Result<(), CliError> {
    if let Some(path) = &args.problem {
        return general(path, args.json);
    }
    let Some(text) = &args.rates else {
        return Err(CliError::Usage(
            "give --rates T_G,T_N,T_V, like --rates 12.8,3.101,275, or --problem STREAM.json".to_owned(),
        ));
    };
    let rates = parse_rates(text)?;
    let blocks = parse_count("--blocks", &args.blocks)?;
    let best = one_cut(rates, blocks)?;
    let cut = match &args.cut {
        Some(cut) => cut_at(rates, blocks, parse_count("--cut", cut)?)?,
        None => best,
    };
    let crossing = crossing(rates, blocks);
    if args.json {
        return print_json(&json!({
            "cut": cut.cut,
            "period": cut.period,
            "idle": cut.idle,
            "idle_engine": idle_engine(&cut),
            "first_stage": cut.first_stage,
            "second_stage": cut.second_stage,
            "latency": cut.latency,
            "crossing": crossing.is_finite().then_some(crossing),
            "best_cut": best.cut,
            "best_period": best.period,
            "blocks": blocks,
            "rates": rates,
            "origin": Origin::Predicted,
        }));
    }
    print(&describe(&cut, &best, blocks, crossing))
}

fn idle_engine(cut: &Cut) -> Option<&'static str> {
    match cut.first_stage.total_cmp(&cut.second_stage) {
        std::cmp::Ordering::Less => Some("first"),
        std::cmp::Ordering::Equal => None,
        std::cmp::Ordering::Greater => Some("second"),
    }
}

fn describe(cut: &Cut, best: &Cut, blocks: u32, crossing: f64) -> String {
    let mut text = format!(
        "cut {} of {blocks} blocks: period {:.3} (predicted, in the unit of the rates)\n\
         first engine: blocks 0..{}, {:.3}; second engine: blocks {}..{blocks} and the decoder, {:.3}\n",
        cut.cut, cut.period, cut.cut, cut.first_stage, cut.cut, cut.second_stage
    );
    let _ = match idle_engine(cut) {
        Some(engine) => writeln!(text, "the {engine} engine waits {:.3} in every period", cut.idle),
        None => writeln!(text, "no engine waits"),
    };
    let _ =
        writeln!(text, "latency of one video {:.3}; the stages cross at {crossing:.3} (HeteroVDiff 4.3)", cut.latency);
    if best.period < cut.period {
        let above = 100.0 * (cut.period / best.period - 1.0);
        let _ = writeln!(
            text,
            "the best cut is {} with period {:.3}; this one is {above:.1}% above",
            best.cut, best.period
        );
    }
    text
}

fn parse_rates(text: &str) -> Result<VideoRates, CliError> {
    let fail =
        |reason: String| CliError::Usage(format!("--rates `{text}`: {reason}; write T_G,T_N,T_V, like 12.8,3.101,275"));
    let numbers = text
        .split(',')
        .map(|part| part.trim().parse::<f64>().map_err(|_| fail(format!("`{}` is no number", part.trim()))))
        .collect::<Result<Vec<_>, _>>()?;
    let [first, second, decoder] = numbers[..] else {
        return Err(fail(format!("{} number(s) instead of three", numbers.len())));
    };
    Ok(VideoRates { first, second, decoder })
}

fn parse_count(flag: &str, text: &str) -> Result<u32, CliError> {
    text.trim().parse().map_err(|_| CliError::Usage(format!("{flag} `{text}` is no number of blocks")))
}

fn general(path: &Path, json: bool) -> Result<(), CliError> {
    let text = context::read_file(path)?;
    let problem: StreamProblem = serde_json::from_slice(&text)
        .map_err(|error| CliError::Usage(format!("{} is no stream: {error}", path.display())))?;
    problem.check().map_err(|error| CliError::Usage(format!("{}: {error}", path.display())))?;
    let plan = plan_stream(&problem)?;
    if json {
        let cuts: Vec<usize> = plan.stages.iter().skip(1).map(|stage| stage.first).collect();
        return print_json(&json!({
            "cuts": cuts,
            "period": plan.period,
            "idle": plan.idle,
            "latency": plan.latency,
            "fill": plan.fill,
            "exact": plan.exact,
            "stages": plan.stages,
            "units": problem.units.iter().map(|unit| &unit.name).collect::<Vec<_>>(),
            "origin": Origin::Predicted,
        }));
    }
    print(&describe_general(&plan, &problem))
}

fn describe_general(plan: &StreamPlan, problem: &StreamProblem) -> String {
    let mut text = format!(
        "period {:.3} (predicted, in the unit of the costs), latency {:.3}, {}\n",
        plan.period,
        plan.latency,
        if plan.exact { "no division within the limits is shorter" } else { "not proven optimal" }
    );
    for stage in &plan.stages {
        let name = &problem.units[stage.unit].name;
        let _ =
            writeln!(text, "{name}: blocks {}..{}, {:.3}, from {:.3}", stage.first, stage.end, stage.time, stage.start);
    }
    for (unit, idle) in problem.units.iter().zip(&plan.idle) {
        let _ = writeln!(text, "{} waits {idle:.3} in every period", unit.name);
    }
    text
}
