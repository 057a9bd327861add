//! The tables and the JSON of `trefoil bench quality`.

use super::{BenchQualityArgs, Maker, Measured, Outcome, Way};
use crate::commands::video::rates::conditions;
use crate::context::{self, print_json, width};
use crate::error::CliError;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::Path;
use trefoil_core::Origin;
use trefoil_report::{TableFormat, format};
use trefoil_video::NumericPath;
use trefoil_video::quality::{Colour, Motion, Shape, accuracy, interval, shuffled_accuracy};
use trefoil_video::vae::DecoderPath;

/// Mean and smallest of values.
fn mean_and_least(values: impl Iterator<Item = f64> + Clone) -> Option<(f64, f64)> {
    let count = values.clone().count();
    let least = values.clone().fold(f64::INFINITY, f64::min);
    (count > 0).then(|| (values.sum::<f64>() / count as f64, least))
}

/// A measure of a way's clips: what JSON and the table are made of.
struct Summary {
    psnr: Option<(f64, f64)>,
    ssim: Option<(f64, f64)>,
    cosine: Option<(f64, f64)>,
    flicker: Option<f64>,
    subject_consistency: Option<f64>,
    crispness: Option<f64>,
}

impl Summary {
    fn of(outcome: &Outcome) -> Self {
        let fidelity = || outcome.fidelity.iter();
        let steadiness = || outcome.steadiness.iter();
        let mean = |value: Option<(f64, f64)>| value.map(|(mean, _)| mean);
        Self {
            psnr: mean_and_least(fidelity().map(|clip| clip.psnr)),
            ssim: mean_and_least(fidelity().map(|clip| clip.ssim)),
            cosine: mean_and_least(fidelity().map(|clip| clip.cosine)),
            flicker: mean(mean_and_least(steadiness().map(|clip| clip.flicker))),
            subject_consistency: mean(mean_and_least(steadiness().filter_map(|clip| clip.subject_consistency))),
            crispness: mean(mean_and_least(outcome.readings.iter().map(|reading| reading.ideal_psnr))),
        }
    }
}

/// Prints the result.
pub fn print(
    args: &BenchQualityArgs,
    folder: &Path,
    maker: &Maker,
    ways: &[Way],
    measured: &[Measured],
) -> Result<(), CliError> {
    if args.json {
        return print_json(&as_json(args, folder, maker, ways, measured));
    }
    let mut text = String::new();
    for set in measured {
        text += &table(maker, ways, set);
        text.push('\n');
    }
    text += &explanation(maker);
    for note in &maker.notes {
        eprintln!("note: {note}");
    }
    context::print(&text)
}

fn table(maker: &Maker, ways: &[Way], set: &Measured) -> String {
    let headings = [
        "path",
        ">colour",
        ">shape",
        ">motion",
        ">all",
        ">95 %",
        ">shuffled",
        ">PSNR dB",
        ">SSIM",
        ">cosine",
        ">flicker",
        ">subject",
    ]
    .map(str::to_owned);
    let absent = || format::ABSENT.to_owned();
    let percent = |share: Option<f64>| share.map_or_else(absent, |share| format!("{:.1}", 100.0 * share));
    let digits = |value: Option<f64>, digits: usize| value.map_or_else(absent, |value| format!("{value:.digits$}"));
    let rows = ways
        .iter()
        .zip(&set.outcomes)
        .map(|(&way, outcome)| {
            let right = accuracy(&outcome.readings, &set.prompts);
            let shuffled = shuffled_accuracy(&outcome.readings, &set.prompts);
            let summary = Summary::of(outcome);
            let mean = |value: Option<(f64, f64)>| value.map(|(mean, _)| mean);
            let range = right.map_or_else(absent, |right| {
                let (low, high) = interval(right.all, right.pairs);
                format!("{:.0}–{:.0}", 100.0 * low, 100.0 * high)
            });
            let cells = [
                maker.name(way),
                percent(right.map(|right| right.colour)),
                percent(right.map(|right| right.shape)),
                percent(right.map(|right| right.motion)),
                percent(right.map(|right| right.all)),
                range,
                percent(shuffled.map(|shuffled| shuffled.all)),
                digits(mean(summary.psnr), 1),
                digits(mean(summary.ssim), 4),
                digits(mean(summary.cosine), 4),
                digits(summary.flicker, 4),
                digits(summary.subject_consistency, 4),
            ];
            cells.into_iter().map(|cell| (cell, false)).collect()
        })
        .collect();
    let title = format!(
        "{} combinations ({} of them): {} a row, % right",
        set.split.name(),
        set.split.combinations().len(),
        format::plural(set.prompts.len(), "clip")
    );
    trefoil_report::text_table(&title, &headings, rows).render(TableFormat::Text, width())
}

