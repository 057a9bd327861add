//! The worker process of `trefoil_run::compare` by itself, for tests; the `trefoil` program has it as `worker-run`.

fn main() -> std::process::ExitCode {
    trefoil_run::run_worker_main()
}
