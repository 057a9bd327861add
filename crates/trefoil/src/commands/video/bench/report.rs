//! What the benchmark tells: for people, and as JSON.

use super::super::rates::conditions;
use super::configuration::{Configuration, FACTORS, Kind};
use super::cuts::Chosen;
use super::last_stage::LastStage;
use super::measured::Measured;
use super::memory::{self, WeightMemory};
use crate::cli::BenchVideoArgs;
use crate::context::{print, print_json, width};
use crate::error::CliError;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::Path;
use trefoil_core::Origin;
use trefoil_plan::stream::VideoRates;
use trefoil_report::{Table, TableFormat, format, text_table};
use trefoil_video::EngineSpec;
use trefoil_video::engine::HeteroTensorEngine;

/// Everything about a run.
pub struct Outcome<'a> {
    pub args: &'a BenchVideoArgs,
    pub configurations: &'a [Configuration],
    pub measured: &'a Measured,
    pub chosen: &'a [Chosen],
    pub last_stage: &'a LastStage,
    pub specs: &'a [EngineSpec],
    pub artefact: &'a Path,
    /// Where the weights are from.
    pub model: &'a str,
    pub notes: &'a [String],
    /// How long all of it took.
    pub seconds: f64,
}

/// The rows that others are compared with.
struct Best<'a> {
    all: &'a Configuration,
    single: &'a Configuration,
    /// Milliseconds of a clip on the fastest engine alone.
    latency: f64,
}

