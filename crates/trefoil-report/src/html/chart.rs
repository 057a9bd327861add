//! The contenders' bars with spread, and the stacked bar of totals. Widths are percentages, so that charts scale with
//! the page without distorting their text.

use super::{Palette, badge, escape::escape};
use crate::format;
use crate::rows::{ContenderKind, ContenderRow};
use crate::totals::Totals;
use std::fmt::Write as _;

/// Bars from zero on one linear axis: time, p10–p90 whisker, a diamond where the prediction was.
pub(super) fn contenders(rows: &[ContenderRow], palette: &Palette) -> String {
    let largest = rows
        .iter()
        .flat_map(|row| [row.ms, row.spread_ms.map(|(_, high)| high), row.predicted_ms])
        .flatten()
        .filter(|ms| ms.is_finite())
        .fold(0.0, f64::max);
    if largest <= 0.0 {
        return String::new();
    }
    let percent = |ms: f64| (ms / largest * 100.0).clamp(0.0, 100.0);
    let mut html = String::from("<div class=\"bars\">");
    for row in rows {
        let color = if row.kind == ContenderKind::Single { palette.index(&row.name) } else { super::PLAN_COLOR };
        let name = if row.kind == ContenderKind::Plan { format!("plan: {}", row.name) } else { row.name.clone() };
        let tip = tooltip(row, &name);
        let winner = if row.winner { " winner" } else { "" };
        let _ = write!(
            html,
            "<div class=\"bar-row{winner}\"><div class=\"bar-name\">{}{}</div><div class=\"bar-track\">",
            escape(&name),
            if row.winner { " <span class=\"chip\">chosen</span>" } else { "" }
        );
        if row.ms.is_none() && row.predicted_ms.is_none() {
            html.push_str("</div><div class=\"bar-value muted\">did not run</div></div>");
            continue;
        }
        let _ = write!(html, "<svg width=\"100%\" height=\"28\" role=\"img\"><title>{}</title>", escape(&tip));
        if let Some(ms) = row.ms {
            let width = percent(ms);
            let _ = write!(
                html,
                "<rect class=\"u{color} fill o-{origin}\" x=\"0\" y=\"4\" width=\"{width:.2}%\" height=\"20\" rx=\"3\"/>\
                 <rect class=\"pattern-{origin}\" x=\"0\" y=\"4\" width=\"{width:.2}%\" height=\"20\" rx=\"3\"/>",
                origin = row.origin
            );
            if let Some((low, high)) = row.spread_ms {
                let (low, high) = (percent(low), percent(high));
                let _ = write!(
                    html,
                    "<g class=\"whisker\"><line x1=\"{low:.2}%\" x2=\"{high:.2}%\" y1=\"14\" y2=\"14\"/>\
                     <line x1=\"{low:.2}%\" x2=\"{low:.2}%\" y1=\"9\" y2=\"19\"/>\
                     <line x1=\"{high:.2}%\" x2=\"{high:.2}%\" y1=\"9\" y2=\"19\"/></g>"
                );
            }
        }
        if let Some(predicted) = row.predicted_ms.filter(|ms| ms.is_finite()) {
            let _ = write!(
                html,
                "<svg class=\"over\" x=\"{:.2}%\" y=\"14\"><path class=\"predicted-mark\" d=\"M0-9 6 0 0 9-6 0Z\"/></svg>",
                percent(predicted)
            );
        }
        html.push_str("</svg></div>");
        match row.ms {
            Some(ms) => {
                let _ =
                    write!(html, "<div class=\"bar-value\">{} {}</div>", escape(&format::time(ms)), badge(row.origin));
            }
            None => html.push_str("<div class=\"bar-value muted\">did not run</div>"),
        }
        html.push_str("</div>");
    }
    html.push_str("</div>");
    let has_spread = rows.iter().any(|row| row.spread_ms.is_some());
    let has_prediction = rows.iter().any(|row| row.predicted_ms.is_some());
    let mut keys = vec!["Bars start at zero and show the median."];
    if has_spread {
        keys.push("Whiskers: 10th to 90th percentile.");
    }
    if has_prediction {
        keys.push("Diamond: what the planner predicted.");
    }
    let _ = write!(html, "<p class=\"note\">{}</p>", keys.join(" "));
    html
}

fn tooltip(row: &ContenderRow, name: &str) -> String {
    let mut lines = vec![name.to_owned()];
    match row.ms {
        Some(ms) => lines.push(format!("{}, {}", format::time(ms), row.origin)),
        None => lines.push("did not run".to_owned()),
    }
    if let Some((low, high)) = row.spread_ms {
        let runs = row.count.map_or_else(String::new, |count| format!(", {}", format::plural(count as usize, "run")));
        lines.push(format!("p10–p90 {}{runs}", format::time_range(low, high)));
    }
    if let Some(predicted) = row.predicted_ms {
        let error = row.error().map_or_else(String::new, |error| format!(", error {}", format::signed_percent(error)));
        lines.push(format!("predicted {}{error}", format::time(predicted)));
    }
    lines.extend(row.note.clone());
    lines.join("\n")
}

/// One stacked bar whose parts are the totals' rows.
pub(super) fn totals(totals: &Totals, palette: &Palette) -> String {
    if totals.total_ms <= 0.0 || totals.rows.iter().any(|row| row.ms < 0.0) {
        // A negative `other` (the caller's clock saw less than the trace) cannot be drawn; the table shows it.
        return String::new();
    }
    let mut html = String::from("<svg class=\"stack\" width=\"100%\" height=\"22\" role=\"img\">");
    let _ = write!(html, "<title>Where {} go, {}</title>", escape(&format::time(totals.total_ms)), totals.origin);
    let mut at = 0.0;
    for row in &totals.rows {
        let width = row.ms / totals.total_ms * 100.0;
        let color = match &row.unit {
            Some(unit) if row.name.starts_with("compute") => palette.index(unit),
            _ if row.name.starts_with("compute") => super::PLAN_COLOR,
            _ => super::NEUTRAL_COLOR,
        };
        let light = if row.name == "other" { " faint" } else { "" };
        let tip =
            format!("{}\n{} of {}, {}", row.name, format::time(row.ms), format::time(totals.total_ms), row.origin);
        let _ = write!(
            html,
            "<g><title>{}</title><rect class=\"u{color} fill{light}\" x=\"{at:.3}%\" y=\"0\" width=\"{width:.3}%\" \
             height=\"22\"/><rect class=\"pattern-{}\" x=\"{at:.3}%\" y=\"0\" width=\"{width:.3}%\" height=\"22\"/></g>",
            escape(&tip),
            row.origin
        );
        at += width;
    }
    html.push_str("</svg>");
    html
}
