//! `trefoil paper`: published numbers beside recomputed ones.

use crate::cli::{PaperArg, PaperArgs};
use crate::context::{print, print_json, width};
use crate::error::CliError;
use std::fmt::Write as _;
use trefoil_paper::bident::{BidentReport, UNITS};
use trefoil_paper::{Interval, PaperReport, Row, Verdict, bident, heterovdiff};
use trefoil_report::TableFormat;

/// Runs the command.
pub fn run(args: &PaperArgs) -> Result<(), CliError> {
    match args.paper {
        PaperArg::Heterovdiff => {
            if args.sensitivity {
                return Err(CliError::Usage(
                    "--sensitivity is for `trefoil paper bident`; the other paper's numbers rest on nothing assumed"
                        .to_owned(),
                ));
            }
            let report = heterovdiff::report().map_err(|error| CliError::Failed(error.to_string()))?;
            if args.json { print_json(&report) } else { print(&describe(&report)) }
        }
        PaperArg::Bident => {
            let report = bident::report(args.sensitivity).map_err(|error| CliError::Failed(error.to_string()))?;
            if args.json { print_json(&report) } else { print(&describe_bident(&report)) }
        }
    }
}

/// The shortest text that shows the middle to four digits, with the width of the interval where it shows.
fn number(interval: Interval) -> String {
    let digits = |value: f64| {
        let magnitude = value.abs();
        let decimals = match magnitude {
            _ if magnitude >= 1000.0 => 0,
            _ if magnitude >= 100.0 => 1,
            _ if magnitude >= 10.0 => 2,
            _ => 3,
        };
        let text = format!("{value:.decimals$}");
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
    };
    let (low, high) = (digits(interval.low), digits(interval.high));
    if low == high { low } else { format!("{low}..{high}") }
}

fn verdict(row: &Row) -> &'static str {
    match row.verdict {
        Verdict::Agrees => "agrees",
        Verdict::Contradicts => "CONTRADICTS",
        Verdict::Differs => "differs",
        Verdict::AboveCap => "ABOVE CAP",
        Verdict::Unpublished => "",
    }
}

fn cell(text: impl Into<String>) -> (String, bool) {
    (text.into(), false)
}

fn describe(report: &PaperReport) -> String {
    let mut text = format!(
        "{}: published numbers beside what follows from them\n\
         A range is what all numbers that print like the published ones give. `agrees`: equal within the printed digits. \
         `CONTRADICTS`: follows from the paper's own numbers and the paper prints another. `ABOVE CAP`: above what its own \
         sequential speedups allow. `differs`: a prediction or simulation beside a measurement.\n",
        report.paper
    );
    for section in &report.sections {
        let headings =
            ["where", "what", ">published", ">recomputed", ">difference", "verdict", "from"].map(str::to_owned);
        let rows = section.rows.iter().map(|row| {
            vec![
                cell(row.place.clone()),
                cell(row.what.clone()),
                cell(row.published.as_ref().map_or_else(String::new, |value| with_unit(value, &row.unit))),
                cell(with_unit(&number(row.recomputed), &row.unit)),
                cell(row.difference_percent.map_or_else(String::new, |percent| format!("{percent:+.1}%"))),
                cell(verdict(row)),
                cell(row.how.clone()),
            ]
        });
        text.push('\n');
        text +=
            &trefoil_report::text_table(&section.title, &headings, rows.collect()).render(TableFormat::Text, width());
        for note in &section.notes {
            let _ = writeln!(text, "note: {note}");
        }
    }
    let count = |verdict| report.with_verdict(verdict).count();
    let _ = writeln!(
        text,
        "\n{} agree, {} contradict the paper's own numbers, {} are above the cap that its sequential speedups set, {} predictions differ from measurements",
        count(Verdict::Agrees),
        count(Verdict::Contradicts),
        count(Verdict::AboveCap),
        count(Verdict::Differs)
    );
    for line in &report.cannot_be_checked {
        let _ = writeln!(text, "cannot be checked: {line}");
    }
    text
}

fn with_unit(value: &str, unit: &str) -> String {
    match unit {
        "" => value.to_owned(),
        "x" | "%" => format!("{value}{unit}"),
        _ => format!("{value} {unit}"),
    }
}

