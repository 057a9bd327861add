//! The operator × unit heat table. A static part (the slowest operators) stands in the page, so that it prints and shows
//! without scripts; the script sorts, filters and extends it from a compact JSON copy of all rows.

use super::{
    Palette,
    escape::{escape, script_json},
};
use crate::collect::{HeatCell, HeatRow, HeatTable};
use crate::format;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use trefoil_core::Origin;

/// Rows in the page before the script runs.
const STATIC_ROWS: usize = 40;
/// Colour steps; the last is [`HOTTEST`] times the best or more.
const LEVELS: f64 = 8.0;
/// Ratio to the best at which the colour scale ends.
const HOTTEST: f64 = 16.0;

/// Colour level of a ratio to the row's best: 0 is the best, logarithmic, 8 the worst.
fn level(ratio: f64) -> u32 {
    (ratio.max(1.0).ln() / HOTTEST.ln() * LEVELS).ceil().min(LEVELS) as u32
}

/// The heat table of one model; `index` makes its ids unique.
pub(super) fn heat(table: &HeatTable, index: usize, palette: &Palette) -> String {
    let mut html = format!(
        "<div class=\"heat\" data-source=\"heat-data-{index}\"><div class=\"tools\">\
         <label class=\"field\">Filter <input type=\"search\" data-heat=\"filter\" placeholder=\"name or kind\"></label>\
         <label class=\"field\">Sort <select data-heat=\"sort\"><option value=\"time\">slowest first (best unit's time)\
         </option><option value=\"position\">position in the model</option>\
         <option value=\"ratio\">units differ most (slowest ÷ best)</option>"
    );
    for (unit, name) in table.units.iter().enumerate() {
        let _ = write!(html, "<option value=\"unit{unit}\">time on {}</option>", escape(name));
    }
    let _ = write!(
        html,
        "</select></label><button type=\"button\" data-heat=\"all\" hidden>show all</button>\
         <span class=\"muted\" data-heat=\"count\" aria-live=\"polite\">{} slowest of {}</span></div>",
        STATIC_ROWS.min(table.rows.len()),
        table.rows.len()
    );
    html.push_str(
        "<div class=\"scroll tall\" tabindex=\"0\" role=\"group\" aria-label=\"operators by unit\">\
         <table class=\"heat-table\"><thead><tr><th scope=\"col\" class=\"num\">#</th><th scope=\"col\">operator</th>\
         <th scope=\"col\">kind</th>",
    );
    let origins = column_origins(table);
    for (name, origin) in table.units.iter().zip(&origins) {
        let badge = origin.map(|origin| format!("<br>{}", super::badge(origin))).unwrap_or_default();
        let _ = write!(
            html,
            "<th scope=\"col\" class=\"num\"><i class=\"swatch u{}\"></i>{}{badge}</th>",
            palette.index(name),
            escape(name)
        );
    }
    html.push_str("<th scope=\"col\" class=\"num\">slowest ÷ best</th></tr></thead><tbody>");
    for &row in slowest(table).iter().take(STATIC_ROWS) {
        push_row(&mut html, &table.rows[row], table, &origins);
    }
    let _ = write!(
        html,
        "</tbody></table></div><div class=\"scale\" aria-hidden=\"true\"><span>best</span>{}<span>{}× the best or more\
         </span></div>",
        (0..=LEVELS as u32).map(|step| format!("<i class=\"h{step}\"></i>")).collect::<Vec<_>>().concat(),
        HOTTEST
    );
    html.push_str(
        "<p class=\"note\">Colour: logarithm of the time relative to the row's best unit. ● the plan places the operator \
         here. ~ noisy (p90 − p10 over 30% of the median). “fails” shows its reason on hover.</p>",
    );
    let data = script_json(&data(table, &origins).to_string());
    let _ = write!(html, "<script type=\"application/json\" id=\"heat-data-{index}\">{data}</script></div>");
    html
}

/// The origin that all of a column's times share.
fn column_origins(table: &HeatTable) -> Vec<Option<Origin>> {
    let column = |unit: usize| {
        let mut origins = table.rows.iter().filter_map(move |row| match &row.cells[unit] {
            HeatCell::Time { origin, .. } => Some(*origin),
            _ => None,
        });
        let first = origins.next()?;
        origins.all(|origin| origin == first).then_some(first)
    };
    (0..table.units.len()).map(column).collect()
}

/// Row indices, slowest (by their best unit) first; rows that run nowhere lead.
fn slowest(table: &HeatTable) -> Vec<usize> {
    let key = |row: usize| table.rows[row].best_ms().unwrap_or(f64::INFINITY);
    let mut order: Vec<_> = (0..table.rows.len()).collect();
    order.sort_by(|&a, &b| key(b).total_cmp(&key(a)).then(a.cmp(&b)));
    order
}

