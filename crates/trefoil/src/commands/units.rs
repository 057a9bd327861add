//! `trefoil units`: what this machine offers, and what would make the rest available.

use crate::cli::UnitsArgs;
use crate::context::{print, print_json, width};
use crate::error::CliError;
use serde_json::json;
use trefoil_report::{TableFormat, UnitRow, units_table};
use trefoil_units::Availability;

/// All units as rows.
pub fn unit_rows() -> Vec<UnitRow> {
    trefoil_units::list()
        .into_iter()
        .map(|report| {
            let (version, reason, fix) = match report.availability {
                Availability::Available { version, .. } => (Some(version), None, None),
                Availability::Unavailable { reason, fix } => (None, Some(reason), Some(fix)),
            };
            UnitRow {
                unit: report.unit.address.to_string(),
                available: version.is_some(),
                simulated: report.unit.simulated,
                device: report.unit.description,
                version,
                reason,
                fix,
            }
        })
        .collect()
}

/// Runs the command.
pub fn run(args: &UnitsArgs) -> Result<(), CliError> {
    if let Some(unit) = &args.quiet {
        let code = i32::from(trefoil_units::resolve(unit).is_err());
        std::process::exit(code);
    }
    let rows = unit_rows();
    if args.json {
        return print_json(&json!({ "machine": trefoil_units::machine(), "units": rows }));
    }
    print(&units_table(&rows).render(TableFormat::Text, width()))
}
