//! Writes an example report and trace from synthetic numbers into a folder (default: the current one):
//! `cargo run --release -p trefoil-report --example sample_report -- /tmp`.

mod sample;

use std::path::PathBuf;
use trefoil_report::{TableFormat, TraceMeta, chrome_trace, html, model_table, summary_table, units_table};

fn main() -> std::io::Result<()> {
    let folder = PathBuf::from(std::env::args().nth(1).unwrap_or_else(|| ".".to_owned()));
    let input = sample::input();
    println!("{}\n", sample::BANNER);
    println!("{}", units_table(&input.units).render(TableFormat::Text, None));
    let rows: Vec<_> = input.models.iter().map(|model| model.row.clone()).collect();
    println!("{}", summary_table(&rows).render(TableFormat::Text, None));
    println!("{}", model_table(&rows[0]).render(TableFormat::Text, None));
    let model = &input.models[0];
    let meta = TraceMeta {
        title: format!("{} (synthetic example)", model.row.model),
        facts: std::collections::BTreeMap::new(),
        tasks: model.tasks.clone(),
    };
    let trace = chrome_trace(model.predicted.as_ref(), model.measured.as_ref(), &meta);
    for (name, text) in [("sample_report.html", html(&input)), ("sample_trace.json", trace)] {
        let path = folder.join(name);
        std::fs::write(&path, text)?;
        println!("wrote {}", path.display());
    }
    Ok(())
}
