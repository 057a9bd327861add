//! `trefoil inspect`: a model's operators.

use crate::cli::InspectArgs;
use crate::context::{self, print, print_json, width};
use crate::error::CliError;
use serde_json::json;
use std::collections::BTreeSet;
use trefoil_report::{TableFormat, operator_rows, operators_table};

/// Runs the command.
pub fn run(args: &InspectArgs) -> Result<(), CliError> {
    if let Some(folder) = &args.extract {
        trefoil_files::check_new_folder(folder).map_err(CliError::file("write to", folder))?;
    }
    let options = context::prepare_options(&args.model)?;
    let prepared = trefoil_profile::prepare_model(&args.model.model, &options, context::stop_flag())?;
    let graph = prepared.graph(args.model.granularity.into(), &[])?;
    if let Some(folder) = &args.extract {
        for id in graph.ids() {
            prepared.prepared.extract(&graph, &BTreeSet::from([id]), folder)?;
        }
    }
    let rows = operator_rows(&graph);
    if args.json {
        return print_json(&json!({
            "model": graph.model,
            "fingerprint": graph.fingerprint,
            "granularity": graph.granularity,
            "distinct": graph.distinct(),
            "inputs": prepared.prepared.inputs(),
            "outputs": prepared.prepared.outputs(),
            "reference": prepared.reference,
            "operators": graph.operators,
            "tensors": graph.tensors,
        }));
    }
    let mut text = format!(
        "{}: {} operators ({} distinct) at granularity {}, reference values from {}\n",
        graph.model,
        graph.len(),
        graph.distinct(),
        graph.granularity,
        prepared.reference.description
    );
    text += &operators_table(&rows).render(TableFormat::Text, width());
    print(&text)
}
