//! What is wrong with a question whatever will be measured for it, told before anything is.

use crate::cli::{MeasureArgs, ObjectiveArg, PlanningArgs};
use crate::error::CliError;
use trefoil_core::UnitAddress;
use trefoil_core::profile::above_idle;
use trefoil_plan::{METHODS, PlanError, SEVERAL_METHODS};

/// Planners of exactly two requests.
const OF_TWO: [&str; 3] = ["aligned", "joint", "joint-units"];

/// A question about one model on the units of `-u`.
///
/// # Errors
/// A method that there is not, or not for this objective; a pin to a unit that is not asked for; energy where nobody can tell the power.
pub fn check(planning: &PlanningArgs, units: &[UnitAddress], measure: &MeasureArgs) -> Result<(), CliError> {
    let method = planning.method.as_str();
    if let Some(unit) = method.strip_prefix("single:") {
        unit.parse::<UnitAddress>()?;
    } else if OF_TWO.contains(&method) {
        return Err(CliError::Usage(format!("method `{method}` plans two models, and one was given")));
    } else if !METHODS.iter().any(|known| known.name == method && !known.name.contains(':')) {
        return Err(unknown(method, METHODS.iter().map(|known| known.name)));
    }
    let objective = planning.objective();
    let streams = method == "pipeline" || method == "auto" && objective == ObjectiveArg::Throughput;
    let fits = match objective {
        ObjectiveArg::Latency => true,
        ObjectiveArg::Energy => !streams,
        ObjectiveArg::Throughput => streams,
    };
    if !fits {
        let objective = format!("{objective:?}").to_lowercase();
        return Err(PlanError::Objective { method: method.to_owned(), objective }.into());
    }
    if let Some(pin) = planning.pins.iter().find(|pin| !units.contains(&pin.unit)) {
        let have = units.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        return Err(PlanError::PinUnit { pin: pin.to_string(), have }.into());
    }
    check_power(objective, units, measure)
}

/// A question about so many models at once, with so many inferences of each in a round.
///
/// # Errors
/// As [`check`]; a method of two models for another number of them, or of one inference for several.
pub fn check_several(
    planning: &PlanningArgs,
    (models, items): (usize, u32),
    units: &[UnitAddress],
    measure: &MeasureArgs,
) -> Result<(), CliError> {
    let method = planning.method.as_str();
    let names = || SEVERAL_METHODS.iter().map(|known| known.name);
    if method != "auto" && !names().any(|known| known == method) {
        return Err(unknown(method, ["auto"].into_iter().chain(names())));
    }
    if OF_TWO.contains(&method) && models != 2 {
        return Err(CliError::Usage(format!("method `{method}` plans two models, not {models}")));
    }
    if OF_TWO.contains(&method) && items > 1 {
        return Err(CliError::Usage(format!("method `{method}` plans one inference of each model; leave --items out")));
    }
    check_power(planning.objective(), units, measure)
}

fn unknown<'n>(method: &str, have: impl Iterator<Item = &'n str>) -> CliError {
    PlanError::UnknownMethod { want: method.to_owned(), have: have.collect::<Vec<_>>().join(", ") }.into()
}

/// For energy, the power of every unit is declared (of its backend's cores, where it has only some of them) or can be measured.
fn check_power(objective: ObjectiveArg, units: &[UnitAddress], measure: &MeasureArgs) -> Result<(), CliError> {
    if let Some(idle) = measure.watts.iter().rfind(|watts| watts.unit == "idle") {
        measure.watts.iter().try_for_each(|unit| above_idle(&unit.unit, unit.watts, idle.watts))?;
    }
    if objective != ObjectiveArg::Energy || trefoil_profile::power_is_metered() {
        return Ok(());
    }
    let whole = |unit: &UnitAddress| UnitAddress { cores: Vec::new(), ..unit.clone() };
    let declared = |unit: &UnitAddress| {
        let addresses = measure.watts.iter().filter_map(|watts| watts.unit.parse::<UnitAddress>().ok());
        addresses.into_iter().any(|known| whole(&known) == whole(unit))
    };
    match units.iter().find(|unit| !declared(unit)) {
        Some(unit) => Err(CliError::Usage(format!(
            "no power is known of {unit}: there is no meter here that can be read; declare it with --watts {unit}=WATTS"
        ))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    /// The question of `trefoil run small.onnx …`.
    fn asked(arguments: &str) -> (PlanningArgs, Vec<UnitAddress>, MeasureArgs) {
        let arguments = ["trefoil", "run", "m.onnx"].into_iter().chain(arguments.split_whitespace());
        match crate::cli::Cli::parse_from(arguments).command {
            crate::cli::Command::Run(args) => (args.planning, args.units, args.measure),
            _ => unreachable!("parsed as run"),
        }
    }

    #[test]
    fn questions_about_one_model() {
        let told = |arguments: &str| {
            let (planning, units, measure) = asked(arguments);
            check(&planning, &units, &measure).map_err(|error| error.to_string())
        };
        for right in [
            "-u rten:CPU",
            "-u rten:CPU --method single:rten:CPU",
            "-u rten:CPU --objective throughput",
            "-u rten:CPU --method pipeline",
            "-u rten:CPU -u ort:CPU --pin Conv*=ort:CPU --method dag",
            "-u rten:CPU@0 --objective energy --watts rten:CPU=10",
        ] {
            assert_eq!(told(right), Ok(()), "{right}");
        }
        for (wrong, wanted) in [
            ("--method nothing", "there is no planning method `nothing`"),
            ("--method single:UNIT", "not a unit address"),
            ("--method joint", "method `joint` plans two models, and one was given"),
            ("--method pareto", "no planning method `pareto`"),
            ("--method dag --objective throughput", "throughput"),
            ("--pin Conv*=ort:CPU", "names a unit that is not among those planned for (rten:CPU)"),
        ] {
            let message = told(&format!("-u rten:CPU {wrong}")).unwrap_err();
            assert!(message.contains(wanted), "{wrong}: {message}");
        }
        let message = told("-u rten:CPU --watts idle=30 --watts rten:CPU=25").unwrap_err();
        assert!(message.contains("rten:CPU is said to draw 25 W while it works, less than the 30 W"), "{message}");
        if !trefoil_profile::power_is_metered() {
            assert!(
                told("-u rten:CPU --objective energy --watts idle=3").unwrap_err().contains("--watts rten:CPU=WATTS")
            );
        }
    }

    #[test]
    fn questions_about_several_models() {
        let told = |models: (usize, u32), arguments: &str| {
            let (planning, units, measure) = asked(arguments);
            check_several(&planning, models, &units, &measure).map_err(|error| error.to_string())
        };
        assert_eq!(told((2, 1), "-u rten:CPU --method joint"), Ok(()));
        assert_eq!(told((3, 4), "-u rten:CPU"), Ok(()));
        assert!(told((3, 1), "-u rten:CPU --method joint").unwrap_err().contains("plans two models, not 3"));
        assert!(told((2, 2), "-u rten:CPU --method joint").unwrap_err().contains("leave --items out"));
        assert!(told((2, 1), "-u rten:CPU --method dag").unwrap_err().contains("there are auto, concurrent, aligned"));
    }
}
