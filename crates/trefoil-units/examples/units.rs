//! Lists every unit of every backend, usable or not: `cargo run --release --example units`.

use trefoil_units::{Availability, list, machine};

fn main() {
    println!("{:#?}", machine());
    for report in list() {
        let resources: Vec<String> = report.unit.resources.iter().map(ToString::to_string).collect();
        println!("{}  [{}]  {}", report.unit.address, resources.join(" "), report.unit.description.unwrap_or_default());
        match report.availability {
            Availability::Available { version, library } => println!("    version {version}, {library:?}"),
            Availability::Unavailable { reason, fix } => println!("    not available: {reason}\n    fix: {fix}"),
        }
    }
}