fn explanation(maker: &Maker) -> String {
    let mut text = String::new();
    let chance = |count: usize| 100.0 / count as f64;
    let _ = writeln!(
        text,
        "read from the pixels, nothing learned; 95 %: interval of \"all\"; shuffled: each clip against all other prompts (colour, shape \
         and motion by chance: {:.1}, {:.1} and {:.1} %)",
        chance(Colour::ALL.len()),
        chance(Shape::ALL.len()),
        chance(Motion::ALL.len())
    );
    let _ = writeln!(
        text,
        "PSNR, SSIM, cosine: against the same clip on f32; flicker and subject consistency: of the clip itself (measured)"
    );
    let _ = writeln!(
        text,
        "{} steps, {} block executions a clip, {} frames of {}×{}; the decoder is f32 where nothing else is said",
        maker.steps, maker.blocks, maker.size.frames, maker.size.width, maker.size.height
    );
    if maker.calibration_clips > 0 {
        let _ = writeln!(
            text,
            "w8a8: activation scales from {} of training combinations that are not among those above",
            format::plural(maker.calibration_clips, "clip")
        );
    }
    text
}

fn as_json(args: &BenchQualityArgs, folder: &Path, maker: &Maker, ways: &[Way], measured: &[Measured]) -> Value {
    let spread = |value: Option<(f64, f64)>| value.map(|(mean, least)| json!({ "mean": mean, "least": least }));
    let row = |set: &Measured, way: Way, outcome: &Outcome| {
        let right = accuracy(&outcome.readings, &set.prompts);
        let summary = Summary::of(outcome);
        let fidelity = (!outcome.fidelity.is_empty()).then(|| {
            json!({ "psnr_db": spread(summary.psnr), "ssim": spread(summary.ssim), "cosine": spread(summary.cosine) })
        });
        let misses: Vec<Value> = outcome
            .readings
            .iter()
            .zip(&set.prompts)
            .filter(|(reading, prompt)| {
                (reading.colour, reading.shape, reading.motion)
                    != (Some(prompt.colour), Some(prompt.shape), Some(prompt.motion))
            })
            .map(|(reading, prompt)| {
                json!({ "prompt": prompt.text, "colour": reading.colour, "shape": reading.shape, "motion": reading.motion })
            })
            .collect();
        let (paths, cut, decoder) = match way {
            Way::On(path) => (vec![path], None, DecoderPath::F32),
            Way::Cut(cut) => (maker.deployed.to_vec(), Some(cut), DecoderPath::F32),
            Way::Int8Decoder => (vec![NumericPath::F32], None, DecoderPath::Int8),
        };
        json!({
            "name": maker.name(way),
            "paths": paths,
            "cut": cut,
            "decoder": decoder,
            "accuracy": right,
            "all_interval_95": right.map(|right| interval(right.all, right.pairs)),
            "shuffled": shuffled_accuracy(&outcome.readings, &set.prompts),
            "against_f32": fidelity,
            "flicker": summary.flicker,
            "subject_consistency": summary.subject_consistency,
            "ideal_psnr_db": summary.crispness,
            "misses": misses,
        })
    };
    let sets: Vec<Value> = measured
        .iter()
        .map(|set| {
            let rows: Vec<Value> =
                ways.iter().zip(&set.outcomes).map(|(&way, outcome)| row(set, way, outcome)).collect();
            json!({
                "split": set.split,
                "combinations": set.split.combinations().len(),
                "clips": set.prompts.len(),
                "rows": rows,
            })
        })
        .collect();
    json!({
        "model": crate::context::shown(folder),
        "origin": Origin::Measured,
        "seed": args.seed,
        "steps": maker.steps,
        "blocks": maker.blocks,
        "frames": maker.size.frames,
        "width": maker.size.width,
        "height": maker.size.height,
        "calibration_clips": maker.calibration_clips,
        "chance": {
            "colour": 1.0 / Colour::ALL.len() as f64,
            "shape": 1.0 / Shape::ALL.len() as f64,
            "motion": 1.0 / Motion::ALL.len() as f64,
        },
        "sets": sets,
        "conditions": conditions(),
        "notes": maker.notes,
    })
}
