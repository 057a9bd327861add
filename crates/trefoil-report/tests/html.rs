//! The report: parses, escapes, stands alone, stays small, and renders whatever part is missing.

#[path = "../examples/sample_report/sample.rs"]
#[allow(dead_code)] // each test file uses its part of the sample
mod sample;

use trefoil_core::Origin;
use trefoil_report::{ContenderKind, ContenderRow, ModelReport, ModelRow, Ratio, ReportInput, UnitRow, html};

const EVIL: &str = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;";

/// Checks that tags balance and attributes are quoted; returns the tag names in order.
fn parse(page: &str) -> Vec<String> {
    const VOID: [&str; 6] = ["meta", "link", "br", "input", "img", "hr"];
    let mut open: Vec<String> = Vec::new();
    let mut seen = Vec::new();
    let mut rest = page.strip_prefix("<!DOCTYPE html>").expect("the page begins with its doctype");
    while let Some(at) = rest.find('<') {
        rest = &rest[at + 1..];
        if let Some(close) = rest.strip_prefix('/') {
            let end = close.find('>').expect("a closing tag ends");
            let top = open.pop();
            assert_eq!(top.as_deref(), Some(&close[..end]), "closing tag out of order after {seen:?}");
            rest = &close[end + 1..];
            continue;
        }
        let name: String = rest.chars().take_while(char::is_ascii_alphanumeric).collect();
        assert!(!name.is_empty(), "a bare `<` before {:?}", rest.chars().take(60).collect::<String>());
        // Attributes: a `>` inside quotes does not end the tag.
        let mut quoted = false;
        let end = rest
            .char_indices()
            .find(|&(_, character)| {
                quoted ^= character == '"';
                assert!(character != '<', "a `<` inside the tag {name}");
                character == '>' && !quoted
            })
            .expect("a tag ends")
            .0;
        let tag = &rest[..end];
        rest = &rest[end + 1..];
        seen.push(name.clone());
        if name == "script" || name == "style" {
            let close = format!("</{name}>");
            let at = rest.find(&close).expect("raw text ends");
            rest = &rest[at + close.len()..];
        } else if !VOID.contains(&name.as_str()) && !tag.ends_with('/') {
            open.push(name);
        }
    }
    assert_eq!(open, Vec::<String>::new(), "every element is closed");
    seen
}

fn assert_stands_alone(page: &str) {
    for outside in ["http://", "https://", "src=", "@import", "url(http", "xmlns"] {
        assert!(!page.contains(outside), "the page refers to something outside: {outside}");
    }
}

#[test]
fn the_example_parses_and_stands_alone() {
    let input = sample::input();
    let page = html(&input);
    let tags = parse(&page);
    assert_stands_alone(&page);
    for wanted in ["svg", "table", "nav", "select", "script", "style", "title"] {
        assert!(tags.iter().any(|tag| tag == wanted), "{wanted}");
    }
    for words in [
        "1.07× faster than the best single unit (ort:CPU), interval 1.05–1.09, measured",
        "ort:CPU alone is best here",
        "numbers of different origin decide nothing",
        "No single unit here runs this model",
        "not of the machine",
        sample::BANNER,
    ] {
        assert!(page.contains(words), "{words}");
    }
}

#[test]
fn every_text_is_escaped() {
    let mut model = sample::full_model(EVIL, 12, 3, true, Ratio { median: 1.1, low: 1.0, high: 1.2 });
    let heat = model.heat.as_mut().unwrap();
    heat.rows[0].name = EVIL.into();
    heat.rows[1].kind = EVIL.into();
    heat.rows[2].cells[0] = trefoil_report::HeatCell::Failed { reason: EVIL.into() };
    heat.units[0] = EVIL.into();
    model.segments[0].kinds = EVIL.into();
    model.segments[0].unit = EVIL.into();
    model.transfers[0].tensor = EVIL.into();
    model.tasks[0].what = EVIL.into();
    model.tasks[0].operators = EVIL.into();
    model.memory[0].name = EVIL.into();
    model.notes.push(EVIL.into());
    model.row.contenders[0].name = EVIL.into();
    model.row.contenders[0].note = Some(EVIL.into());
    model.predicted.as_mut().unwrap().lanes[0].name = EVIL.into();
    model.measured.as_mut().unwrap().lanes[0].spans[0].label = EVIL.into();
    model.plan.as_mut().unwrap().method = EVIL.into();
    let mut machine = sample::machine();
    machine.cpu = EVIL.into();
    machine.versions.insert(EVIL.into(), EVIL.into());
    let unit = UnitRow { unit: EVIL.into(), reason: Some(EVIL.into()), ..sample::units()[0].clone() };
    let input = ReportInput {
        title: EVIL.into(),
        command: Some(EVIL.into()),
        generated_at: Some(EVIL.into()),
        banner: Some(EVIL.into()),
        machine: Some(machine),
        units: vec![unit],
        models: vec![model.clone(), model],
        notes: vec![EVIL.into()],
    };
    let page = html(&input);
    let tags = parse(&page);
    assert!(!page.contains("<script>alert") && !page.contains("<img"), "markup came through");
    // One script of ours, one block of data per heat table; none was cut short by the text.
    assert_eq!(tags.iter().filter(|tag| *tag == "script").count(), 3);
    assert!(page.contains("&lt;/script&gt;&lt;script&gt;alert(1)"));
    assert!(page.contains("\\u003c/script\\u003e"));
}