fn describe_bident(report: &BidentReport) -> String {
    let mut text = describe(&report.report);
    let _ = writeln!(
        text,
        "\nEvery time below is simulated on {}; sizes and costs are sourced or assumed in its description.",
        report.machine
    );
    let headings: Vec<String> = ["configuration", ">operators"]
        .into_iter()
        .map(str::to_owned)
        .chain(UNITS.map(|unit| format!(">{unit} ms")))
        .chain([">sequential ms", ">speedup", ">on CPU/GPU/NPU", ">energy saved", "sizes"].map(str::to_owned))
        .collect();
    let rows = report.configurations.iter().zip(&report.sources).map(|(result, (_, source))| {
        let mut row = vec![cell(result.name.clone()), cell(result.operators.to_string())];
        row.extend(result.single_ms.map(|ms| cell(ms.map_or_else(|| "no".to_owned(), |ms| format!("{ms:.3}")))));
        let [cpu, gpu, npu] = result.placed;
        row.extend([
            cell(format!("{:.3}", result.sequential_ms)),
            cell(format!("{:.2}x", result.speedup)),
            cell(format!("{cpu}/{gpu}/{npu}")),
            cell(format!("{:.1}%", result.energy_reduction)),
            cell(*source),
        ]);
        row
    });
    text += &trefoil_report::text_table("19 configurations (simulated)", &headings, rows.collect())
        .render(TableFormat::Text, width());
    text.push('\n');
    let headings = [
        "configuration",
        ">phases",
        ">concurrent",
        ">formula ms",
        ">speedup",
        ">gain",
        ">exclusive ms",
        ">gain",
        ">energy saved",
    ]
    .map(str::to_owned);
    let rows = report.parallel.iter().map(|result| {
        vec![
            cell(result.name.clone()),
            cell(result.phases.to_string()),
            cell(result.concurrent_phases.to_string()),
            cell(format!("{:.3}", result.literal_ms)),
            cell(format!("{:.2}x", result.literal_speedup)),
            cell(format!("{:+.1}%", result.literal_gain)),
            cell(format!("{:.3}", result.exclusive_ms)),
            cell(format!("{:+.1}%", result.exclusive_gain)),
            cell(format!("{:.1}%", result.energy_reduction)),
        ]
    });
    text += &trefoil_report::text_table(
        "Table 3's schedules (simulated): phases by the paper's formula, and the same placement on exclusive units; gains over sequential",
        &headings,
        rows.collect(),
    )
    .render(TableFormat::Text, width());
    text.push('\n');
    let headings =
        ["pair", "method", ">serial ms", ">paper's rules", ">its cap", ">with units", ">cap"].map(str::to_owned);
    let rows = report.pairs.iter().map(|pair| {
        vec![
            cell(format!("{} + {}", pair.first, pair.second)),
            cell(pair.method),
            cell(format!("{:.3}", pair.serial_ms)),
            cell(format!("{:.2}x", pair.literal_speedup)),
            cell(format!("{:.2}x", pair.cap.literal_speedup)),
            cell(pair.units_speedup.map_or_else(String::new, |speedup| format!("{speedup:.2}x"))),
            cell(format!("{:.2}x", pair.cap.speedup)),
        ]
    });
    text += &trefoil_report::text_table(
        "190 pairs (simulated): speedup over serial, and the cap that no overlap passes",
        &headings,
        rows.collect(),
    )
    .render(TableFormat::Text, width());
    if report.sensitivity.is_empty() {
        text += "\n--sensitivity varies every assumed number by 20%\n";
        return text;
    }
    text.push('\n');
    let headings = ["changed", ">factor", ">sequential", ">pairs", ">least", ">largest", ">cap"].map(str::to_owned);
    let rows = report.sensitivity.iter().map(|variation| {
        let [least, most] = variation.pair_range;
        let mut row = vec![cell(variation.what.clone()), cell(format!("{:.1}", variation.factor))];
        let numbers = [variation.sequential_mean, variation.pair_mean, least, most, variation.cap_mean];
        row.extend(numbers.map(|value| cell(format!("{value:.3}x"))));
        row
    });
    text += &trefoil_report::text_table(
        "assumed numbers 20% up and down (simulated): geometric means of sequential and pair speedups by the paper's rules",
        &headings,
        rows.collect(),
    )
    .render(TableFormat::Text, width());
    text
}
