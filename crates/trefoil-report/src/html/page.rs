//! The page around the charts and tables.

use super::{ModelReport, Palette, ReportInput, badge, chart, escape::escape, heat, lanes, paragraph};
use crate::format;
use crate::planned::PlanSummary;
use crate::rows::{ModelRow, Verdict, VerdictKind};
use crate::table::Table;
use crate::tables;
use crate::totals::Totals;
use std::fmt::Write as _;
use trefoil_core::{Machine, Objective, Origin};

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("report.js");
/// Rows of a segment or transfer table that show without unfolding.
const FOLD: usize = 24;

/// Three leaves, one stem.
const LOGO: &str = "<svg class=\"logo\" viewBox=\"0 0 32 32\" width=\"36\" height=\"36\" aria-hidden=\"true\">\
    <path class=\"leaf\" d=\"M16 16C9 12 9 3 16 2c7 1 7 10 0 14Z\"/>\
    <path class=\"leaf\" d=\"M16 16C16 8 24 5 28 10c2 6-5 11-12 6Z\"/>\
    <path class=\"leaf\" d=\"M16 16C16 8 8 5 4 10c-2 6 5 11 12 6Z\"/>\
    <path class=\"stem\" d=\"M16 16c0 6 1 10 4 14\"/></svg>";

/// Patterns that mark simulated and emulated bars; they must be in the page for `fill: url(#…)` to work.
const PATTERNS: &str = "<svg class=\"defs\" width=\"0\" height=\"0\" aria-hidden=\"true\"><defs>\
    <pattern id=\"hatch-simulated\" width=\"8\" height=\"8\" patternUnits=\"userSpaceOnUse\" \
    patternTransform=\"rotate(45)\"><line class=\"hatch-line\" x1=\"0\" y1=\"0\" x2=\"0\" y2=\"8\"/></pattern>\
    <pattern id=\"hatch-emulated\" width=\"8\" height=\"8\" patternUnits=\"userSpaceOnUse\">\
    <path class=\"hatch-line thin\" d=\"M0 0l8 8M8 0l-8 8\"/></pattern>\
    <pattern id=\"hatch-dim\" width=\"8\" height=\"8\" patternUnits=\"userSpaceOnUse\" \
    patternTransform=\"rotate(45)\"><line class=\"hatch-line dim\" x1=\"0\" y1=\"0\" x2=\"0\" y2=\"8\"/></pattern></defs></svg>";

pub(super) fn page(input: &ReportInput) -> String {
    let palette = Palette::of(input);
    let title = if input.title.is_empty() { "Trefoil report" } else { &input.title };
    let mut html = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\">\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; \
         script-src 'unsafe-inline'; img-src data:\">\
         <meta name=\"generator\" content=\"trefoil {}\"><title>{}</title><link rel=\"icon\" href=\"data:,\">\
         <style>{STYLE}</style></head><body>{PATTERNS}",
        env!("CARGO_PKG_VERSION"),
        escape(title)
    );
    header(&mut html, input, title);
    html.push_str("<main>");
    if input.models.is_empty() {
        html.push_str("<section class=\"card\"><p class=\"muted\">This report holds no model.</p></section>");
    }
    if input.models.len() > 1 {
        overview(&mut html, input, &palette);
    }
    for (index, model) in input.models.iter().enumerate() {
        model_section(&mut html, model, index, &palette);
    }
    machine_section(&mut html, input, &palette);
    legend(&mut html);
    let _ = writeln!(
        html,
        "</main><footer>Trefoil {} · this file is self-contained and opens offline</footer>\
         <div id=\"tip\" role=\"status\" hidden></div><script>{SCRIPT}</script></body></html>",
        env!("CARGO_PKG_VERSION")
    );
    html
}