fn push_row(html: &mut String, row: &HeatRow, table: &HeatTable, origins: &[Option<Origin>]) {
    let _ = write!(
        html,
        "<tr><td class=\"num\">{}</td><td class=\"name\" title=\"{name}\">{name}</td><td class=\"kind\">{}</td>",
        row.id,
        escape(&row.kind),
        name = escape(&row.name)
    );
    let best = row.best_ms();
    for (unit, cell) in row.cells.iter().enumerate() {
        let placed = if row.placed == Some(unit) { "● " } else { "" };
        match cell {
            HeatCell::Time { ms, spread, count, origin, noisy } => {
                let ratio = best.filter(|&best| best > 0.0).map_or(1.0, |best| ms / best);
                let label = if origins[unit].is_some() { String::new() } else { format!(" {origin}") };
                let _ = write!(
                    html,
                    "<td class=\"num h{}{}\" title=\"{}\">{placed}{}{}{label}{}</td>",
                    level(ratio),
                    hatch(*origin),
                    escape(&format!(
                        "{} on {}\n{}, {origin}, {}× the best\nspread {}, {}",
                        row.name,
                        table.units[unit],
                        format::time(*ms),
                        two(ratio),
                        format::percent(*spread),
                        format::plural(*count as usize, "sample")
                    )),
                    if *noisy { "~" } else { "" },
                    format::time(*ms),
                    if ratio > 1.0 { format!("<small>{}×</small>", two(ratio)) } else { String::new() }
                );
            }
            HeatCell::Failed { reason } => {
                let _ = write!(html, "<td class=\"num fails\" title=\"{}\">{placed}fails</td>", escape(reason));
            }
            HeatCell::Unknown => {
                let _ = write!(html, "<td class=\"num fails\" title=\"not tried\">{placed}–</td>");
            }
        }
    }
    let contrast = row.contrast().map_or_else(|| format::ABSENT.to_owned(), |value| format!("{}×", two(value)));
    let _ = write!(html, "<td class=\"num\">{contrast}</td></tr>");
}

/// As the script writes it: two decimals below 10, one below 100, else none.
fn two(value: f64) -> String {
    if value < 9.995 {
        format!("{value:.2}")
    } else if value < 99.95 {
        format!("{value:.1}")
    } else {
        format!("{value:.0}")
    }
}

fn hatch(origin: Origin) -> &'static str {
    match origin {
        Origin::Simulated => " hatch-simulated",
        Origin::Emulated => " hatch-emulated",
        _ => "",
    }
}

/// Everything the script needs, compact: kinds and reasons once, a cell as `[ms, text, spread %, count, origin, noisy]`, a
/// failing one as `-(reason + 1)`, an unknown one as `0`.
fn data(table: &HeatTable, origins: &[Option<Origin>]) -> Value {
    const ORIGINS: [Origin; 5] =
        [Origin::Measured, Origin::Emulated, Origin::Simulated, Origin::Declared, Origin::Predicted];
    let mut kinds = Strings::default();
    let mut reasons = Strings::default();
    let rows: Vec<Value> = table
        .rows
        .iter()
        .map(|row| {
            let cells: Vec<Value> = row
                .cells
                .iter()
                .map(|cell| match cell {
                    HeatCell::Time { ms, spread, count, origin, noisy } => {
                        let origin = ORIGINS.iter().position(|other| other == origin).unwrap_or(0);
                        json!([
                            significant(*ms),
                            format::time(*ms),
                            (spread * 1000.0).round() / 10.0,
                            count,
                            origin,
                            u8::from(*noisy)
                        ])
                    }
                    HeatCell::Failed { reason } => json!(-(reasons.index(reason) as i64) - 1),
                    HeatCell::Unknown => json!(0),
                })
                .collect();
            let placed = row.placed.map_or(-1, |unit| unit as i64);
            json!([row.id, row.name, kinds.index(&row.kind), cells, placed])
        })
        .collect();
    json!({
        "units": table.units,
        "kinds": kinds.list,
        "reasons": reasons.list,
        "origins": ORIGINS.map(|origin| origin.to_string()),
        "shared": origins.iter().map(Option::is_some).collect::<Vec<_>>(),
        "rows": rows,
    })
}

/// Five significant digits: enough to sort and divide by, half the bytes.
fn significant(value: f64) -> f64 {
    format!("{value:.4e}").parse().unwrap_or(value)
}

#[derive(Default)]
struct Strings {
    list: Vec<String>,
    known: BTreeMap<String, usize>,
}

impl Strings {
    fn index(&mut self, text: &str) -> usize {
        if let Some(&index) = self.known.get(text) {
            return index;
        }
        self.known.insert(text.to_owned(), self.list.len());
        self.list.push(text.to_owned());
        self.list.len() - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_logarithmic() {
        assert_eq!([level(1.0), level(1.01), level(4.0), level(16.0), level(500.0)], [0, 1, 4, 8, 8]);
    }

    #[test]
    fn numbers_keep_five_digits() {
        let texts = [1.234_567_8, 0.0, 123_456.0].map(|value| significant(value).to_string());
        assert_eq!(texts, ["1.2346", "0", "123460"]);
    }
}
