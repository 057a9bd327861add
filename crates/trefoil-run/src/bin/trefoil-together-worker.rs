//! The worker process of `trefoil_run::together` by itself, for tests; the `trefoil` program has it as `worker-together`.

fn main() -> std::process::ExitCode {
    trefoil_run::together::run_together_worker_main()
}