fn header(html: &mut String, input: &ReportInput, title: &str) {
    let mut facts = Vec::new();
    if let Some(machine) = &input.machine {
        facts.push(format!("{}, {}", machine.cpu, format::plural(machine.cores.len(), "core")));
    }
    facts.extend(input.generated_at.clone());
    let _ = write!(
        html,
        "<header>{LOGO}<div><h1>{}</h1><p>{}</p></div></header>",
        escape(title),
        escape(&facts.join(" · "))
    );
    if let Some(banner) = &input.banner {
        let _ = write!(html, "<div class=\"banner\" role=\"note\">{}</div>", escape(banner));
    }
    if input.models.len() > 1 {
        html.push_str("<nav aria-label=\"models\"><div class=\"tabs\">");
        for (index, model) in input.models.iter().enumerate() {
            let kind = Verdict::of(&model.row.contenders).kind;
            let _ = write!(
                html,
                "<a href=\"#model-{index}\" data-tab=\"{index}\"><i class=\"dot {}\"></i>{}</a>",
                verdict_class(kind),
                escape(&model.row.model)
            );
        }
        html.push_str("</div></nav>");
    }
}

fn verdict_class(kind: VerdictKind) -> &'static str {
    match kind {
        VerdictKind::PlanWins | VerdictKind::OnlyPlan => "win",
        VerdictKind::SingleWins => "single",
        VerdictKind::Undecided => "open",
        VerdictKind::Unmeasured => "none",
    }
}

fn overview(html: &mut String, input: &ReportInput, palette: &Palette) {
    let rows: Vec<ModelRow> = input.models.iter().map(|model| model.row.clone()).collect();
    let count = |kind| rows.iter().filter(|row| Verdict::of(&row.contenders).kind == kind).count();
    let only = count(VerdictKind::OnlyPlan);
    let mut sentence = format!(
        "Of {} models a mixed plan wins {}, a single unit wins {}, undecided {}",
        rows.len(),
        count(VerdictKind::PlanWins),
        count(VerdictKind::SingleWins),
        count(VerdictKind::Undecided) + count(VerdictKind::Unmeasured)
    );
    if only > 0 {
        let _ =
            write!(sentence, "; {} only with a plan", if only == 1 { "1 runs".into() } else { format!("{only} run") });
    }
    sentence.push('.');
    let _ = write!(html, "<section class=\"card\" id=\"overview\"><h2>Overview</h2>{}", paragraph(&sentence));
    html.push_str(&tables::summary_table(&rows).html(&|unit| palette.index(unit)));
    html.push_str("</section>");
}

fn card(html: &mut String, title: &str, lead: &str, body: &str) {
    if !body.is_empty() {
        let lead = if lead.is_empty() { String::new() } else { format!("<p class=\"lead\">{}</p>", escape(lead)) };
        let _ = write!(html, "<div class=\"card\"><h3>{}</h3>{lead}{body}</div>", escape(title));
    }
}

fn table_html(table: &Table, palette: &Palette) -> String {
    let body = table.html(&|unit| palette.index(unit));
    if table.len() > FOLD {
        format!("<details><summary>show {} rows</summary>{body}</details>", table.len())
    } else {
        body
    }
}

fn model_section(html: &mut String, model: &ModelReport, index: usize, palette: &Palette) {
    let verdict = Verdict::of(&model.row.contenders);
    let _ = write!(
        html,
        "<section class=\"model\" id=\"model-{index}\" aria-labelledby=\"title-{index}\">\
         <div class=\"verdict {}\"><h2 id=\"title-{index}\">{}</h2><p class=\"sentence\">{}</p>",
        verdict_class(verdict.kind),
        escape(&model.row.model),
        escape(&verdict.text)
    );
    facts(html, model);
    html.push_str("</div>");
    if !model.row.contenders.is_empty() {
        let mut body = chart::contenders(&model.row.contenders, palette);
        body.push_str(&tables::contenders_table(&model.row.contenders).html(&|unit| palette.index(unit)));
        card(html, "Contenders", "Each single unit with all its cores, and the plan.", &body);
    }
    timelines(html, model, palette);
    html.push_str("<div class=\"pair\">");
    totals(html, model, palette);
    if let Some(plan) = &model.plan {
        card(html, "Plan", "", &plan_html(plan));
    }
    html.push_str("</div>");
    if !model.segments.is_empty() {
        card(html, "Segments", "", &table_html(&tables::plan_table(&model.segments), palette));
    }
    if !model.transfers.is_empty() {
        card(html, "Transfers", "", &table_html(&tables::transfers_table(&model.transfers), palette));
    }
    if let Some(table) = model.heat.as_ref().filter(|heat| !heat.rows.is_empty() && !heat.units.is_empty()) {
        card(
            html,
            "Operators on units",
            "Every operator alone on each unit; isolated times do not add up to a fused model's time.",
            &heat::heat(table, index, palette),
        );
    }
    if !model.unit_totals.is_empty() {
        let body = tables::unit_totals_table(&model.unit_totals).html(&|unit| palette.index(unit));
        card(html, "Operators alone against the whole model", "", &body);
    }
    if !model.memory.is_empty() {
        card(html, "Memory", "", &table_html(&tables::memory_table(&model.memory), palette));
    }
    card(html, "Notes", "", &list(&model.notes));
    html.push_str("</section>");
}