impl Outcome<'_> {
    /// Prints it.
    pub fn tell(&self) -> Result<(), CliError> {
        let rows = || self.configurations.iter();
        let singles = || rows().filter(|row| row.kind == Kind::Single);
        let fastest = |a: &&Configuration, b: &&Configuration| a.ms().total_cmp(&b.ms());
        let latency = singles().filter_map(|row| Some(row.latency()?.median)).fold(f64::INFINITY, f64::min);
        let best = match (rows().min_by(fastest), singles().min_by(fastest)) {
            (Some(all), Some(single)) => Best { all, single, latency },
            _ => return Err(CliError::Failed("no configuration ran".to_owned())),
        };
        if self.args.json {
            return print_json(&self.json(&best));
        }
        for note in self.notes {
            eprintln!("note: {note}");
        }
        print(&self.text(&best))
    }

    fn is_shaped(&self) -> bool {
        self.specs.iter().any(|spec| spec.shape.is_some())
    }

    fn origin(&self) -> Origin {
        if self.last_stage.is_emulated() || self.is_shaped() { Origin::Emulated } else { Origin::Measured }
    }

    fn json(&self, best: &Best<'_>) -> Value {
        let (args, measured) = (self.args, self.measured);
        let rows: Vec<Value> = self
            .configurations
            .iter()
            .map(|row| row.json(best.single.ms(), best.single.predicted(), best.latency))
            .collect();
        let [solo, corun] = [measured.solo(), measured.corun()];
        json!({
            "model": self.model,
            "tokens": args.tokens,
            "text_rows": args.text_rows,
            "blocks": measured.blocks,
            "clips": args.clips,
            "rounds": args.rounds,
            "processes": args.processes,
            "rates": measured.engines().collect::<Vec<_>>(),
            "table1": measured.json(self.last_stage),
            "cuts": { "solo": self.promised(solo), "corun": self.promised(corun), "table5": self.chosen_json() },
            "decoder": {
                "what": self.last_stage.describe(),
                "ms": corun.decoder,
                "solo_ms": solo.decoder,
                "origin": if self.last_stage.is_emulated() { Origin::Emulated } else { Origin::Measured },
            },
            "origin": self.origin(),
            "configurations": rows,
            "best_single": { "name": best.single.name, "ms_per_clip": best.single.ms(), "latency_ms": best.latency },
            "verdict": self.verdict(best),
            "weights": {
                "artefact_bytes": std::fs::metadata(self.artefact).map(|about| about.len()).ok(),
                "copies": best.all.memory.as_ref().map(|memory| memory.artefacts.len()),
            },
            "peak_resident_bytes": trefoil_weights::memory::peak_resident_bytes(),
            "conditions": conditions(),
            "seconds": self.seconds,
            "notes": self.notes,
        })
    }

    fn promised(&self, rates: VideoRates) -> Option<Value> {
        let cut = trefoil_plan::stream::one_cut(rates, self.measured.blocks as u32).ok()?;
        Some(json!(cut))
    }

    /// Every cut that was chosen, with the configuration that ran it.
    fn chosen_rows(&self) -> impl Iterator<Item = (&Chosen, &Configuration)> {
        self.chosen.iter().filter_map(|chosen| {
            let kind = Kind::Pipeline(chosen.expected.cut as usize);
            Some((chosen, self.configurations.iter().find(|row| row.kind == kind)?))
        })
    }

    fn chosen_json(&self) -> Vec<Value> {
        let deployed = self.chosen_rows().next().map_or(f64::MAX, |(_, row)| row.ms());
        self.chosen_rows()
            .map(|(chosen, row)| {
                let (first, second) = (row.stage(0), row.stage(1));
                json!({
                    "chooser": chosen.chooser,
                    "cut": chosen.expected.cut,
                    "promised_ms": chosen.promised.period,
                    "predicted_ms": row.predicted(),
                    "predicted_stages_ms": [chosen.expected.first_stage, chosen.expected.second_stage],
                    "measured_ms": row.period().map(|period| period.median),
                    "prediction_error": row.error(),
                    "stages_ms": [first, second],
                    "stage_gap_ms": first.zip(second).map(|(first, second)| (first - second).abs()),
                    "over_deployed": row.ms() / deployed - 1.0,
                })
            })
            .collect()
    }

    fn text(&self, best: &Best<'_>) -> String {
        let origin = if self.origin() == Origin::Emulated { "emulated" } else { "measured" };
        let mut tables = vec![self.configurations_table(best, origin), self.measured.table(self.specs, origin)];
        tables.push(self.cuts_table(origin));
        tables.push(self.slo_table(best, origin));
        let told: Vec<(&str, &WeightMemory)> =
            self.configurations.iter().filter_map(|row| Some((row.name.as_str(), row.memory.as_ref()?))).collect();
        if !told.is_empty() {
            tables.push(memory::table(&told));
        }
        let mut text =
            tables.iter().map(|table| table.render(TableFormat::Text, width())).collect::<Vec<_>>().join("\n");
        self.remarks(&mut text);
        let _ = writeln!(text, "{}", self.verdict(best));
        text
    }

    fn configurations_table(&self, best: &Best<'_>, origin: &str) -> Table {
        let headings = [
            "configuration",
            ">ms per clip",
            ">p10 to p90",
            ">predicted",
            ">error",
            ">gain",
            ">latency",
            ">idle",
            ">handoffs",
            ">bytes each",
        ]
        .map(str::to_owned);
        let absent = || format::ABSENT.to_owned();
        let rows = self
            .configurations
            .iter()
            .map(|row| {
                let period = row.period();
                let idle = row.idle.as_ref().map_or_else(absent, |idle| {
                    idle.iter().map(|share| format!("{:.0}%", share * 100.0)).collect::<Vec<_>>().join(" / ")
                });
                let each = row.handoff_bytes.checked_div(row.handoffs);
                let cells = [
                    row.name.clone(),
                    format::optional_time(period.as_ref().map(|samples| samples.median)),
                    period.as_ref().map_or_else(absent, |samples| format::time_range(samples.p10, samples.p90)),
                    format::optional_time(row.predicted()),
                    row.error().map_or_else(absent, format::signed_percent),
                    format::ratio(best.single.ms() / row.ms()),
                    format::optional_time(row.latency().map(|samples| samples.median)),
                    idle,
                    row.handoffs.to_string(),
                    each.map_or_else(absent, |bytes| format::bytes(bytes as u64)),
                ];
                let is_best = std::ptr::eq(best.all, row);
                cells.into_iter().map(|cell| (cell, is_best)).collect()
            })
            .collect();
        let args = self.args;
        let title = format!(
            "{}: {} tokens, {} block executions a clip, {} of {} clips, in turn{} ({origin})",
            self.model,
            args.tokens,
            self.measured.blocks,
            format::plural(args.rounds, "round"),
            args.clips,
            if args.processes { ", engines in processes of their own" } else { "" }
        );
        text_table(&title, &headings, rows)
    }

    /// The paper's Table 5.
    fn cuts_table(&self, origin: &str) -> Table {
        let headings = [
            "cut chosen by",
            ">cut",
            ">first stage",
            ">second stage",
            ">gap",
            ">period",
            ">over the first",
            ">predicted",
            ">error",
            ">promised",
        ]
        .map(str::to_owned);
        let deployed = self.chosen_rows().next().map_or(f64::MAX, |(_, row)| row.ms());
        let rows = self
            .chosen_rows()
            .map(|(chosen, row)| {
                let (first, second) = (row.stage(0), row.stage(1));
                let cells = [
                    chosen.chooser.as_str().to_owned(),
                    chosen.expected.cut.to_string(),
                    format::optional_time(first),
                    format::optional_time(second),
                    format::optional_time(first.zip(second).map(|(first, second)| (first - second).abs())),
                    format::optional_time(row.period().map(|period| period.median)),
                    format::signed_percent(row.ms() / deployed - 1.0),
                    format::optional_time(row.predicted()),
                    row.error().map_or_else(|| format::ABSENT.to_owned(), format::signed_percent),
                    format::time(chosen.promised.period),
                ];
                cells.into_iter().map(|cell| (cell, false)).collect()
            })
            .collect();
        let title = format!(
            "Where to cut: {} block executions, {} a step ({origin})",
            self.measured.blocks, self.measured.layers
        );
        text_table(&title, &headings, rows)
    }

    /// The paper's Figure 7, and the factors that decide it.
    fn slo_table(&self, best: &Best<'_>, origin: &str) -> Table {
        let mut headings = vec!["clips an hour within".to_owned()];
        headings.extend(FACTORS.iter().map(|factor| format!(">{factor}×")));
        headings.extend([">first clip in at".to_owned(), ">all clips in at".to_owned()]);
        let rows = self
            .configurations
            .iter()
            .map(|row| {
                let hourly = FACTORS.iter().map(|factor| {
                    let value = row.hourly_within(factor * best.latency);
                    value.map_or_else(|| format::ABSENT.to_owned(), hourly)
                });
                let needs = row.needs(best.latency);
                let needs =
                    (0..2).map(|end| needs.map_or_else(|| format::ABSENT.to_owned(), |both| format::ratio(both[end])));
                let cells = std::iter::once(row.name.clone()).chain(hourly).chain(needs);
                cells.map(|cell| (cell, false)).collect()
            })
            .collect();
        let title = format!(
            "Deadlines as multiples of a clip on the fastest engine alone, {} ({origin})",
            format::time(best.latency)
        );
        text_table(&title, &headings, rows)
    }

    fn remarks(&self, text: &mut String) {
        if self.is_shaped() {
            let _ = writeln!(text, "engines are slowed to stated rates: all times are emulated");
        }
        if self.configurations.iter().any(|row| matches!(row.kind, Kind::HeteroTensor { .. })) {
            let _ = writeln!(
                text,
                "hetero-tensor hands over after every layer: {} times a block (the paper counts 26)",
                HeteroTensorEngine::EXCHANGES_PER_BLOCK
            );
        }
        let _ = writeln!(text, "last stage: {}", self.last_stage.describe());
        let _ =
            writeln!(text, "data-parallel holds an artefact for each engine, as the paper's does; all others map one");
        let _ = writeln!(text, "{} for all of it", format::time(self.seconds * 1e3));
    }

    /// Which configuration a guard picks here, and why.
    fn verdict(&self, best: &Best<'_>) -> String {
        if best.all.kind == Kind::Single {
            let divided = self.configurations.iter().filter(|row| row.kind != Kind::Single);
            let why = divided.min_by(|a, b| a.ms().total_cmp(&b.ms())).map_or_else(String::new, |other| {
                format!(
                    ": the best that uses both engines, {}, has {} its throughput",
                    other.name,
                    format::ratio(best.all.ms() / other.ms())
                )
            });
            return format!("{} is best here{why}", best.all.name);
        }
        let gain = best.single.ms() / best.all.ms();
        let mut text =
            format!("{} is best: {} the throughput of {}", best.all.name, format::ratio(gain), best.single.name);
        if let (Some(single), Some(predicted)) = (best.single.predicted(), best.all.predicted()) {
            let promised = single / predicted;
            let _ = write!(
                text,
                " (the rates predict {}, {})",
                format::ratio(promised),
                format::signed_percent(gain / promised - 1.0)
            );
        }
        if let Some(idle) = &best.all.idle {
            let idle: Vec<String> = idle.iter().map(|idle| format!("{:.0}%", idle * 100.0)).collect();
            let _ = write!(text, "; its engines wait {} of the time", idle.join(" and "));
        }
        if let Some(latency) = best.all.latency() {
            let factor = format::ratio(latency.median / best.latency);
            let _ = write!(text, ", and a clip takes {factor} what it takes on the fastest engine alone");
        }
        text
    }
}

/// Clips an hour: three digits.
fn hourly(value: f64) -> String {
    if value >= 1000.0 { format!("{value:.0}") } else { format!("{value:.1}") }
}
