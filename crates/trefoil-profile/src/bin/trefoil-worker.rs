//! The profiling worker as a program of its own, for this crate's tests and examples.

fn main() {
    trefoil_profile::worker_main()
}
