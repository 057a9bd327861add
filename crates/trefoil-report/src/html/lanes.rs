//! Predicted and measured lanes on one time axis. Positions are percentages of the axis, so zooming is only a wider SVG
//! inside a scrolling box: it works with touch, wheel and keyboard, and nothing needs to be laid out again.

use super::{NEUTRAL_COLOR, Palette, badge, escape::escape};
use crate::format;
use crate::planned::TaskDetail;
use crate::totals::lane_origin;
use std::fmt::Write as _;
use trefoil_core::{Origin, Span, SpanKind, Timeline};

const AXIS_HEIGHT: usize = 24;
const LANE_HEIGHT: usize = 48;
const LABEL_HEIGHT: usize = 19;
const BAR_HEIGHT: usize = 24;
/// Spans drawn per timeline; beyond that the shortest are left out (and counted), for the page must stay quick.
const MAX_SPANS: usize = 4000;

/// The chart, or nothing without any span.
pub(super) fn lanes(timelines: &[&Timeline], tasks: &[TaskDetail], palette: &Palette) -> String {
    let end = timelines.iter().map(|timeline| timeline.end_ms()).fold(0.0, f64::max);
    let rows: usize = timelines.iter().map(|timeline| timeline.lanes.len()).sum();
    if rows == 0 || end <= 0.0 || !end.is_finite() {
        return String::new();
    }
    let height = AXIS_HEIGHT + rows * LANE_HEIGHT + 6 * (timelines.len() - 1);
    let mut labels = String::new();
    let mut bars = String::new();
    let mut left_out = 0;
    let mut top = AXIS_HEIGHT;
    for (group, timeline) in timelines.iter().enumerate() {
        if group > 0 {
            let _ = write!(bars, "<line class=\"divider\" x1=\"0\" x2=\"100%\" y1=\"{0}\" y2=\"{0}\"/>", top + 2);
            top += 6;
        }
        let shortest = shortest_drawn(timeline);
        for lane in &timeline.lanes {
            let origin = lane_origin(timeline, &lane.name);
            let busy: f64 =
                lane.spans.iter().filter(|s| s.kind == SpanKind::Compute).map(|s| s.end_ms - s.start_ms).sum();
            let _ = write!(
                labels,
                "<div class=\"lane-label\" style=\"top:{top}px\"><i class=\"swatch u{}\"></i><b>{}</b> {} \
                 <span class=\"muted\">computing {}</span></div>",
                palette.index(&lane.name),
                escape(&lane.name),
                badge(origin),
                format::time(busy)
            );
            let y = top + LABEL_HEIGHT;
            let _ = write!(bars, "<rect class=\"track\" x=\"0\" width=\"100%\" y=\"{y}\" height=\"{BAR_HEIGHT}\"/>");
            for span in &lane.spans {
                let length = span.end_ms - span.start_ms;
                if !length.is_finite() || length < shortest {
                    left_out += 1;
                    continue;
                }
                push_span(&mut bars, span, origin, &lane.name, tasks.get(span.task.0 as usize), y, end, palette);
            }
            top += LANE_HEIGHT;
        }
    }
    let mut html = format!(
        "<div class=\"lanes\" data-end=\"{end}\"><div class=\"tools\"><span class=\"tool-group\">\
         <button type=\"button\" data-zoom=\"out\" aria-label=\"zoom out\">−</button>\
         <button type=\"button\" data-zoom=\"in\" aria-label=\"zoom in\">+</button>\
         <button type=\"button\" data-zoom=\"fit\">fit</button></span>\
         <span class=\"muted hint\">Ctrl + wheel zooms, arrow keys walk through spans</span></div>\
         <div class=\"lane-box\"><div class=\"lane-labels\">{labels}</div>\
         <div class=\"lane-scroll\" tabindex=\"0\" role=\"group\" aria-label=\"timeline\">\
         <svg class=\"lane-svg\" width=\"100%\" height=\"{height}\"><g class=\"ticks\">"
    );
    html.push_str(&ticks(end, height));
    let _ = write!(html, "</g>{bars}</svg></div></div></div>");
    if left_out > 0 {
        let _ =
            write!(html, "<p class=\"note\">{left_out} of the shortest spans are not drawn; totals count them.</p>");
    }
    html
}

/// Length of the shortest span that still is among the [`MAX_SPANS`] longest.
fn shortest_drawn(timeline: &Timeline) -> f64 {
    let mut lengths: Vec<_> =
        timeline.lanes.iter().flat_map(|lane| &lane.spans).map(|span| span.end_ms - span.start_ms).collect();
    if lengths.len() <= MAX_SPANS {
        return f64::NEG_INFINITY;
    }
    lengths.sort_by(|a, b| b.total_cmp(a));
    lengths[MAX_SPANS - 1]
}

