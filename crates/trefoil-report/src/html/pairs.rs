//! The heat map of model pairs, as a page of its own, and the same as CSV.

use super::escape::escape;
use crate::format;
use crate::rows::Ratio;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use trefoil_core::Machine;

/// Two models run together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PairRow {
    /// Indices in [`PairsInput::models`], the smaller one first.
    pub models: (usize, usize),
    /// The best arrangement that is no plan, and its milliseconds.
    pub baseline: Option<(String, f64)>,
    /// The plan, and its milliseconds; the baseline again when planning ended with it.
    pub plan: Option<(String, f64)>,
    /// Measured speed-up of the plan over the best baseline, from paired rounds; exactly 1 when it is the baseline.
    pub measured: Option<Ratio>,
    /// The same from predictions.
    pub predicted: Option<f64>,
    /// Relative error of the plan's prediction.
    pub error: Option<f64>,
    /// What any overlap could give at most over running one after the other, under isolated operator costs.
    pub cap: Option<f64>,
    /// Measured speed-up over running one after the other.
    pub over_serial: Option<f64>,
    /// Whether the plan is what would be used.
    pub used: bool,
    /// Why it is no more, or what failed.
    pub reason: String,
}

impl PairRow {
    /// Speed-up of what is used over the best baseline: the guard keeps it from falling below 1 by more than noise.
    pub fn effective(&self) -> Option<f64> {
        self.measured.map(|ratio| if self.used { ratio.median } else { 1.0 })
    }
}

/// Everything the page shows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PairsInput {
    /// Names.
    pub models: Vec<String>,
    /// Pairs, in any order.
    pub pairs: Vec<PairRow>,
    /// The machine.
    pub machine: Machine,
    /// The command line.
    pub command: String,
    /// When, in words.
    pub generated_at: String,
    /// Sentences below the map.
    pub notes: Vec<String>,
}