fn list(notes: &[String]) -> String {
    if notes.is_empty() {
        return String::new();
    }
    let items: Vec<_> = notes.iter().map(|note| format!("<li>{}</li>", escape(note))).collect();
    format!("<ul>{}</ul>", items.concat())
}

/// The few numbers one looks for first.
fn facts(html: &mut String, model: &ModelReport) {
    let mut facts: Vec<(&str, String, String)> = Vec::new();
    if let Some((row, ms)) = model.row.best_single().and_then(|row| Some((row, row.ms?))) {
        facts.push(("best single unit", format::time(ms), format!("{} {}", escape(&row.name), badge(row.origin))));
    }
    if let Some((row, ms)) = model.row.best_plan().and_then(|row| Some((row, row.ms?))) {
        facts.push(("plan", format::time(ms), format!("{} {}", escape(&row.name), badge(row.origin))));
        if let Some((predicted, error)) = row.predicted_ms.zip(row.error()) {
            let error = format!("error {} {}", format::signed_percent(error), badge(Origin::Predicted));
            facts.push(("prediction", format::time(predicted), error));
        }
    } else if let Some(plan) = &model.plan {
        facts.push(("plan, simulator", format::time(plan.simulated_ms), badge(plan.origin)));
    }
    if let Some(plan) = &model.plan {
        let units: std::collections::BTreeSet<_> = model.segments.iter().map(|segment| &segment.unit).collect();
        let detail =
            format!("{} on {}", format::plural(model.segments.len(), "segment"), format::plural(units.len(), "unit"));
        facts.push(("crossings", plan.crossings.to_string(), detail));
    }
    facts.push(("operators", model.row.operators.to_string(), format!("{} distinct", model.row.distinct)));
    html.push_str("<dl class=\"facts\">");
    for (name, value, detail) in facts {
        let _ = write!(html, "<div><dt>{name}</dt><dd>{}</dd><dd class=\"detail\">{detail}</dd></div>", escape(&value));
    }
    html.push_str("</dl>");
}

fn timelines(html: &mut String, model: &ModelReport, palette: &Palette) {
    let timelines: Vec<_> = model.predicted.iter().chain(&model.measured).collect();
    let chart = lanes::lanes(&timelines, &model.tasks, palette);
    if !chart.is_empty() {
        let lead = match (&model.predicted, &model.measured) {
            (Some(_), Some(_)) => "The plan's lanes above, the run's below, on one axis.",
            (Some(_), None) => "What the plan predicts; it was not run with a trace.",
            _ => "What the run did.",
        };
        card(html, "Timeline", lead, &chart);
    }
}

fn totals(html: &mut String, model: &ModelReport, palette: &Palette) {
    let shown = match (&model.measured, &model.predicted) {
        (Some(trace), _) => Some((trace, model.wall_ms)),
        (None, Some(plan)) => Some((plan, None)),
        (None, None) => None,
    };
    if let Some((timeline, wall_ms)) = shown.filter(|(timeline, _)| timeline.end_ms() > 0.0) {
        let totals = Totals::of(timeline, wall_ms);
        let mut body = chart::totals(&totals, palette);
        body.push_str(&tables::totals_table(&totals).html(&|unit| palette.index(unit)));
        let lead = if model.measured.is_some() {
            "One traced run, cut into disjoint parts."
        } else {
            "By the plan's timeline."
        };
        card(html, "Where the time goes", lead, &body);
    }
}

