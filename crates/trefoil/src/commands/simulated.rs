//! `trefoil plan --on sim:SOC`: a profile of a model on a machine that is not here.

use crate::cli::{ModelArgs, PlanArgs};
use crate::context;
use crate::error::CliError;
use crate::shapes::Shapes;
use std::path::Path;
use trefoil_core::{Profile, UnitAddress};
use trefoil_profile::PreparedModel;

/// A simulated profile of a model, on every device of `machine` (`sim:SOC`).
pub fn profile(args: &PlanArgs, path: &Path, machine: &str) -> Result<Profile, CliError> {
    let at = args.profiles.iter().position(|one| one == path).unwrap_or(0);
    let shapes = crate::shapes::of_models(&args.profiles, &args.shapes)?.remove(at);
    let model = ModelArgs {
        model: path.to_owned(),
        shapes: Vec::new(),
        granularity: args.granularity,
        input: "random".to_owned(),
        cache: None,
    };
    Ok(prepare(&model, shapes, machine)?.1)
}

/// A model prepared with these shapes, and its simulated profile on every device of `machine`.
pub fn prepare(model: &ModelArgs, shapes: Shapes, machine: &str) -> Result<(PreparedModel, Profile), CliError> {
    let Some(name) = machine.strip_prefix("sim:").filter(|name| !name.is_empty() && !name.contains('/')) else {
        return Err(CliError::Usage(format!(
            "--on `{machine}` is no simulated machine; write sim:SOC, like sim:lunar-lake, and choose units with -u"
        )));
    };
    let soc = trefoil_units::sim::description(name)?;
    let units: Vec<UnitAddress> =
        soc.devices.iter().map(|device| UnitAddress::new("sim", format!("{}/{}", soc.name, device.name))).collect();
    // Shapes come from one traced run on the embedded backend; nothing is timed.
    let options = context::prepare_with(model, shapes)?;
    let prepared = trefoil_profile::prepare_model(&model.model, &options, context::stop_flag())?;
    let graph = prepared.graph(model.granularity.into(), &[])?;
    let profile = trefoil_units::sim::simulated_profile(&graph, &units, "1970-01-01T00:00:00Z")?;
    Ok((prepared, profile))
}