/// Geometric mean; `None` of nothing.
pub fn geometric_mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (mut sum, mut count) = (0.0, 0u32);
    for value in values.filter(|value| *value > 0.0 && value.is_finite()) {
        sum += value.ln();
        count += 1;
    }
    (count > 0).then(|| (sum / f64::from(count)).exp())
}

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:75rem;padding:0 1rem;color:#1c2430;\
background:#fff}table{border-collapse:collapse}th,td{padding:.3rem .55rem;text-align:right;border:1px solid #d5dae1;\
font-variant-numeric:tabular-nums}th{font-weight:600;background:#f3f5f8}th[scope=row]{text-align:left}.text{text-align:left}\
.scroll{overflow:auto;margin:1rem 0}.l0{background:#f3b4ab}.l1{background:#fbe3df}.l2{background:#eef0f3}.l3{background:#d9efdc}\
.l4{background:#a9dbb1}.l5{background:#6fc07d}.none{background:repeating-linear-gradient(45deg,#fff,#fff 4px,#eee 4px,#eee 8px)}\
.note{color:#566072}.predicted{font-style:italic}td[class^=l]{color:#14210f}\
@media(prefers-color-scheme:dark){body{background:#14181f;color:#dfe5ee}th{background:#1f2630}th,td{border-color:#343d4a}\
.note{color:#9aa6b8}.none{background:#1b2027}}";

/// Colour class: below 0.98 loses, up to 1.02 is level, then in steps.
pub(crate) fn level(speed_up: f64) -> usize {
    [0.98, 0.995, 1.02, 1.08, 1.15].iter().filter(|&&edge| speed_up >= edge).count()
}

/// The page: below the diagonal what was measured, above it what was predicted.
pub fn pairs_html(input: &PairsInput) -> String {
    let mut html = format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>Trefoil: pairs of models</title><style>{STYLE}</style></head><body><h1>Pairs of models</h1>\
         <p>Speed-up of the plan over the best of three: one model after the other, both at once under their backends’ own \
         threading, one model per core. Below the diagonal measured, above it <span class=\"predicted\">predicted</span>.</p>\
         <p class=\"note\">{} · {} cores · {} · {}<br><code>{}</code></p>",
        escape(&input.machine.cpu),
        input.machine.cores.len(),
        escape(&input.machine.os),
        escape(&input.generated_at),
        escape(&input.command),
    );
    html.push_str("<div class=\"scroll\"><table><thead><tr><th></th>");
    for name in &input.models {
        let _ = write!(html, "<th scope=\"col\">{}</th>", escape(name));
    }
    html.push_str("</tr></thead><tbody>");
    for (row, name) in input.models.iter().enumerate() {
        let _ = write!(html, "<tr><th scope=\"row\">{}</th>", escape(name));
        for column in 0..input.models.len() {
            cell(&mut html, input, row, column);
        }
        html.push_str("</tr>");
    }
    html.push_str("</tbody></table></div><h2>Every pair</h2>");
    table(&mut html, input);
    for note in &input.notes {
        let _ = write!(html, "<p>{}</p>", escape(note));
    }
    html.push_str("</body></html>\n");
    html
}

fn cell(html: &mut String, input: &PairsInput, row: usize, column: usize) {
    let key = (row.min(column), row.max(column));
    let Some(pair) = input.pairs.iter().find(|pair| pair.models == key) else {
        html.push_str("<td class=\"none\"></td>");
        return;
    };
    let title = escape(&pair.reason);
    let (value, class) =
        if row < column { (pair.predicted, " predicted") } else { (pair.measured.map(|m| m.median), "") };
    match value {
        Some(value) => {
            let text = format::ratio(value);
            let _ = write!(html, "<td class=\"l{}{class}\" title=\"{title}\">{text}</td>", level(value));
        }
        None => {
            let _ = write!(html, "<td class=\"none\" title=\"{title}\">{}</td>", format::ABSENT);
        }
    }
}

fn table(html: &mut String, input: &PairsInput) {
    html.push_str(
        "<div class=\"scroll\"><table><thead><tr><th>models</th><th>best baseline</th><th>its time (measured)</th><th>plan</th>\
         <th>its time (measured)</th><th>speed-up, interval</th><th>predicted</th><th>error</th><th>over serial</th><th>cap</th>\
         <th>used</th><th>why</th></tr></thead><tbody>",
    );
    for pair in &input.pairs {
        let [first, second] =
            [pair.models.0, pair.models.1].map(|at| input.models.get(at).cloned().unwrap_or_default());
        let absent = || format::ABSENT.to_owned();
        let named = |side: &Option<(String, f64)>| {
            let texts = side.as_ref().map(|(name, ms)| (escape(name), format::time(*ms)));
            let (name, ms) = texts.unwrap_or_else(|| (absent(), absent()));
            format!("<td class=\"text\">{name}</td><td>{ms}</td>")
        };
        let ratio = pair.measured.map_or_else(absent, |ratio| {
            format!("{} ({})", format::ratio(ratio.median), format::interval(ratio.low, ratio.high))
        });
        let _ = write!(
            html,
            "<tr><th scope=\"row\">{} + {}</th>{}{}<td>{ratio}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td>\
             <td class=\"text\">{}</td></tr>",
            escape(&first),
            escape(&second),
            named(&pair.baseline),
            named(&pair.plan),
            pair.predicted.map_or_else(absent, format::ratio),
            pair.error.map_or_else(absent, format::signed_percent),
            pair.over_serial.map_or_else(absent, format::ratio),
            pair.cap.map_or_else(absent, format::ratio),
            if pair.used { "yes" } else { "no" },
            escape(&pair.reason),
        );
    }
    html.push_str("</tbody></table></div>");
}

/// The same as CSV, one pair a line; numbers in full, nothing where nothing is known.
pub fn pairs_csv(input: &PairsInput) -> String {
    let mut csv = String::from(
        "first,second,baseline,baseline_ms,plan,plan_ms,speed_up,low,high,predicted,prediction_error,over_serial,cap,used,reason\n",
    );
    let number = |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
    for pair in &input.pairs {
        let name = |at: usize| quoted(input.models.get(at).map_or("", String::as_str));
        let side = |side: &Option<(String, f64)>| match side {
            Some((name, ms)) => format!("{},{ms}", quoted(name)),
            None => ",".to_owned(),
        };
        let _ = writeln!(
            csv,
            "{},{},{},{},{},{},{},{},{},{},{},{},{}",
            name(pair.models.0),
            name(pair.models.1),
            side(&pair.baseline),
            side(&pair.plan),
            number(pair.measured.map(|ratio| ratio.median)),
            number(pair.measured.map(|ratio| ratio.low)),
            number(pair.measured.map(|ratio| ratio.high)),
            number(pair.predicted),
            number(pair.error),
            number(pair.over_serial),
            number(pair.cap),
            pair.used,
            quoted(&pair.reason),
        );
    }
    csv
}

/// A CSV field.
fn quoted(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn input() -> PairsInput {
        let pair = PairRow {
            models: (0, 1),
            baseline: Some(("serial".to_owned(), 2.5)),
            plan: Some(("tail-cut".to_owned(), 2.0)),
            measured: Some(Ratio { median: 1.25, low: 1.2, high: 1.3 }),
            predicted: Some(1.01),
            error: Some(-0.02),
            cap: Some(1.9),
            over_serial: Some(1.25),
            used: true,
            reason: "a, \"b\" & <c>".to_owned(),
        };
        PairsInput {
            models: vec!["a<b".to_owned(), "c,d".to_owned(), "e".to_owned()],
            pairs: vec![pair],
            machine: Machine {
                cpu: "test".to_owned(),
                cores: vec![0, 1],
                memory_bytes: 1,
                os: "none".to_owned(),
                features: Vec::new(),
                versions: BTreeMap::new(),
            },
            command: "trefoil bench pairs".to_owned(),
            generated_at: "now".to_owned(),
            notes: vec!["note".to_owned()],
        }
    }

    #[test]
    fn the_map_has_a_measured_and_a_predicted_half() {
        let html = pairs_html(&input());
        assert!(html.contains("<td class=\"l5\" title=\"a, &quot;b&quot; &amp; &lt;c&gt;\">1.25×</td>"), "{html}");
        assert!(html.contains("<td class=\"l2 predicted\""), "{html}");
        assert!(html.contains("a&lt;b") && !html.contains("a<b") && !html.contains("http"), "{html}");
        // Three models have nine cells, of which one pair fills two.
        assert_eq!(html.matches("<td class=\"none\"></td>").count(), 7);
    }

    #[test]
    fn csv_fields_are_quoted() {
        let csv = pairs_csv(&input());
        let line = csv.lines().nth(1).unwrap();
        assert_eq!(
            line,
            "a<b,\"c,d\",serial,2.5,tail-cut,2,1.25,1.2,1.3,1.01,-0.02,1.25,1.9,true,\"a, \"\"b\"\" & <c>\""
        );
    }

    #[test]
    fn levels_and_means() {
        assert_eq!([0.9, 0.99, 1.0, 1.05, 1.1, 2.0].map(level), [0, 1, 2, 3, 4, 5]);
        assert!((geometric_mean([2.0, 8.0].into_iter()).unwrap() - 4.0).abs() < 1e-12);
        assert_eq!(geometric_mean([0.0, f64::NAN].into_iter()), None);
        let mut pair = input().pairs.remove(0);
        assert!(pair.effective().is_some_and(|ratio| ratio > 1.2));
        pair.used = false;
        assert!(pair.effective().is_some_and(|ratio| (ratio - 1.0).abs() < 1e-12));
    }
}