#[test]
fn heat_data_is_complete_json() {
    let model = sample::full_model("m", 300, 3, true, Ratio { median: 1.1, low: 1.0, high: 1.2 });
    let rows = model.heat.as_ref().unwrap().rows.clone();
    let page = html(&ReportInput { models: vec![model], ..ReportInput::default() });
    let start = page.find("id=\"heat-data-0\">").unwrap() + "id=\"heat-data-0\">".len();
    let data = &page[start..start + page[start..].find("</script>").unwrap()];
    let data: serde_json::Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["rows"].as_array().unwrap().len(), rows.len());
    for (found, row) in data["rows"].as_array().unwrap().iter().zip(&rows) {
        assert_eq!(found[1], row.name);
        for (cell, want) in found[3].as_array().unwrap().iter().zip(&row.cells) {
            match want.ms() {
                Some(ms) => {
                    assert!((cell[0].as_f64().unwrap() / ms - 1.0).abs() < 1e-4);
                    assert_eq!(cell[1], trefoil_report::format::time(ms));
                }
                None => assert!(cell.as_i64().unwrap() <= 0),
            }
        }
    }
    assert!(data["reasons"].as_array().unwrap().iter().any(|reason| reason.as_str().unwrap().contains("CumSum")));
}

#[test]
fn five_thousand_operators_stay_below_two_megabytes() {
    let model = sample::full_model("large", 5000, 12, true, Ratio { median: 1.0, low: 0.9, high: 1.1 });
    let page = html(&ReportInput { models: vec![model], ..ReportInput::default() });
    parse(&page);
    assert!(page.len() < 2_000_000, "{} bytes", page.len());
}

#[test]
fn missing_parts_leave_no_hole() {
    let ratio = Ratio { median: 1.1, low: 1.05, high: 1.2 };
    let full = || sample::full_model("m", 10, 3, false, ratio);
    let bare =
        || ModelReport::new(ModelRow { model: "bare".into(), operators: 3, distinct: 2, contenders: Vec::new() });
    let page = |model| html(&ReportInput { models: vec![model], ..ReportInput::default() });

    let empty = html(&ReportInput::default());
    parse(&empty);
    assert!(empty.contains("This report holds no model") && empty.contains("<title>Trefoil report</title>"));

    let only_names = page(bare());
    parse(&only_names);
    assert!(only_names.contains("Not compared yet") && !only_names.contains("<h3>"));

    let only_plan = page(ModelReport { plan: full().plan, predicted: full().predicted, ..bare() });
    parse(&only_plan);
    assert!(only_plan.contains("it was not run with a trace") && only_plan.contains("By the plan&#39;s timeline"));

    let only_trace = page(ModelReport { measured: full().measured, ..bare() });
    parse(&only_trace);
    assert!(only_trace.contains("What the run did"));

    let no_trace = page(ModelReport { measured: None, ..full() });
    parse(&no_trace);

    let failed = ContenderRow::failed("ort:GPU", ContenderKind::Single, "no GPU here");
    let mut model = bare();
    model.row.contenders = vec![failed];
    let nothing_ran = page(model);
    parse(&nothing_ran);
    assert!(nothing_ran.contains("no GPU here"));

    let mut odd = full();
    odd.row.contenders[0].ms = Some(f64::NAN);
    odd.measured.as_mut().unwrap().lanes[0].spans[0].end_ms = f64::INFINITY;
    odd.predicted.as_mut().unwrap().lanes.clear();
    odd.heat.as_mut().unwrap().units.clear();
    parse(&page(odd));
}

#[test]
fn simulated_numbers_carry_label_and_hatch() {
    let page = html(&ReportInput {
        models: vec![sample::full_model("m", 24, 3, true, Ratio { median: 1.1, low: 1.0, high: 1.2 })],
        ..ReportInput::default()
    });
    assert!(page.contains("b-simulated") && page.contains("class=\"pattern-simulated\""));
    assert!(page.contains("hatch-simulated\"") && page.contains("id=\"hatch-simulated\""));
    // A simulated unit's lane is simulated even in the trace of a run whose other lanes were measured.
    let model = sample::full_model("m", 24, 3, true, Ratio { median: 1.1, low: 1.0, high: 1.2 });
    let trace = model.measured.unwrap();
    assert_eq!(trefoil_report::lane_origin(&trace, "sim:example/NPU"), Origin::Simulated);
    assert_eq!(trefoil_report::timeline_origin(&trace), Origin::Simulated);
}
