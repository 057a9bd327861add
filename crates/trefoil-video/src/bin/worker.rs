//! The process that tests start as an engine's worker; never installed.

fn main() -> std::process::ExitCode {
    trefoil_video::process::worker_main()
}
