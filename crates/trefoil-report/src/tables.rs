//! The tables that the command line prints and the report shows.

use crate::collect::{HeatCell, HeatTable, OperatorRow, UnitTotal};
use crate::format;
use crate::planned::{SegmentRow, TransferRow};
use crate::rows::{ContenderKind, ContenderRow, MemoryRow, ModelRow, UnitRow, Verdict};
use crate::table::{Cell, Table};
use crate::totals::Totals;
use std::collections::BTreeMap;
use trefoil_core::{OperatorClass, Origin};

/// Explains `*` and `~`.
const MARKS_NOTE: &str = "* fastest unit of the row; ~ noisy (p90 − p10 over 30% of the median)";

/// `trefoil units`: unit, state, device, version, reason and fix.
pub fn units_table(rows: &[UnitRow]) -> Table {
    let mut table = Table::new(&["unit", "state", "device", "version", "reason", "fix"]).titled("Units");
    for row in rows {
        let text = |value: &Option<String>| Cell::text(value.as_deref().unwrap_or_default());
        table.push(vec![
            Cell::unit(&row.unit),
            Cell::text(row.state()),
            text(&row.device),
            text(&row.version),
            text(&row.reason),
            text(&row.fix),
        ]);
    }
    table.without_empty_columns()
}

/// A table of plain texts: `headings` as [`Table`] takes them (a leading `>` aligns right), and per cell whether it is the
/// best of its kind. For tables that only one command prints.
pub fn text_table(title: &str, headings: &[String], rows: Vec<Vec<(String, bool)>>) -> Table {
    let headings: Vec<&str> = headings.iter().map(String::as_str).collect();
    let mut table = Table::new(&headings).titled(title);
    for row in rows {
        table.push(row.into_iter().map(|(text, best)| Cell::text(text).best(best)).collect());
    }
    table
}

/// `trefoil inspect`: operators with shapes and sizes, and a total row.
pub fn operators_table(rows: &[OperatorRow]) -> Table {
    let headings =
        [">#", "operator", "kind", ">nodes", "bound", ">operations", ">weights", ">same", "inputs", "outputs"];
    let mut table = Table::new(&headings).titled("Operators");
    for row in rows {
        table.push(vec![
            Cell::text(row.id.to_string()),
            Cell::text(&row.name),
            Cell::text(&row.kind),
            Cell::text(row.nodes.to_string()),
            Cell::text(class_name(row.class)),
            Cell::text(row.flops.map_or_else(|| format::ABSENT.to_owned(), format::count)),
            Cell::text(format::bytes(row.weight_bytes)),
            Cell::text(row.same.to_string()),
            Cell::text(&row.inputs),
            Cell::text(&row.outputs),
        ]);
    }
    let known = rows.iter().filter_map(|row| row.flops).fold(0, u64::saturating_add);
    let unknown = rows.iter().filter(|row| row.flops.is_none()).count();
    table.push_total(vec![
        Cell::text(""),
        Cell::text(format!("total: {}", format::plural(rows.len(), "operator"))),
        Cell::text(""),
        Cell::text(rows.iter().map(|row| row.nodes).sum::<usize>().to_string()),
        Cell::text(""),
        Cell::text(format::count(known)),
        Cell::text(format::bytes(rows.iter().map(|row| row.weight_bytes).sum())),
        Cell::text(""),
        Cell::text(""),
        Cell::text(""),
    ]);
    let more = if unknown == 0 { String::new() } else { format!("; unknown for {unknown}, which the total lacks") };
    table.note(format!(
        "operations: multiply and add counted apart (1 k = 10³){more}; same: operators with equal signature, measured once; {}",
        format::SIZE_NOTE
    ));
    table
}

fn class_name(class: OperatorClass) -> &'static str {
    match class {
        OperatorClass::Compute => "compute",
        OperatorClass::Memory => "memory",
    }
}

