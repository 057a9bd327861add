//! What `trefoil video stream` tells of a stream that ran: for people, and as JSON.

use super::source::Source;
use super::{OpenLanes, Prepared, SHEET, StreamArgs, origin, period_of};
use crate::cli::CutArg;
use crate::commands::video::orders;
use crate::commands::video::rates::conditions;
use crate::context::{print, print_json, width};
use crate::error::CliError;
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use trefoil_core::Origin;
use trefoil_report::{TableFormat, format};
use trefoil_video::job::Job;
use trefoil_video::stream::{ClipReport, StreamReport};
use trefoil_video::{Lane, VideoError};
use trefoil_weights::memory::{mapping_usage, peak_resident_bytes};

/// Deadlines, as factors of the best single engine's latency (HeteroVDiff Figure 7).
const FACTORS: [f64; 6] = [1.25, 1.5, 1.75, 2.0, 2.5, 3.0];

/// Kinds of configurations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Pipeline,
    Single,
    DataParallel,
}

/// One way to run the stream, and how it went.
pub struct Configuration {
    name: String,
    kind: Kind,
    report: StreamReport,
}

impl Configuration {
    /// The engines asked for.
    pub fn pipeline(name: String, report: StreamReport) -> Self {
        Self { name, kind: Kind::Pipeline, report }
    }

    /// One engine.
    pub fn single(name: String, report: StreamReport) -> Self {
        Self { name, kind: Kind::Single, report }
    }

    /// Whole clips on both.
    pub fn data_parallel(name: String, report: StreamReport) -> Self {
        Self { name, kind: Kind::DataParallel, report }
    }

    /// Milliseconds per clip: the steady period, or with one clip its latency.
    fn per_clip(&self) -> Option<f64> {
        let clips = self.report.clips.len();
        match self.kind {
            // Two clips end at about the same time, so the mean gap between ends says little about few clips.
            Kind::DataParallel => self.report.clips.last().map(|clip| clip.end_ms / clips as f64),
            _ => self.report.period_ms.or(self.report.fill_ms),
        }
    }

    fn latencies(&self) -> Vec<f64> {
        self.report.clips.iter().map(ClipReport::latency_ms).collect()
    }

    fn median_latency(&self) -> Option<f64> {
        trefoil_core::Samples::from_values(&mut self.latencies()).map(|samples| samples.median)
    }
}

/// An engine's process at the end of a stream.
#[derive(Debug, Clone, Serialize)]
pub struct ProcessReport {
    engine: String,
    pid: Option<u32>,
    /// How often it ended before its time and was started again.
    restarts: usize,
    /// What the system said each time.
    reasons: Vec<String>,
    /// Resident bytes of the artefact in it, and its share of them: shares of all processes add up to one copy.
    artefact_resident_bytes: Option<u64>,
    artefact_share_bytes: Option<u64>,
}

/// The engines' processes while they still run.
pub fn processes(open: &OpenLanes, artefact: &Path) -> Vec<ProcessReport> {
    let about = std::fs::metadata(artefact).ok();
    let engines = open.specs.iter().zip(&open.processes);
    engines
        .map(|(spec, status)| {
            let usage = status.pid().zip(about.as_ref());
            let usage = usage.and_then(|(pid, about)| mapping_usage(pid, about.dev(), about.ino()));
            let reasons: Vec<String> = status.deaths().into_iter().map(|death| death.reason).collect();
            ProcessReport {
                engine: spec.to_string(),
                pid: status.pid(),
                restarts: reasons.len(),
                reasons,
                artefact_resident_bytes: usage.map(|usage| usage.resident),
                artefact_share_bytes: usage.map(|usage| usage.proportional),
            }
        })
        .collect()
}

/// Everything about a command that ran.
pub struct Outcome<'a> {
    /// Its flags.
    pub args: &'a StreamArgs,
    /// Its clips.
    pub source: &'a Source,
    /// Its engines.
    pub open: &'a OpenLanes,
    /// What ran, the engines asked for first.
    pub configurations: &'a [Configuration],
    /// What was known before.
    pub prepared: &'a Prepared,
    /// Where the clips are.
    pub job: Option<&'a Job>,
    /// Whether there is a contact sheet.
    pub has_sheet: bool,
    /// The engines' processes.
    pub processes: &'a [ProcessReport],
    /// Why it stopped early.
    pub stopped: Option<&'a VideoError>,
}

