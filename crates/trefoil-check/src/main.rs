//! `trefoil-check CERTIFICATE.json PROFILE.json…`: verifies a plan's certificate against the profile(s) it was made from.

use serde_json::Value;
use std::process::ExitCode;
use trefoil_check::Verdict;

const USAGE: &str = "usage: trefoil-check CERTIFICATE.json PROFILE.json [PROFILE2.json ...]

Verifies a certificate written by `trefoil plan --certificate` against the profile(s) the plan was made from.
Exit codes: 0 everything holds, 1 something does not, 2 a file cannot be read.";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.len() < 2 || arguments.iter().any(|argument| argument == "-h" || argument == "--help") {
        eprintln!("{USAGE}");
        return ExitCode::from(if arguments.len() < 2 { 2 } else { 0 });
    }
    let files: Result<Vec<Value>, String> = arguments
        .iter()
        .map(|path| {
            let text = std::fs::read(path).map_err(|error| format!("cannot read {path}: {error}"))?;
            serde_json::from_slice(&text).map_err(|error| format!("{path} is no JSON: {error}"))
        })
        .collect();
    let files = match files {
        Ok(files) => files,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(2);
        }
    };
    match trefoil_check::check(&files[0], &files[1..]) {
        Ok(verdict) => {
            println!("{}", harmless(&describe(&verdict)));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {}", harmless(&error.to_string()));
            ExitCode::from(match error {
                trefoil_check::CheckError::Format { .. } => 2,
                _ => 1,
            })
        }
    }
}

/// Text without control characters but for ends of lines: names in files may hold some, and a terminal would obey them.
fn harmless(text: &str) -> String {
    let shown = |character: char| match character {
        '\n' => "\n".to_owned(),
        character if character.is_control() => character.escape_default().to_string(),
        character => character.to_string(),
    };
    text.chars().map(shown).collect()
}

fn describe(verdict: &Verdict) -> String {
    let unit = if verdict.objective == "energy" { "J" } else { "ms" };
    let mut lines = vec![
        format!("feasible: {} tasks end after {:.6} ms", verdict.tasks, verdict.makespan_ms),
        format!("cost verified: {:.6} {unit}", verdict.value),
    ];
    if verdict.estimated > 0 {
        lines.push(format!("{} task(s) cost an estimate, derived anew from the profile", verdict.estimated));
    }
    match (verdict.bound, verdict.gap()) {
        (None, _) => lines.push("no lower bound stated".to_owned()),
        (Some(bound), _) if verdict.is_optimal() => {
            lines.push(format!("bound proven: {bound:.6} {unit} ({}): optimal", verdict.proofs.join(", ")));
        }
        (Some(bound), gap) => lines.push(format!(
            "bound proven: {bound:.6} {unit} ({}), {}",
            verdict.proofs.join(", "),
            gap.map_or("no gap to a bound of 0".to_owned(), |gap| format!("gap {:.2}%", gap * 100.0))
        )),
    }
    if verdict.bound.is_some() {
        let pinned = match verdict.pinned {
            0 => String::new(),
            count => format!(", {count} operator(s) pinned"),
        };
        lines.push(format!("over plans on {}{pinned}", verdict.units.join(", ")));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(harmless("no unit \u{1b}[31ma\n"), "no unit \\u{1b}[31ma\n");
    }

    #[test]
    fn a_bound_of_nothing_has_no_gap() {
        let verdict = |bound: f64| Verdict {
            objective: "latency".to_owned(),
            value: 2.0,
            makespan_ms: 2.0,
            bound: Some(bound),
            proofs: vec!["path".to_owned()],
            tasks: 1,
            estimated: 0,
            units: vec!["a:CPU".to_owned()],
            pinned: 0,
        };
        assert!(describe(&verdict(0.0)).contains("(path), no gap to a bound of 0"), "{}", describe(&verdict(0.0)));
        assert!(describe(&verdict(1.0)).contains("(path), gap 100.00%"));
    }
}
