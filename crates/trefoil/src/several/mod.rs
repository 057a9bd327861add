//! The job for several models: prepare and profile each, arrange them together, hold a contest between the arrangements and
//! what everybody does, and say which is used. Every step is a function of its own crate; this puts them in order.

mod adapt;
mod arrange;
mod energy;
mod ready;
mod slowdown;

pub use adapt::propose;
pub use arrange::{Arranged, Candidate, arrange, same_arrangement};
pub use energy::{Energy, energies, known_powers, least_of, of_contenders};
pub use ready::{
    Reading, Ready, candidate_units, make_ready, measurable, model_args, profiled, segment_options, settle,
};
pub use slowdown::{Slowed, corun_class, corun_ms};

use crate::cli::MeasureArgs;
use crate::context::{self, ProgressLine};
use crate::error::CliError;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;
use trefoil_core::{OperatorGraph, Plan, Unit, UnitAddress};
use trefoil_plan::{PlanOptions, SharedModel, TogetherRequest};
use trefoil_profile::ProfileError;
use trefoil_run::together::{Activity, Arrangement, Arrivals, Contest, ContestOptions, Entrant, contest};
use trefoil_run::{
    ExecutorOptions, ExtractedSegments, PreparedModelSource, PreparedSource, RunSampling, Verdict, WorkerCommand,
};

/// Names of the arrangements to beat.
pub const BASELINES: [&str; 3] = ["serial", "all-at-once", "one-per-core"];

/// What is asked of several models.
#[derive(Debug, Clone)]
pub struct Question {
    /// `auto`, or one of [`trefoil_plan::SEVERAL_METHODS`].
    pub method: String,
    /// Options of the planners.
    pub options: PlanOptions,
    /// A plan to use instead of planning.
    pub given: Option<Plan>,
    /// Units that were asked for.
    pub asked: Vec<UnitAddress>,
    /// Units that plans may use.
    pub units: Vec<Unit>,
    /// Units that the baselines may use: all cores and each core of every CPU backend, whatever was asked for.
    pub baseline_units: Vec<Unit>,
    /// Inferences of each model in a round.
    pub items: u32,
    /// Whether the arrangement with the least energy is wanted, not the fastest.
    pub energy: bool,
    /// Requests at fixed rates instead of rounds, by model.
    pub arrivals: Option<Vec<Arrivals>>,
    /// How long requests arrive.
    pub duration: Duration,
    /// Rounds of the contest.
    pub rounds: u32,
    /// How often an arrangement is run in each process of the contest.
    pub sampling: RunSampling,
    /// Leave arrangements out once they are clearly beaten ([`ContestOptions::give_up`]).
    pub give_up: Option<f64>,
    /// How to measure.
    pub measure: MeasureArgs,
    /// The cache folder.
    pub cache: PathBuf,
    /// Whether what did not happen as asked is an error.
    pub strict: bool,
    /// Whether progress is hidden.
    pub quiet: bool,
}

/// What was found out about several models.
#[derive(Debug)]
pub struct Found {
    /// The arrangements, in the order of the contest; plans without entrants are in the notes.
    pub candidates: Vec<Candidate>,
    /// Times in fresh processes.
    pub contest: Contest,
    /// What is used, and why.
    pub verdict: Verdict,
    /// How much the models slow each other down, one per core.
    pub slowdown: Option<Vec<Slowed>>,
    /// Joules of each arrangement and where their watts come from, when energy was asked for.
    pub energy: Option<(Vec<Energy>, &'static str)>,
    /// What did not happen as asked, and other remarks.
    pub notes: Vec<String>,
}

impl Found {
    /// The arrangement that is used.
    pub fn chosen(&self) -> Result<&Candidate, CliError> {
        let Some(name) = &self.verdict.choice else {
            if context::stop_flag().load(Ordering::SeqCst) {
                return Err(ProfileError::Interrupted { done: 0, total: self.candidates.len() }.into());
            }
            return Err(CliError::Failed(self.verdict.message.clone()));
        };
        let found = self.candidates.iter().find(|candidate| candidate.entrant.name == *name);
        found.ok_or_else(|| CliError::Failed(format!("arrangement `{name}` is none of the contest's")))
    }

    /// The arrangement that stands for the plan: the fastest that is no baseline, else the baseline that planning ended with.
    pub fn plan(&self) -> Option<&Candidate> {
        let find = |name: &str| self.candidates.iter().find(|candidate| candidate.entrant.name == name);
        self.contest.comparison.best_plan().and_then(|plan| find(&plan.name))
    }
}

/// Graphs of the models, in order.
pub fn graphs<'a>(ready: &'a [Ready], which: &[usize]) -> Vec<&'a OperatorGraph> {
    which.iter().map(|&model| &ready[model].graph).collect()
}