impl Outcome<'_> {
    /// Prints it.
    pub fn tell(&self) -> Result<(), CliError> {
        let Some(main) = self.configurations.first() else { return Ok(()) };
        if self.args.json {
            return print_json(&self.json(main));
        }
        let mut notes = self.source.notes.clone();
        for process in self.processes.iter().filter(|process| process.restarts > 0) {
            let last = process.reasons.last().cloned().unwrap_or_default();
            notes.push(format!("{}'s process was started again {} times ({last})", process.engine, process.restarts));
        }
        for note in notes {
            eprintln!("note: {note}");
        }
        for (clip, done) in
            self.job.iter().flat_map(|job| &job.state().clips).filter_map(|clip| Some((clip, clip.done.as_ref()?)))
        {
            if let Some(warning) = &done.warning {
                eprintln!("warning: {}: {warning}", clip.file);
            }
        }
        print(&self.text(main))
    }

    /// Which configuration was best, where several ran.
    fn verdict(&self, main: &Configuration) -> Option<String> {
        let time = |configuration: &Configuration| configuration.per_clip().unwrap_or(f64::MAX);
        let best = self.configurations.iter().min_by(|a, b| time(a).total_cmp(&time(b)))?;
        if self.configurations.len() < 2 {
            return None;
        }
        Some(if best.name == main.name {
            let rivals = self.configurations[1..].iter().map(time).fold(f64::MAX, f64::min);
            format!(
                "{} is the fastest of the configurations that ran, {} the next best",
                main.name,
                format::ratio(rivals / time(best))
            )
        } else {
            format!("{} is best here; the engines asked for were slower", best.name)
        })
    }

    /// Share of clips within deadlines, and the clips per hour that keep them (HeteroVDiff Figure 7).
    fn slo(&self) -> Option<Value> {
        let single = self
            .configurations
            .iter()
            .filter(|configuration| configuration.kind == Kind::Single)
            .filter_map(|configuration| Some((configuration, configuration.median_latency()?)))
            .min_by(|a, b| a.1.total_cmp(&b.1))?;
        let rows: Vec<Value> = FACTORS
            .iter()
            .map(|factor| {
                let deadline = factor * single.1;
                let each: Vec<Value> = self
                    .configurations
                    .iter()
                    .map(|configuration| {
                        let share = configuration.report.attainment(deadline);
                        let hourly = share.zip(configuration.per_clip()).map(|(share, ms)| share * 3.6e6 / ms);
                        json!({ "name": configuration.name, "attainment": share, "clips_per_hour_within": hourly })
                    })
                    .collect();
                json!({ "factor": factor, "deadline_ms": deadline, "configurations": each })
            })
            .collect();
        Some(json!({ "reference": single.0.name, "reference_latency_ms": single.1, "deadlines": rows }))
    }

    fn json(&self, main: &Configuration) -> Value {
        let (args, prepared) = (self.args, self.prepared);
        let table: Vec<Value> = self
            .configurations
            .iter()
            .map(|configuration| {
                json!({
                    "name": configuration.name,
                    "ms_per_clip": configuration.per_clip(),
                    "report": configuration.report,
                    "latency_ms": configuration.latencies(),
                })
            })
            .collect();
        let observed = main.report.observed();
        let is_standing_in = args.decoder_ms > 0.0;
        json!({
            "clips": self.source.clips.len(),
            "skipped": self.source.clips.len() - self.source.todo.len(),
            "finished": main.report.clips.len(),
            "stopped": self.stopped.map(VideoError::to_string),
            "tokens": prepared.tokens,
            "blocks": prepared.blocks,
            "cut": prepared.cut,
            "cut_arg": match args.cut { CutArg::Auto => json!("auto"), CutArg::At(cut) => json!(cut) },
            "online": args.online,
            "rates": prepared.rates,
            "predicted_period_ms": prepared.planned.map(|cut| cut.period),
            "predicted": prepared.planned,
            "forecast_period_ms": prepared.forecast_ms,
            "orders": prepared.orders,
            "host_ms": prepared.host_ms,
            "conditions_ms": prepared.conditions_ms,
            "period_ms": main.report.period_ms,
            "observed": {
                "first_ms": observed.first_ms,
                "second_ms": observed.second_ms,
                "last_stage_ms": observed.last_stage_ms,
                "period_ms": period_of(&observed, prepared.blocks, prepared.cut),
            },
            "decoder": {
                "what": self.source.stage.describe(),
                "ms": if is_standing_in { Some(args.decoder_ms) } else { observed.last_stage_ms },
                "rate": prepared.last_stage,
                "origin": if is_standing_in { Origin::Emulated } else { Origin::Measured },
            },
            "text_seconds": self.source.text_seconds,
            "origin": origin(args),
            "configurations": table,
            "verdict": self.verdict(main),
            "slo": self.slo(),
            "processes": self.processes,
            "memory": {
                "artefact_bytes": std::fs::metadata(&self.source.artefact).map(|about| about.len()).ok(),
                "scratch_bytes": self.open.lanes.iter().map(Lane::scratch_bytes).collect::<Vec<_>>(),
                "peak_resident_bytes": peak_resident_bytes(),
            },
            "conditions": conditions(),
            "output": args.output.as_deref().map(crate::context::shown),
            "contact_sheet": self.job.filter(|_| self.has_sheet).map(|job| crate::context::shown(&job.folder().join(SHEET))),
            "job": self.job.map(Job::state),
            "notes": self.source.notes,
        })
    }

    fn text(&self, main: &Configuration) -> String {
        let (args, prepared) = (self.args, self.prepared);
        let headings = ["configuration", ">ms per clip", ">latency", ">idle", ">handoffs"].map(str::to_owned);
        let rows = self
            .configurations
            .iter()
            .map(|configuration| {
                let report = &configuration.report;
                let idle = report.idle.as_ref().map_or_else(
                    || format::ABSENT.to_owned(),
                    |idle| idle.iter().map(|share| format::percent(*share)).collect::<Vec<_>>().join(" / "),
                );
                let cells = [
                    configuration.name.clone(),
                    format::optional_time(configuration.per_clip()),
                    format::optional_time(configuration.median_latency()),
                    idle,
                    report.handoffs.to_string(),
                ];
                cells.into_iter().map(|cell| (cell, false)).collect()
            })
            .collect();
        let title = format!(
            "{} of {} tokens, {} block executions each ({})",
            format::plural(main.report.clips.len(), "clip"),
            prepared.tokens,
            prepared.blocks,
            format!("{:?}", origin(args)).to_lowercase()
        );
        let table = trefoil_report::text_table(&title, &headings, rows);
        let mut text = table.render(TableFormat::Text, width());
        if self.open.lanes.len() == 2 {
            self.tell_cut(main, &mut text);
        }
        if let Some(fill) = main.report.fill_ms {
            let _ =
                write!(text, "first clip after {}; last stage: {}", format::time(fill), self.source.stage.describe());
            if let Some(ms) = main.report.observed().last_stage_ms {
                let _ = write!(text, ", {} a clip", format::time(ms));
            }
            text.push('\n');
        }
        if let Some(seconds) = self.source.text_seconds {
            let _ = writeln!(text, "prompts encoded beforehand in {}", format::time(seconds * 1e3));
        }
        self.tell_slo(&mut text);
        if let Some(verdict) = self.verdict(main) {
            let _ = writeln!(text, "{verdict}");
        }
        if let Some(job) = self.job {
            let clips = &job.state().clips;
            let done = clips.iter().filter(|clip| clip.done.is_some()).count();
            let sheet = if self.has_sheet { format!(", {SHEET}") } else { String::new() };
            let _ = writeln!(text, "{}: {done} of {} clips{sheet}, job.json", job.folder().display(), clips.len());
        }
        text
    }

    /// Cut, and predicted beside measured period.
    fn tell_cut(&self, main: &Configuration, text: &mut String) {
        let prepared = self.prepared;
        if let Some(orders) = &prepared.orders {
            orders::tell(orders, prepared.blocks, text);
        }
        let _ = write!(text, "cut {} of {}", prepared.cut, prepared.blocks);
        if self.args.online {
            let cuts: Vec<usize> = main.report.clips.iter().map(|clip| clip.cut).collect();
            if let (Some(low), Some(high)) = (cuts.iter().min(), cuts.iter().max()) {
                let _ = write!(text, " at first, {low} to {high} from observed rates");
            }
        }
        if let Some(planned) = prepared.planned {
            let _ = write!(text, "; period {} predicted from rates while both run", format::time(planned.period));
            // A few clips fill and drain: what is measured of them is compared with what is forecast for as many.
            let predicted = prepared.forecast_ms.unwrap_or(planned.period);
            if let Some(forecast) = prepared.forecast_ms {
                let clips = format::plural(self.source.todo.len(), "clip");
                let _ = write!(text, " ({} for {clips})", format::time(forecast));
            }
            if let Some(period) = main.report.period_ms {
                let difference = format::signed_percent(period / predicted - 1.0);
                let _ = write!(text, ", {} measured ({difference})", format::time(period));
            }
        }
        if let Some(period) = period_of(&main.report.observed(), prepared.blocks, prepared.cut) {
            let _ = write!(text, ", {} by the rates observed in the stream", format::time(period));
        }
        text.push('\n');
    }

    fn tell_slo(&self, text: &mut String) {
        let Some(slo) = self.slo() else { return };
        let deadlines = slo["deadlines"].as_array().cloned().unwrap_or_default();
        let mut headings = vec!["clips per hour within".to_owned()];
        headings.extend(FACTORS.iter().map(|factor| format!(">{factor}×")));
        let rows = self
            .configurations
            .iter()
            .enumerate()
            .map(|(number, configuration)| {
                let hourly = deadlines.iter().map(|deadline| {
                    let value = deadline["configurations"][number]["clips_per_hour_within"].as_f64();
                    (value.map_or_else(|| format::ABSENT.to_owned(), |value| format!("{value:.1}")), false)
                });
                std::iter::once((configuration.name.clone(), false)).chain(hourly).collect()
            })
            .collect();
        let title = format!(
            "deadlines as multiples of the latency of {} ({})",
            slo["reference"].as_str().unwrap_or_default(),
            format::optional_time(slo["reference_latency_ms"].as_f64())
        );
        text.push_str(&trefoil_report::text_table(&title, &headings, rows).render(TableFormat::Text, width()));
    }
}
