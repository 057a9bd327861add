//! `docs/src/cli.md` is what the program says of itself.

mod common;

use common::{stdout, trefoil};
use std::fmt::Write as _;
use std::path::Path;

const COMMANDS: &[&[&str]] = &[
    &[],
    &["units"],
    &["inspect"],
    &["profile"],
    &["plan"],
    &["pipeline"],
    &["paper"],
    &["run"],
    &["explain"],
    &["survey"],
    &["bench", "operators"],
    &["bench", "video"],
    &["bench", "plan"],
    &["bench", "pairs"],
    &["bench", "corun"],
    &["bench", "methods"],
    &["bench", "kernels"],
    &["bench", "quality"],
    &["bench", "decoder"],
    &["weights", "pack"],
    &["weights", "info"],
    &["weights", "verify"],
    &["video", "pack"],
    &["video", "info"],
    &["video", "calibrate"],
    &["video", "denoise"],
    &["video", "rates"],
    &["video", "stream"],
    &["video", "encode"],
    &["video", "decode"],
    &["video", "generate"],
    &["probe"],
    &["make-model"],
];

/// Set to rewrite the page instead of comparing.
const UPDATE: &str = "TREFOIL_UPDATE_DOCS";

#[test]
fn the_command_line_page_is_up_to_date() {
    let mut page = String::from(
        "# Command line\n\nWhat `trefoil --help` and `trefoil COMMAND --help` print. Made by the test `cli_docs`; rewrite it with\n\
         `TREFOIL_UPDATE_DOCS=1 cargo test --release -p trefoil --test cli_docs`.\n",
    );
    for command in COMMANDS {
        let mut arguments = command.to_vec();
        arguments.push(if command.is_empty() { "--help" } else { "-h" });
        let output = trefoil().args(&arguments).env("COLUMNS", "110").output().unwrap();
        assert!(output.status.success(), "{command:?}");
        let title = if command.is_empty() { "trefoil".to_owned() } else { format!("trefoil {}", command.join(" ")) };
        let help = stdout(&output).lines().map(str::trim_end).collect::<Vec<_>>().join("\n");
        let _ = write!(page, "\n## `{title}`\n\n```text\n{}\n```\n", help.trim());
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/cli.md");
    if std::env::var_os(UPDATE).is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(written == page, "docs/src/cli.md is out of date; run this test with {UPDATE}=1");
}
