//! One module per command.

pub mod bench_corun;
pub mod bench_kernels;
pub mod bench_methods;
pub mod bench_operators;
pub mod bench_pairs;
pub mod bench_plan;
pub mod emulate;
pub mod explain;
pub mod inspect;
pub mod paper;
pub mod pipeline;
pub mod plan;
pub mod plan_output;
pub mod profile;
pub mod run;
pub mod run_pipeline;
pub mod run_pipeline_output;
pub mod run_several;
pub mod run_several_output;
pub mod simulated;
pub mod survey;
pub mod units;
pub mod video;
pub mod weights;
pub mod workload;