/// A profile: operators × units with the fastest marked, failures by reason below, noise flagged, and the sum per unit.
/// At most `limit` rows, the slowest by their best unit first cut, stay in graph order; the sum covers all rows.
pub fn profile_table(heat: &HeatTable, limit: Option<usize>) -> Table {
    let mut table = Table::new(&[">#", "operator", "kind"]).titled("Operators alone on each unit");
    for unit in &heat.units {
        table.push_column(unit, true);
    }
    let shown = slowest(heat, limit);
    let mut failures: BTreeMap<(usize, &str), Vec<u32>> = BTreeMap::new();
    for &index in &shown {
        let row = &heat.rows[index];
        let best = row.best();
        let mut cells = vec![Cell::text(row.id.to_string()), Cell::text(&row.name), Cell::text(&row.kind)];
        for (unit, cell) in row.cells.iter().enumerate() {
            cells.push(match cell {
                HeatCell::Time { ms, origin, noisy, .. } => {
                    let text = format!("{}{}", if *noisy { "~" } else { "" }, format::time(*ms));
                    Cell::number(text, *origin).best(best == Some(unit) && heat.units.len() > 1)
                }
                HeatCell::Failed { .. } => Cell::text("fails"),
                HeatCell::Unknown => Cell::text("not tried"),
            });
        }
        table.push(cells);
    }
    for row in &heat.rows {
        for (unit, cell) in row.cells.iter().enumerate() {
            if let HeatCell::Failed { reason } = cell {
                failures.entry((unit, reason)).or_default().push(row.id);
            }
        }
    }
    let hidden = heat.rows.len() - shown.len();
    let name = format!("sum of all {}", format::plural(heat.rows.len(), "operator"));
    let mut sums = vec![Cell::text(""), Cell::text(name), Cell::text("")];
    for unit in 0..heat.units.len() {
        let timed = heat.rows.iter().filter_map(|row| match &row.cells[unit] {
            HeatCell::Time { ms, origin, .. } => Some((*ms, *origin)),
            _ => None,
        });
        let (sum, count, origin) =
            timed.fold((0.0, 0, None), |(sum, count, _), (ms, origin)| (sum + ms, count + 1, Some(origin)));
        let missing = heat.rows.len() - count;
        let lacks = if missing == 0 { String::new() } else { format!(" (lacks {missing})") };
        sums.push(Cell::optional(
            origin.map(|_| format!("{}{lacks}", format::time(sum))),
            origin.unwrap_or(Origin::Measured),
        ));
    }
    table.push_total(sums);
    if hidden > 0 {
        table.note(format!("{hidden} faster operators are not listed; the sum counts them"));
    }
    table.note(MARKS_NOTE);
    for ((unit, reason), operators) in failures {
        table.note(format!("fails on {}, operators {}: {reason}", heat.units[unit], format::ranges(&operators, 8)));
    }
    table
}

/// Indices of the `limit` rows with the largest best time, in graph order; rows without any time come first.
fn slowest(heat: &HeatTable, limit: Option<usize>) -> Vec<usize> {
    let mut order: Vec<_> = (0..heat.rows.len()).collect();
    if let Some(limit) = limit.filter(|&limit| limit < order.len()) {
        let key = |index: usize| heat.rows[index].best_ms().unwrap_or(f64::INFINITY);
        order.sort_by(|&a, &b| key(b).total_cmp(&key(a)).then(a.cmp(&b)));
        order.truncate(limit);
        order.sort_unstable();
    }
    order
}

/// Per unit: operators alone + other = whole model.
pub fn unit_totals_table(rows: &[UnitTotal]) -> Table {
    let headings = ["unit", ">operators alone", ">other", ">whole model", ">in-place node times", "note"];
    let mut table = Table::new(&headings).titled("Operators alone against the whole model");
    for row in rows {
        let mut notes = Vec::new();
        if row.missing > 0 {
            notes.push(format!("lacks {} without a time here", format::plural(row.missing, "operator")));
        }
        notes.extend(row.failure.clone());
        table.push(vec![
            Cell::unit(&row.unit),
            Cell::number(format::time(row.operators_ms), row.origin),
            Cell::optional(row.other_ms().map(format::time), row.origin),
            Cell::optional(row.whole_ms.map(format::time), row.origin),
            Cell::optional(row.in_place_ms.map(format::time), row.origin),
            Cell::text(notes.join("; ")),
        ]);
    }
    table.note("operators alone + other = whole model; other is negative where fusion across operators saves time");
    table.without_empty_columns()
}

