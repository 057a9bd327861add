//! `docs/src/cli.md` is what the program says of itself.

mod common;

use common::{stdout, trefoil};
use std::fmt::Write as _;
use std::path::Path;

/// Set to rewrite the page instead of comparing.
const UPDATE: &str = "TREFOIL_UPDATE_DOCS";

/// What a command prints of itself.
fn help(command: &[String]) -> String {
    let flag = if command.is_empty() { "--help" } else { "-h" };
    let output = trefoil().args(command).arg(flag).env("COLUMNS", "110").output().unwrap();
    assert!(output.status.success(), "{command:?}");
    stdout(&output).lines().map(str::trim_end).collect::<Vec<_>>().join("\n").trim().to_owned()
}

/// Every command with its help, found as a reader would: by what the help of the command above lists. Of a group the page has its
/// commands.
fn commands(command: &[String], found: &mut Vec<(Vec<String>, String)>) {
    let text = help(command);
    let listed = text.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    // Further lines of a description begin farther to the right.
    let names = listed.filter_map(|line| line.strip_prefix("  ").filter(|line| !line.starts_with(' ')));
    let names: Vec<String> = names.filter_map(|line| line.split(' ').next().map(str::to_owned)).collect();
    if command.is_empty() || names.is_empty() {
        found.push((command.to_vec(), text));
    }
    for name in names.into_iter().filter(|name| name != "help") {
        commands(&[command, &[name]].concat(), found);
    }
}

#[test]
fn the_command_line_page_is_up_to_date() {
    let mut page = String::from(
        "# Command line\n\nWhat `trefoil --help` and `trefoil COMMAND --help` print. Made by the test `cli_docs`; rewrite it with\n\
         `TREFOIL_UPDATE_DOCS=1 cargo test --release -p trefoil --test cli_docs`.\n",
    );
    let mut found = Vec::new();
    commands(&[], &mut found);
    assert!(found.len() > 30, "{found:?}");
    for (command, help) in found {
        let title = if command.is_empty() { "trefoil".to_owned() } else { format!("trefoil {}", command.join(" ")) };
        let _ = write!(page, "\n## `{title}`\n\n```text\n{help}\n```\n");
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/cli.md");
    if std::env::var_os(UPDATE).is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(written == page, "docs/src/cli.md is out of date; run this test with {UPDATE}=1");
}