fn plan_html(plan: &PlanSummary) -> String {
    let claim = |value: f64| match plan.objective {
        Objective::Energy => format!("{value:.3} J"),
        Objective::Latency | Objective::Throughput => format::time(value),
    };
    let objective = match plan.objective {
        Objective::Latency => "latency",
        Objective::Energy => "energy",
        Objective::Throughput => "throughput (period)",
    };
    let origin = badge(plan.origin);
    let yes = |value: bool| if value { "yes" } else { "no" };
    let mut rows = vec![
        ("method", escape(&plan.method)),
        ("objective", objective.to_owned()),
        ("claimed by the planner", format!("{} {origin}", claim(plan.claimed))),
        ("simulator's makespan", format!("{} {origin}", format::time(plan.simulated_ms))),
    ];
    if let Some(bound) = plan.model_bound {
        let gap = plan.gap.map_or_else(String::new, |gap| format!(", gap {}", format::percent(gap)));
        rows.push(("lower bound of the cost model (not of the machine)", format!("{}{gap} {origin}", claim(bound))));
    }
    rows.push(("proven optimal under the cost model", yes(plan.exact).to_owned()));
    rows.push(("every segment measured whole", yes(plan.all_measured).to_owned()));
    let mut html = String::from("<dl class=\"pairs\">");
    for (name, value) in rows {
        let _ = write!(html, "<dt>{name}</dt><dd>{value}</dd>");
    }
    html.push_str("</dl>");
    html.push_str(&list(&plan.notes));
    html
}

fn machine_section(html: &mut String, input: &ReportInput, palette: &Palette) {
    if input.machine.is_none() && input.units.is_empty() && input.notes.is_empty() && input.command.is_none() {
        return;
    }
    html.push_str("<section class=\"machine\"><h2>Machine</h2>");
    let mut pairs = Vec::new();
    if let Some(command) = &input.command {
        pairs.push(("command".to_owned(), format!("<code>{}</code>", escape(command))));
    }
    if let Some(machine) = &input.machine {
        pairs.extend(machine_pairs(machine));
    }
    if !pairs.is_empty() {
        let body: Vec<_> =
            pairs.iter().map(|(name, value)| format!("<dt>{}</dt><dd>{value}</dd>", escape(name))).collect();
        card(html, "Where this was taken", "", &format!("<dl class=\"pairs\">{}</dl>", body.concat()));
    }
    if !input.units.is_empty() {
        card(html, "Units", "", &tables::units_table(&input.units).html(&|unit| palette.index(unit)));
    }
    card(html, "Notes", "", &list(&input.notes));
    html.push_str("</section>");
}

fn machine_pairs(machine: &Machine) -> Vec<(String, String)> {
    let cores = format!("{} ({})", machine.cores.len(), format::ranges(&machine.cores, 8));
    let mut pairs = vec![
        ("processor".to_owned(), escape(&machine.cpu)),
        ("cores this process may use".to_owned(), escape(&cores)),
        ("memory".to_owned(), format!("{} ({})", format::bytes(machine.memory_bytes), escape("1 GB = 10⁹ bytes"))),
        ("system".to_owned(), escape(&machine.os)),
    ];
    if !machine.features.is_empty() {
        pairs.push(("instruction sets".to_owned(), escape(&machine.features.join(", "))));
    }
    pairs.extend(machine.versions.iter().map(|(name, version)| (name.clone(), escape(version))));
    pairs
}

/// How each kind of number was got, in the look it has in the charts.
fn legend(html: &mut String) {
    html.push_str("<section class=\"card\" id=\"origins\"><h2>How the numbers were got</h2><dl class=\"legend\">");
    for (origin, text) in [
        (Origin::Measured, "Timed on the unit itself: a median, with its spread and count."),
        (Origin::Predicted, "Computed by a planner or its simulator from other numbers."),
        (Origin::Simulated, "From a machine description; the unit was not there."),
        (Origin::Emulated, "Timed on a real engine slowed on purpose to a stated rate."),
        (Origin::Declared, "Stated by the user, such as a power without a sensor."),
    ] {
        let _ = write!(
            html,
            "<dt><svg width=\"44\" height=\"18\" aria-hidden=\"true\"><rect class=\"u0 fill o-{origin}\" x=\"1\" y=\"1\" \
             width=\"42\" height=\"16\" rx=\"3\"/><rect class=\"pattern-{origin}\" x=\"1\" y=\"1\" width=\"42\" \
             height=\"16\" rx=\"3\"/></svg>{}</dt><dd>{text}</dd>",
            badge(origin)
        );
    }
    html.push_str("</dl></section>");
}