/// Where the models' sub-models come from.
pub fn source<'a>(ready: &'a [Ready], which: &[usize]) -> PreparedSource<'a> {
    let one = |&model: &usize| {
        let Ready { prepared, graph, .. } = &ready[model];
        PreparedModelSource { prepared: &prepared.prepared, graph, folder: prepared.segments_dir(graph.granularity) }
    };
    PreparedSource(which.iter().map(one).collect())
}

/// The planners' request.
pub fn request<'a>(ready: &'a [Ready], which: &[usize], units: &[Unit], items: u32) -> TogetherRequest<'a> {
    let shared = |&model: &usize| SharedModel { profile: &ready[model].profile, graph: &ready[model].graph };
    let models = which.iter().map(shared).collect();
    TogetherRequest { items, ..TogetherRequest::new(models, units.to_vec()) }
}

/// Folders of the models' inputs.
pub fn stores(ready: &[Ready], which: &[usize]) -> Vec<PathBuf> {
    which.iter().map(|&model| ready[model].prepared.trace.folder().to_owned()).collect()
}

/// How contests are held.
pub fn contest_options(question: &Question) -> Result<ContestOptions<'static>, CliError> {
    Ok(ContestOptions {
        rounds: question.rounds.max(1),
        cache: Some(trefoil_profile::cache::compiled_path(&question.cache)),
        spin: ExecutorOptions::default().spin,
        timeout: Duration::from_mins(10),
        command: WorkerCommand::this_program(["worker-together"])?,
        stop: context::stop_flag(),
        give_up: question.give_up,
    })
}

/// An arrangement as an entrant of a contest.
pub fn entrant(
    ready: &[Ready],
    which: &[usize],
    name: &str,
    plan: Plan,
    ordered: bool,
    baseline: bool,
) -> Result<Entrant, CliError> {
    let segments = ExtractedSegments::of(&plan, &source(ready, which))?.0;
    Ok(Entrant { name: name.to_owned(), arrangement: Arrangement { plan, ordered }, segments, baseline })
}

/// Most requests of a model that wait before further ones are turned away.
pub const WAITING: usize = 4096;
/// How long what waits at the end may take to finish.
pub const GRACE: Duration = Duration::from_secs(2);

/// What each process of the contest does.
pub fn activity(question: &Question) -> Activity {
    match &question.arrivals {
        Some(arrivals) => Activity::Serve {
            arrivals: arrivals.clone(),
            duration_ms: question.duration.as_secs_f64() * 1e3,
            limit: WAITING,
            grace_ms: GRACE.as_secs_f64() * 1e3,
        },
        None => Activity::Rounds { sampling: question.sampling },
    }
}

/// Every unit that an arrangement may use.
pub fn all_units(question: &Question) -> Vec<Unit> {
    let mut units: Vec<Unit> = Vec::new();
    for unit in question.units.iter().chain(&question.baseline_units) {
        if !units.iter().any(|known| known.address == unit.address) {
            units.push(unit.clone());
        }
    }
    units
}

/// Does it all for the models `which`, up to the verdict.
pub fn decide(ready: &mut [Ready], which: &[usize], question: &Question, title: &str) -> Result<Found, CliError> {
    let line = ProgressLine::new(title, question.quiet);
    for &model in which {
        settle(&mut ready[model], question, &line)?;
    }
    let Arranged { candidates, slowdown, notes } = arrange(ready, which, question, &line)?;
    let measure = activity(question);
    let entrants: Vec<Entrant> = candidates.iter().map(|candidate| candidate.entrant.clone()).collect();
    let options = contest_options(question)?;
    let mut show = |progress: trefoil_run::CompareProgress<'_>| {
        let (round, rounds) = (progress.round + 1, progress.rounds);
        line.step(&format!("fresh process, round {round} of {rounds}: {}", progress.contender));
    };
    let found = contest(&entrants, &graphs(ready, which), &stores(ready, which), &measure, &options, &mut show)?;
    let verdict = found.verdict();
    let mut found = Found { candidates, contest: found, verdict, slowdown, energy: None, notes };
    if question.energy {
        let known = energy::powers_of(ready, &all_units(question))?;
        let energies = energies(&found, &known);
        found.verdict = energy::verdict(&found, &energies, known.origin);
        found.notes.extend(known.notes);
        found.energy = Some((energies, known.origin));
    }
    Ok(found)
}
