//! The `trefoil` program: a thin layer over the crates that do the work.

mod cli;
mod commands;
mod contenders;
mod context;
mod error;
mod outcome;
mod pipeline;
mod question;
mod several;
mod shapes;
mod stages;

use clap::Parser;
use cli::{BenchCommand, Cli, Command};
use error::CliError;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    // Worker processes end in their own way.
    match cli.command {
        Command::Worker => trefoil_profile::worker_main(),
        Command::WorkerRun => return trefoil_run::run_worker_main(),
        Command::WorkerTogether => return trefoil_run::together::run_together_worker_main(),
        Command::ProbeChild => return commands::weights::probe_child(),
        Command::VideoWorker => return trefoil_video::process::worker_main(),
        _ => {}
    }
    let done = context::cache_limit().and_then(|limit| {
        let done = run(cli.command);
        context::trim_caches(limit);
        done
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // One line, whatever a library or a file put into its message.
            let words = error.to_string();
            let mut message = context::harmless(&words.split_whitespace().collect::<Vec<_>>().join(" "));
            if message.contains("No space left on device") {
                message.push_str("; free some, or name an output or a cache folder (--cache) on another disk");
            }
            eprintln!("error: {message}");
            ExitCode::from(error.exit_code())
        }
    }
}

/// Help and version as they are; a usage error in one line, as all errors are told.
fn usage(error: &clap::Error) -> ExitCode {
    use clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
    if !error.use_stderr() || error.kind() == DisplayHelpOnMissingArgumentOrSubcommand {
        // A closed pipe is no reason to fail over.
        let _ = error.print();
        return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
    }
    let text = error.render().to_string();
    let told = text.split("\nUsage:").next().unwrap_or(&text).split("\nFor more information").next().unwrap_or(&text);
    // Paths and numbers are all that stands without a flag here: what is no flag's name is not meant as one of them.
    let told = told.split("tip: to pass").next().unwrap_or(told);
    eprintln!("{}; try `--help`", told.split_whitespace().collect::<Vec<_>>().join(" "));
    ExitCode::from(2)
}

fn run(command: Command) -> Result<(), CliError> {
    match command {
        Command::Units(args) => commands::units::run(&args),
        Command::Inspect(args) => commands::inspect::run(&args),
        Command::Profile(args) => commands::profile::run(&args),
        Command::Plan(args) => commands::plan::run(&args),
        Command::Pipeline(args) => commands::pipeline::run(&args),
        Command::Paper(args) => commands::paper::run(&args),
        Command::Run(args) => commands::run::run(&args),
        Command::Explain(args) => commands::explain::run(&args),
        Command::Survey(args) => commands::survey::run(&args),
        Command::Emulate(args) => commands::emulate::run(&args),
        Command::Bench(args) => match args.bench {
            BenchCommand::Operators(args) => commands::bench_operators::run(&args),
            BenchCommand::Video(args) => commands::video::bench(&args),
            BenchCommand::Quality(args) => commands::video::quality::run(&args),
            BenchCommand::Decoder(args) => commands::video::decoder::run(&args),
            BenchCommand::Plan(args) => commands::bench_plan::run(&args),
            BenchCommand::Pairs(args) => commands::bench_pairs::run(&args),
            BenchCommand::Corun(args) => commands::bench_corun::run(&args),
            BenchCommand::Methods(args) => commands::bench_methods::run(&args),
            BenchCommand::Kernels(args) => commands::bench_kernels::run(&args),
        },
        Command::MakeModel(args) => Ok(trefoil_onnx::builder::sample_model().save(&args.output)?),
        Command::Weights(args) => commands::weights::run(&args.command),
        Command::Video(args) => commands::video::run(&args.command),
        Command::Probe(args) => commands::weights::probe(&args),
        Command::Worker | Command::WorkerRun | Command::WorkerTogether | Command::ProbeChild | Command::VideoWorker => {
            unreachable!("handled in main")
        }
    }
}
