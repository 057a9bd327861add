//! The worker processes of `trefoil_run::Session` by themselves, for tests; programs that use sessions are their own.

fn main() {
    trefoil_run::serve_if_worker();
    eprintln!("this program only serves sessions");
    std::process::exit(2);
}
