//! Snapshots of every table and of the trace, from deterministic synthetic numbers.

#[path = "../examples/sample_report/sample.rs"]
#[allow(dead_code)] // each test file uses its part of the sample
mod sample;

use std::collections::BTreeMap;
use trefoil_report::{
    ModelReport, Ratio, Table, TableFormat, Totals, TraceMeta, check_chrome_trace, chrome_trace, memory_table,
    model_table, operator_rows, operators_table, plan_table, profile_table, summary_table, totals_table,
    transfers_table, unit_totals_table, units_table,
};

fn model(simulated: bool) -> ModelReport {
    sample::full_model("tiny", 12, 4, simulated, Ratio { median: 1.07, low: 1.05, high: 1.09 })
}

fn text(table: &Table) -> String {
    table.render(TableFormat::Text, None)
}

#[test]
fn tables_as_text() {
    let model = model(false);
    let graph = sample::graph("tiny", 12, 12);
    let totals = Totals::of(model.measured.as_ref().unwrap(), model.wall_ms);
    let all = [
        text(&units_table(&sample::units())),
        text(&operators_table(&operator_rows(&graph))),
        text(&profile_table(model.heat.as_ref().unwrap(), None)),
        text(&unit_totals_table(&model.unit_totals)),
        text(&plan_table(&model.segments)),
        text(&transfers_table(&model.transfers)),
        text(&model_table(&model.row)),
        text(&totals_table(&totals)),
        text(&memory_table(&model.memory)),
    ];
    insta::assert_snapshot!("tables_text", all.join("\n"));
}

#[test]
fn tables_with_simulated_units() {
    let model = model(true);
    let totals = Totals::of(model.measured.as_ref().unwrap(), model.wall_ms);
    let all = [
        text(&profile_table(model.heat.as_ref().unwrap(), Some(6))),
        text(&plan_table(&model.segments)),
        text(&model_table(&model.row)),
        text(&totals_table(&totals)),
    ];
    insta::assert_snapshot!("tables_simulated", all.join("\n"));
}

#[test]
fn summary_in_every_format() {
    let rows: Vec<_> = sample::input().models.into_iter().map(|model| model.row).collect();
    let table = summary_table(&rows);
    insta::assert_snapshot!("summary_text", text(&table));
    insta::assert_snapshot!("summary_markdown", table.render(TableFormat::Markdown, None));
    insta::assert_snapshot!("summary_bordered", table.render(TableFormat::Bordered, None));
    let narrow = units_table(&sample::units()).render(TableFormat::Text, Some(100));
    assert!(narrow.lines().all(|line| line.chars().count() <= 100), "{narrow}");
    insta::assert_snapshot!("units_100_columns", narrow);
}

#[test]
fn empty_tables_render() {
    for table in [units_table(&[]), operators_table(&[]), plan_table(&[]), transfers_table(&[]), summary_table(&[])] {
        for format in [TableFormat::Text, TableFormat::Bordered, TableFormat::Markdown] {
            assert!(table.render(format, Some(80)).ends_with('\n'));
        }
    }
}

#[test]
fn totals_add_up_in_every_sample() {
    for model in sample::input().models {
        for (timeline, wall) in [(&model.predicted, None), (&model.measured, model.wall_ms)] {
            let Some(timeline) = timeline else { continue };
            let totals = Totals::of(timeline, wall);
            let sum: f64 = totals.rows.iter().map(|row| row.ms).sum();
            assert!((sum - totals.total_ms).abs() < 1e-9, "{}: {sum} of {}", model.row.model, totals.total_ms);
            assert!(totals.rows.iter().all(|row| row.ms >= -1e-9));
        }
        for total in &model.unit_totals {
            if let (Some(other), Some(whole)) = (total.other_ms(), total.whole_ms) {
                assert!((total.operators_ms + other - whole).abs() < 1e-9);
            }
        }
    }
}

fn meta(model: &ModelReport) -> TraceMeta {
    TraceMeta {
        title: "tiny".into(),
        facts: BTreeMap::from([("machine".to_owned(), "synthetic".to_owned())]),
        tasks: model.tasks.clone(),
    }
}

#[test]
fn trace_with_both_lanes() {
    let model = model(true);
    let trace = chrome_trace(model.predicted.as_ref(), model.measured.as_ref(), &meta(&model));
    // Four segments and three transfers, predicted and measured.
    assert_eq!(check_chrome_trace(&trace).unwrap(), 14);
    insta::assert_snapshot!("trace", trace);
}

#[test]
fn partial_traces_are_valid() {
    let mut model = model(false);
    for (predicted, measured, spans) in
        [(None, None, 0), (model.predicted.as_ref(), None, 7), (None, model.measured.as_ref(), 7)]
    {
        let trace = chrome_trace(predicted, measured, &TraceMeta::default());
        assert_eq!(check_chrome_trace(&trace).unwrap(), spans);
    }
    // A span without a finite time is dropped and counted; a label with quotes survives.
    let timeline = model.measured.as_mut().unwrap();
    timeline.lanes[0].spans[0].end_ms = f64::NAN;
    timeline.lanes[0].spans[1].label = "a \"quoted\" </label>\n".into();
    let trace = chrome_trace(None, model.measured.as_ref(), &TraceMeta::default());
    assert_eq!(check_chrome_trace(&trace).unwrap(), 6);
    assert!(trace.contains("\"spans without a finite time\":1"), "{trace}");
}