/// Round tick positions: 1, 2 or 5 times a power of ten, at most eight of them.
fn ticks(end: f64, height: usize) -> String {
    let raw = end / 8.0;
    let power = 10_f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|&s| s >= raw).unwrap_or(raw);
    let mut svg = String::new();
    let mut index = 0_u32;
    while f64::from(index) * step <= end * 1.000_001 {
        let at = f64::from(index) * step;
        let x = at / end * 100.0;
        // The last label would be cut off at the right edge.
        let anchor = if index == 0 {
            "start"
        } else if x > 96.0 {
            "end"
        } else {
            "middle"
        };
        let _ = write!(
            svg,
            "<line x1=\"{x:.3}%\" x2=\"{x:.3}%\" y1=\"18\" y2=\"{height}\"/>\
             <text x=\"{x:.3}%\" y=\"12\" text-anchor=\"{anchor}\">{}</text>",
            format::time(at)
        );
        index += 1;
    }
    svg
}

#[allow(clippy::too_many_arguments)] // a drawing helper: every argument is a coordinate or a look-up
fn push_span(
    svg: &mut String,
    span: &Span,
    origin: Origin,
    lane: &str,
    detail: Option<&TaskDetail>,
    top: usize,
    end: f64,
    palette: &Palette,
) {
    let x = span.start_ms / end * 100.0;
    let width = (span.end_ms - span.start_ms) / end * 100.0;
    let label = if span.label.is_empty() { format!("task {}", span.task.0) } else { span.label.clone() };
    let (kind, color, y, height) = match span.kind {
        SpanKind::Compute => ("compute", palette.index(lane), top, BAR_HEIGHT),
        SpanKind::Transfer => ("transfer", NEUTRAL_COLOR, top + 4, BAR_HEIGHT - 8),
        SpanKind::Wait => ("wait", NEUTRAL_COLOR, top + 9, BAR_HEIGHT - 18),
    };
    let mut tip = vec![label.clone()];
    match detail {
        Some(detail) => {
            if detail.what != label {
                tip.push(format!("{} on {}", detail.what, detail.unit));
            } else if detail.unit != lane {
                tip.push(format!("on {}", detail.unit));
            }
            if !detail.operators.is_empty() {
                tip.push(format!("operators {}", detail.operators));
            }
            tip.push(format!("cost in the plan: {}", detail.origin));
        }
        None => tip.push(format!("{kind} on {lane}")),
    }
    tip.push(format!(
        "{} → {} = {}, {}",
        format::time(span.start_ms),
        format::time(span.end_ms),
        format::time(span.end_ms - span.start_ms),
        origin
    ));
    let _ = write!(
        svg,
        "<g class=\"span {kind} u{color}\"><title>{}</title><rect class=\"fill o-{origin}\" x=\"{x:.4}%\" y=\"{y}\" \
         width=\"{width:.4}%\" height=\"{height}\" rx=\"2\"/>",
        escape(&tip.join("\n")),
    );
    // A predicted bar built on simulated or emulated costs says so too.
    let pattern = match (origin, detail.map(|detail| detail.origin)) {
        (Origin::Simulated | Origin::Emulated, _) => Some(origin.to_string()),
        (_, Some(Origin::Simulated | Origin::Emulated)) => Some("dim".to_owned()),
        _ => None,
    };
    if let Some(pattern) = pattern {
        let _ = write!(
            svg,
            "<rect class=\"pattern-{pattern}\" x=\"{x:.4}%\" y=\"{y}\" width=\"{width:.4}%\" height=\"{height}\"/>"
        );
    }
    if span.kind == SpanKind::Compute && width > 0.2 {
        // The nested SVG clips the label at the bar's end. Narrow bars get theirs when zoomed in.
        let hidden = if width < 4.0 { " visibility=\"hidden\"" } else { "" };
        let _ = write!(
            svg,
            "<svg class=\"span-label o-{}\" data-width=\"{width:.3}\"{hidden} x=\"{x:.4}%\" y=\"{y}\" \
             width=\"{width:.4}%\" height=\"{height}\"><text x=\"6\" y=\"16\">{}</text></svg>",
            origin,
            escape(&label)
        );
    }
    svg.push_str("</g>");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        for end in [0.003, 1.0, 7.7, 123.0, 99_999.0] {
            let count = ticks(end, 10).matches("<text").count();
            assert!((3..=10).contains(&count), "{end}: {count}");
        }
    }
}
