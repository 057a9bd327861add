//! `trefoil video rates`.

use super::lanes::OpenLanes;
use super::orders::{self, Order};
use super::shared::decoder_of;
use super::{blocks, keep_going, lanes, memory, samples_json};
use crate::cli::RatesArgs;
use crate::context::{print, print_json};
use crate::error::CliError;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::Path;
use trefoil_core::Origin;
use trefoil_report::format;
use trefoil_video::engine::EngineDecoder;
use trefoil_video::rates::{EngineRate, RateOptions, measure, random_inputs, shape_for_tokens};
use trefoil_video::stream::{LastStageRate, measure_last_stage, time_decoding};
use trefoil_video::{Clip, Lane, Model, Tensor};
use trefoil_weights::memory::available_bytes;

/// Runs the command.
pub fn run(args: &RatesArgs) -> Result<(), CliError> {
    if args.tokens == 0 || args.text_rows == 0 || args.samples == 0 {
        return Err(CliError::Usage("--tokens, --text-rows and --samples must be above 0".to_owned()));
    }
    if !args.decoder_ms.is_finite() || args.decoder_ms < 0.0 {
        return Err(CliError::Usage(format!("--decoder-ms {} is no time", args.decoder_ms)));
    }
    lanes::engines_of(&args.engines, args.processes)?;
    let model = Model::open(&args.artefact)?;
    memory::check_random(&args.engines, args.processes, (&model, &args.artefact), [args.tokens, args.text_rows])?;
    let shape = shape_for_tokens(model.config(), args.tokens);
    let (noise, text) = random_inputs(model.config(), shape, args.text_rows);
    let negative = (model.sampler().branches() > 1).then(|| text.clone());
    drop(model);
    let inputs = (&noise, &text, negative.as_ref());
    let mut open = lanes::open_in(&args.artefact, &args.engines, inputs, args.processes)?;
    let model = open.lanes[0].model().clone();
    let clip = Clip::new(open.lanes[0].host_mut(), &model, &noise, &text, negative.as_ref())?;
    let options = RateOptions { samples: args.samples, warm_up: 2 };
    let rates = measure(&mut open.lanes, &clip, &noise, options, &|| keep_going(0, blocks(&model)))?;
    let count = blocks(&model);
    let decoders = match &args.decoder.as_deref().map(decoder_of).transpose()? {
        Some(path) => (0..open.lanes.len())
            .map(|at| decoder(args, path, &mut open, at, (&clip, &noise, shape)))
            .collect::<Result<Vec<_>, _>>()?,
        None => Vec::new(),
    };
    let decoder = decoders.last().map(|(rate, _)| rate);
    let decoder_ms = decoder.map_or([args.decoder_ms; 2], |rate| [rate.solo_ms.median, rate.pipeline_ms()]);
    let cuts = match rates.len() {
        2 => Some([
            ("solo", lanes::planned_cut(&rates, count, decoder_ms[0], EngineRate::alone_ms)?),
            ("corun", lanes::planned_cut(&rates, count, decoder_ms[1], EngineRate::pipeline_ms)?),
        ]),
        _ => None,
    };
    let orders: Option<[Order; 2]> = match (rates.as_slice(), decoders.as_slice()) {
        ([first, second], [(on_first, _), (on_second, _)]) => Some(orders::both(
            [first.engine.clone(), second.engine.clone()],
            [first.pipeline_ms(), second.pipeline_ms()],
            0.0,
            [on_first.pipeline_ms(), on_second.pipeline_ms()],
            count,
        )?),
        _ => None,
    };
    let is_shaped = open.specs.iter().any(|spec| spec.shape.is_some());
    let flops = 2 * model.config().block_macs(args.tokens, args.text_rows);
    if args.json {
        let engines: Vec<Value> = rates.iter().map(|rate| engine_json(rate, flops)).collect();
        let cuts: Option<serde_json::Map<String, Value>> =
            cuts.map(|cuts| cuts.iter().map(|(name, cut)| ((*name).to_owned(), json!(cut))).collect());
        return print_json(&json!({
            "tokens": args.tokens,
            "processes": args.processes,
            "text_rows": args.text_rows,
            "latent": shape,
            "flop_per_block": flops,
            "blocks": count,
            "engines": engines,
            "decoder_ms": {
                "value": decoder_ms[1],
                "solo_ms": decoder.map(|rate| samples_json(&rate.solo_ms)),
                "corun_ms": decoder.and_then(|rate| rate.corun_ms.as_ref()).map(samples_json),
                "origin": if decoder.is_some() { Origin::Measured } else { Origin::Declared },
            },
            "decoders": decoders.iter().map(|(rate, on)| decoder_json(rate, on)).collect::<Vec<_>>(),
            "cuts": cuts,
            "orders": orders,
            "best_order": orders.as_ref().map(orders::best),
            "cuts_origin": Origin::Predicted,
            "conditions": conditions(),
            "notes": open.notes,
            "origin": if is_shaped { Origin::Emulated } else { Origin::Measured },
        }));
    }
    let mut text = format!(
        "one block of {} tokens and {} text rows, {:.1} GFLOP without adapters ({}, random values)\n",
        args.tokens,
        args.text_rows,
        flops as f64 / 1e9,
        if is_shaped { "emulated" } else { "measured" }
    );
    for rate in &rates {
        let _ = write!(
            text,
            "{} on {}: alone {} ({} to {}, {} samples)",
            rate.engine,
            rate.path,
            format::time(rate.solo_ms.median),
            format::time(rate.solo_ms.p10),
            format::time(rate.solo_ms.p90),
            rate.solo_ms.count
        );
        if let (Some(corun), Some(slowdown)) = (&rate.corun_ms, rate.slowdown()) {
            let _ = write!(text, ", while both run {} ({})", format::time(corun.median), format::ratio(slowdown));
        }
        text.push('\n');
    }
    for (rate, on) in &decoders {
        let _ = write!(text, "decoding a clip on {on}: alone {}", format::time(rate.solo_ms.median));
        if let Some(corun) = &rate.corun_ms {
            let slowdown = format::ratio(corun.median / rate.solo_ms.median);
            let _ = write!(text, ", while the other engine runs {} ({slowdown})", format::time(corun.median));
        }
        text.push('\n');
    }
    for (name, cut) in cuts.iter().flatten() {
        let _ = writeln!(
            text,
            "cut from {name} rates: {} of {count}, period {} (predicted)",
            cut.cut,
            format::time(cut.period)
        );
    }
    if let Some(orders) = &orders {
        orders::tell(orders, count, &mut text);
    }
    for note in &open.notes {
        eprintln!("note: {note}");
    }
    print(&text)
}

