//! One module per command.

pub mod bench_kernels;
pub mod bench_operators;
pub mod bench_plan;
pub mod explain;
pub mod inspect;
pub mod paper;
pub mod pipeline;
pub mod plan;
pub mod plan_output;
pub mod profile;
pub mod run;
pub mod simulated;
pub mod survey;
pub mod units;
pub mod weights;
pub mod workload;