/// A plan's segments with a total row; with a trace also what each segment took.
pub fn plan_table(rows: &[SegmentRow]) -> Table {
    let headings = [
        ">segment",
        "unit",
        "operators",
        ">count",
        "kinds",
        ">plan",
        ">traced",
        ">energy",
        ">crossings in",
        ">bytes crossing",
    ];
    let mut table = Table::new(&headings).titled("Segments");
    for row in rows {
        table.push(vec![
            Cell::text(row.id.to_string()),
            Cell::unit(&row.unit),
            Cell::text(&row.operators),
            Cell::text(row.count.to_string()),
            Cell::text(&row.kinds),
            Cell::number(format::time(row.ms), row.origin),
            Cell::optional(row.traced_ms.map(format::time), row.traced_origin.unwrap_or(Origin::Measured)),
            Cell::optional(row.joules.map(|joules| format!("{joules:.3} J")), Origin::Predicted),
            Cell::text(row.crossings.to_string()),
            Cell::text(format::bytes(row.crossing_bytes)),
        ]);
    }
    let traced: Option<f64> = rows.iter().map(|row| row.traced_ms).sum();
    let joules: Option<f64> = rows.iter().map(|row| row.joules).sum();
    let traced_origin = sum_origin(rows.iter().filter_map(|row| row.traced_origin));
    table.push_total(vec![
        Cell::text(""),
        Cell::text("total"),
        Cell::text(""),
        Cell::text(rows.iter().map(|row| row.count).sum::<usize>().to_string()),
        Cell::text(""),
        Cell::number(format::time(rows.iter().map(|row| row.ms).sum()), sum_origin(rows.iter().map(|row| row.origin))),
        Cell::optional(traced.filter(|_| !rows.is_empty()).map(format::time), traced_origin),
        Cell::optional(joules.filter(|_| !rows.is_empty()).map(|joules| format!("{joules:.3} J")), Origin::Predicted),
        Cell::text(rows.iter().map(|row| row.crossings).sum::<usize>().to_string()),
        Cell::text(format::bytes(rows.iter().map(|row| row.crossing_bytes).sum())),
    ]);
    table.without_empty_columns()
}

/// The origin of a sum: the least direct of its parts', so that a simulated part makes the sum simulated.
fn sum_origin(origins: impl Iterator<Item = Origin>) -> Origin {
    let directness = |origin: &Origin| match origin {
        Origin::Measured => 0,
        Origin::Declared => 1,
        Origin::Predicted => 2,
        Origin::Emulated => 3,
        Origin::Simulated => 4,
    };
    origins.max_by_key(directness).unwrap_or(Origin::Predicted)
}

/// A plan's transfers with a total row.
pub fn transfers_table(rows: &[TransferRow]) -> Table {
    let mut table = Table::new(&["tensor", ">size", "from", "to", ">plan", ">traced"]).titled("Transfers");
    for row in rows {
        table.push(vec![
            Cell::text(&row.tensor),
            Cell::text(row.bytes.map_or_else(|| format::ABSENT.to_owned(), format::bytes)),
            Cell::unit(&row.from),
            Cell::unit(&row.to),
            Cell::number(format::time(row.ms), row.origin),
            Cell::optional(row.traced_ms.map(format::time), row.traced_origin.unwrap_or(Origin::Measured)),
        ]);
    }
    let traced: Option<f64> = rows.iter().map(|row| row.traced_ms).sum();
    table.push_total(vec![
        Cell::text(format!("total: {}", format::plural(rows.len(), "transfer"))),
        Cell::text(format::bytes(rows.iter().filter_map(|row| row.bytes).sum())),
        Cell::text(""),
        Cell::text(""),
        Cell::number(format::time(rows.iter().map(|row| row.ms).sum()), sum_origin(rows.iter().map(|row| row.origin))),
        Cell::optional(
            traced.filter(|_| !rows.is_empty()).map(format::time),
            sum_origin(rows.iter().filter_map(|row| row.traced_origin)),
        ),
    ]);
    table.without_empty_columns()
}

/// One model's comparison: every contender, and the verdict as a note.
pub fn model_table(model: &ModelRow) -> Table {
    let title =
        format!("{}: {}, {} distinct", model.model, format::plural(model.operators, "operator"), model.distinct);
    let mut table = contenders_table(&model.contenders).titled(title);
    table.note(Verdict::of(&model.contenders).text);
    table
}

/// Contenders: time, spread, count, prediction, error, crossings, ratio with interval.
pub fn contenders_table(contenders: &[ContenderRow]) -> Table {
    let headings = [
        "contender",
        ">time",
        ">p10–p90",
        ">runs",
        ">predicted",
        ">error",
        ">crossings",
        ">× best single",
        ">interval",
        "note",
    ];
    let mut table = Table::new(&headings).titled("Contenders");
    for row in contenders {
        let mut note = row.note.clone().unwrap_or_default();
        if row.winner {
            note = if note.is_empty() { "chosen".to_owned() } else { format!("chosen; {note}") };
        }
        table.push(vec![
            match row.kind {
                ContenderKind::Single => Cell::unit(&row.name),
                ContenderKind::Plan => Cell { text: format!("plan: {}", row.name), ..Cell::unit("plan") },
                ContenderKind::Literal => Cell { text: row.name.clone(), ..Cell::unit("plan") },
            },
            Cell::optional(row.ms.map(format::time), row.origin).best(row.winner),
            Cell::optional(row.spread_ms.map(|(low, high)| format::time_range(low, high)), row.origin),
            Cell::text(row.count.map_or_else(|| format::ABSENT.to_owned(), |count| count.to_string())),
            Cell::text(format::optional_time(row.predicted_ms)),
            Cell::text(row.error().map_or_else(|| format::ABSENT.to_owned(), format::signed_percent)),
            Cell::text(row.crossings.map_or_else(|| format::ABSENT.to_owned(), |count| count.to_string())),
            Cell::optional(row.ratio.map(|ratio| format::ratio(ratio.median)), row.origin),
            Cell::optional(row.ratio.map(|ratio| format::interval(ratio.low, ratio.high)), row.origin),
            Cell::text(note),
        ]);
    }
    if contenders.iter().any(|row| row.winner) {
        table.note("* what `run` chooses; × best single: its time over this contender's, above 1 is faster");
    } else if contenders.iter().any(|row| row.ratio.is_some()) {
        table.note("× best single: its time over this contender's, above 1 is faster");
    }
    table.without_empty_columns()
}