/// `T_V`: a clip's decoding on engine `at`, alone and while the other engine runs blocks; and what it ran on.
fn decoder(
    args: &RatesArgs,
    path: &Path,
    open: &mut OpenLanes,
    at: usize,
    (clip, noise, [_, frames, height, width]): (&Clip, &Tensor, [usize; 4]),
) -> Result<(LastStageRate, String), CliError> {
    let on = EngineDecoder::open(path, args.vae_path, &open.specs[at])?;
    open.notes
        .extend(on.engine().notes().iter().filter(|note| !open.notes.contains(note)).cloned().collect::<Vec<_>>());
    let memory = on.memory([frames, height, width])?;
    let need = (memory.history + memory.working) as u64;
    if let Some(available) = available_bytes().filter(|&available| need > available) {
        return Err(CliError::Usage(format!(
            "decoding latents of {height}×{width} needs {} besides the weights and {} are available; choose fewer --tokens",
            format::bytes(need),
            format::bytes(available)
        )));
    }
    let check = || keep_going(0, clip.trajectory().blocks());
    let mut stage = || {
        let _on_cores = on.engine().on_cores();
        time_decoding(on.decoder(), on.kernels(), [frames, height, width], &check)
    };
    let beside: Option<(&mut Lane, &Clip, &Tensor)> = match open.lanes.as_mut_slice() {
        lanes @ [_, _] => Some((&mut lanes[1 - at], clip, noise)),
        _ => None,
    };
    let rate = measure_last_stage(&mut stage, beside, &check)?;
    Ok((rate, format!("{} in {} ({})", on.engine().spec(), args.vae_path, on.engine().kernels_name())))
}

fn decoder_json(rate: &LastStageRate, on: &str) -> Value {
    json!({
        "on": on,
        "solo_ms": samples_json(&rate.solo_ms),
        "corun_ms": rate.corun_ms.as_ref().map(samples_json),
    })
}

fn engine_json(rate: &EngineRate, flops: u64) -> Value {
    json!({
        "engine": rate.engine,
        "path": rate.path,
        "solo_ms": samples_json(&rate.solo_ms),
        "corun_ms": rate.corun_ms.as_ref().map(samples_json),
        "slowdown": rate.slowdown(),
        "experts": rate.experts,
        "gflops": flops as f64 / rate.solo_ms.median / 1e6,
        "noisy": rate.solo_ms.spread() > trefoil_core::measurement::NOISY_SPREAD,
    })
}

/// What the rates were measured under, as far as the system tells.
pub fn conditions() -> Value {
    let load = std::fs::read_to_string("/proc/loadavg").ok();
    let load: Option<f64> = load.as_deref().and_then(|text| text.split_whitespace().next()?.parse().ok());
    json!({ "machine": trefoil_units::machine(), "load_1min": load })
}
