//! What a stream measures before it begins, and the cut that follows.

use super::args::{OrderArg, StreamArgs};
use super::source::Source;
use super::stage::Stage;
use crate::cli::CutArg;
use crate::commands::video::keep_going;
use crate::commands::video::lanes::{self, OpenLanes};
use crate::commands::video::orders::{self, Order};
use crate::error::CliError;
use std::time::Instant;
use trefoil_plan::stream::{Cut, VideoRates, one_cut};
use trefoil_video::job::Job;
use trefoil_video::rates::EngineRate;
use trefoil_video::stream::{Cost, Division, LaneCosts, LastStageRate, StreamItem, forecast, measure_last_stage};
use trefoil_video::{Clip, Lane, Tensor};

/// What is known before the stream begins.
pub struct Prepared {
    /// Tokens of a clip.
    pub(super) tokens: usize,
    /// Block executions of a clip.
    pub(super) blocks: usize,
    /// First execution of the second engine.
    pub(super) cut: usize,
    /// Measured rates, where the cut comes from them.
    pub(super) rates: Option<Vec<EngineRate>>,
    /// The last stage's.
    pub(super) last_stage: Option<LastStageRate>,
    /// The host's work around the blocks of a branch, for each engine, in milliseconds.
    pub(super) host_ms: Vec<f64>,
    /// A clip's conditions (text contexts, timesteps), in milliseconds.
    pub(super) conditions_ms: f64,
    /// Milliseconds of a block on either engine, with the host's work around it and, on the first, its part of a clip's conditions.
    pub(super) block_ms: Option<[f64; 2]>,
    /// What all of it promises for the cut.
    pub(super) planned: Option<Cut>,
    /// The mean time between ends of as many clips as are to be made, from the same.
    pub(super) forecast_ms: Option<f64>,
    /// Both orders of the engines, where they were compared.
    pub(super) orders: Option<[Order; 2]>,
}

/// Measures what is asked for and chooses the cut (HeteroVDiff 4.3), and with `--order auto` the engine that ends a clip.
pub fn prepare(
    args: &StreamArgs,
    source: &mut Source,
    job: Option<&Job>,
    open: &mut OpenLanes,
    first: &StreamItem,
) -> Result<Prepared, CliError> {
    let model = open.lanes[0].model().clone();
    let begun = Instant::now();
    let clip = Clip::new(open.lanes[0].host_mut(), &model, &first.noise, &first.text, first.negative.as_ref())?;
    let mut conditions_ms = begun.elapsed().as_secs_f64() * 1e3;
    let blocks = clip.trajectory().blocks();
    let is_measured = args.cut == CutArg::Auto && open.lanes.len() == 2;
    let inputs = (&clip, &first.noise);
    let mut last_stage = if is_measured {
        Some(measured_stage(&source.stage, source.shape, job, (&mut open.lanes[0], inputs))?)
    } else {
        None
    };
    // The same at the end of the engine that comes first.
    let mut other = match (args.order, is_measured) {
        (OrderArg::Auto, true) => {
            let stage = source.stage.on(&open.specs[0])?;
            let rate = measured_stage(&stage, source.shape, job, (&mut open.lanes[1], inputs))?;
            Some((stage, rate))
        }
        _ => None,
    };
    let last_ms = last_stage.as_ref().map_or(args.decoder_ms, LastStageRate::pipeline_ms);
    let (mut cut, mut rates) = lanes::choose_cut(args.cut, &mut open.lanes, &clip, &first.noise, last_ms)?;
    let mut host_ms = Vec::new();
    for lane in &mut open.lanes {
        host_ms.push(lane.time_host(&clip, &first.noise)?.as_secs_f64() * 1e3);
    }
    if args.online && rates.is_none() && open.lanes.len() == 2 && (cut == 0 || cut == blocks) {
        // One engine will have no block to be observed.
        rates = lanes::choose_cut(CutArg::Auto, &mut open.lanes, &clip, &first.noise, last_ms)?.1;
    }
    let (mut planned, mut orders) = (None, None);
    let (mut with_host, mut conditions) = (None, 0.0);
    if let Some([one, two]) = rates.as_deref() {
        let (noise, text) = (&first.noise, &first.text);
        conditions_ms = open.lanes[0].time_conditions(noise, text, first.negative.as_ref())?.as_secs_f64() * 1e3;
        // What the host does around a branch's blocks belongs to each of them, and a clip's conditions to the first engine.
        let around = |rate: &EngineRate, host: f64| rate.pipeline_ms() + host / clip.trajectory().layers as f64;
        let block_ms = [around(one, host_ms[0]), around(two, host_ms[1])];
        conditions = conditions_ms / blocks as f64;
        with_host = Some(block_ms);
        let rates = VideoRates { first: block_ms[0] + conditions, second: block_ms[1], decoder: last_ms };
        let mut best = one_cut(rates, blocks as u32)?;
        if let Some((_, rate)) = &other {
            let names = [one.engine.clone(), two.engine.clone()];
            let both = orders::both(names, block_ms, conditions, [rate.pipeline_ms(), last_ms], blocks)?;
            best = both[orders::best(&both)].cut;
            orders = Some(both);
        }
        if is_measured {
            cut = best.cut as usize;
            planned = Some(best);
        }
    }
    if let Some((stage, rate)) = other.take_if(|_| orders.as_ref().is_some_and(|both| orders::best(both) == 1)) {
        source.stage = stage;
        last_stage = Some(rate);
        open.reverse();
        host_ms.reverse();
        if let Some(rates) = &mut rates {
            rates.reverse();
        }
        if let Some(rates) = &mut with_host {
            rates.reverse();
        }
    }
    let block_ms = with_host.map(|[first, second]| [first + conditions, second]);
    // A decoder on the engine that was not chosen may have had its place.
    drop(other);
    source.stage.ready()?;
    let forecast_ms = match (rates.as_deref(), &last_stage) {
        (Some(rates), Some(last)) => {
            let last = last.cost();
            let costs: Vec<LaneCosts> = rates
                .iter()
                .zip(&host_ms)
                .map(|(rate, &host_ms)| LaneCosts::of(rate, &clip, host_ms, Cost::always(conditions_ms), last))
                .collect();
            forecast(&costs, Division::Cut(cut), source.todo.len()).period_ms()
        }
        _ => None,
    };
    let tokens = clip.tokens();
    Ok(Prepared {
        tokens,
        blocks,
        cut,
        rates,
        last_stage,
        host_ms,
        conditions_ms,
        block_ms,
        planned,
        forecast_ms,
        orders,
    })
}

/// The last stage at the end of one engine, alone and while the other one, `beside`, runs blocks.
fn measured_stage(
    stage: &Stage,
    [_, _, frames, rows, columns]: [usize; 5],
    job: Option<&Job>,
    (beside, (clip, noise)): (&mut Lane, (&Clip, &Tensor)),
) -> Result<LastStageRate, CliError> {
    let folder = job.map_or_else(std::env::temp_dir, |job| job.folder().to_owned());
    let check = || keep_going(0, clip.trajectory().blocks());
    let mut timed = || {
        let ms = stage.time([frames, rows, columns], &folder, &check)?;
        let begun = Instant::now();
        job.map_or(Ok(()), Job::write)?;
        Ok(ms + begun.elapsed().as_secs_f64() * 1e3)
    };
    Ok(measure_last_stage(&mut timed, Some((beside, clip, noise)), &check)?)
}