/// Several models, a line each: best single unit, plan, ratio with interval, prediction error.
pub fn summary_table(models: &[ModelRow]) -> Table {
    let headings = [
        "model",
        ">operators",
        ">distinct",
        "best single unit",
        ">its time",
        ">plan",
        ">predicted",
        ">error",
        ">crossings",
        ">× best single, interval",
        "chosen",
    ];
    let mut table = Table::new(&headings).titled("Models");
    for model in models {
        let single = model.best_single();
        let plan = model.best_plan();
        let single_origin = single.map_or(Origin::Measured, |row| row.origin);
        let plan_origin = plan.map_or(Origin::Measured, |row| row.origin);
        let ratio = plan.and_then(|row| row.ratio);
        let absent = || Cell::text(format::ABSENT);
        table.push(vec![
            Cell::text(&model.model),
            Cell::text(model.operators.to_string()),
            Cell::text(model.distinct.to_string()),
            single.map_or_else(absent, |row| Cell::unit(&row.name)),
            Cell::optional(single.and_then(|row| row.ms).map(format::time), single_origin),
            Cell::optional(plan.and_then(|row| row.ms).map(format::time), plan_origin),
            Cell::text(format::optional_time(plan.and_then(|row| row.predicted_ms))),
            plan.and_then(ContenderRow::error).map_or_else(absent, |error| Cell::text(format::signed_percent(error))),
            plan.and_then(|row| row.crossings).map_or_else(absent, |count| Cell::text(count.to_string())),
            Cell::optional(
                ratio.map(|ratio| {
                    format!("{} ({})", format::ratio(ratio.median), format::interval(ratio.low, ratio.high))
                }),
                plan_origin,
            ),
            model.contenders.iter().find(|row| row.winner).map_or_else(absent, |row| match row.kind {
                ContenderKind::Single => Cell::text(&row.name),
                ContenderKind::Plan | ContenderKind::Literal => Cell::text("plan"),
            }),
        ]);
    }
    table.note("× best single: the best single unit's time over the plan's, above 1 the plan is faster");
    table
}

/// Parts of a run that add up to its total.
pub fn totals_table(totals: &Totals) -> Table {
    let mut table = Table::new(&["part", ">time", ">share"]).titled("Where the time goes");
    let share = |ms: f64| {
        if totals.total_ms > 0.0 { format::percent(ms / totals.total_ms) } else { format::ABSENT.to_owned() }
    };
    for row in &totals.rows {
        let name = match &row.unit {
            Some(unit) => Cell { text: row.name.clone(), ..Cell::unit(unit) },
            None => Cell::text(&row.name),
        };
        table.push(vec![name, Cell::number(format::time(row.ms), row.origin), Cell::number(share(row.ms), row.origin)]);
    }
    table.push_total(vec![
        Cell::text("total"),
        Cell::number(format::time(totals.total_ms), totals.origin),
        Cell::number(share(totals.total_ms), totals.origin),
    ]);
    table.note("other: time of the run in which no operator, transfer or wait was recorded");
    table
}

/// Memory by purpose, with a total row.
pub fn memory_table(rows: &[MemoryRow]) -> Table {
    let mut table = Table::new(&["memory", ">size", "note"]).titled("Memory");
    for row in rows {
        table.push(vec![
            Cell::text(&row.name),
            Cell::number(format::bytes(row.bytes), row.origin),
            Cell::text(row.note.as_deref().unwrap_or_default()),
        ]);
    }
    table.push_total(vec![
        Cell::text("total"),
        Cell::number(
            format::bytes(rows.iter().map(|row| row.bytes).sum()),
            sum_origin(rows.iter().map(|row| row.origin)),
        ),
        Cell::text(""),
    ]);
    table.note(format::SIZE_NOTE);
    table.without_empty_columns()
}
