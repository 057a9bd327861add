//! Node times from ONNX Runtime's profiling file, a JSON array of Chrome trace events.

use serde::Deserialize;
use trefoil_core::NodeTime;

#[derive(Deserialize)]
struct Event {
    #[serde(default)]
    cat: String,
    #[serde(default)]
    name: String,
    /// Microseconds.
    #[serde(default)]
    ts: f64,
    /// Microseconds.
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    args: serde_json::Map<String, serde_json::Value>,
}

/// Kernel times of the last execution in the file. Nodes inside control flow ran within their `Loop`, `If` or `Scan`,
/// whose own time contains theirs: only the outermost are listed, so that times add up.
pub(super) fn last_execution(text: &str) -> Option<Vec<NodeTime>> {
    let events: Vec<Event> = serde_json::from_str(text).ok()?;
    let run = events
        .iter()
        .filter(|event| event.cat == "Session" && event.name == "model_run")
        .max_by(|a, b| a.ts.total_cmp(&b.ts))?;
    let within = |event: &&Event| event.ts >= run.ts && event.ts + event.dur <= run.ts + run.dur;
    let mut kernels: Vec<&Event> =
        events.iter().filter(|event| event.cat == "Node" && event.name.ends_with(KERNEL)).filter(within).collect();
    // An enclosing node starts no later and ends no earlier than what it encloses.
    kernels.sort_by(|a, b| a.ts.total_cmp(&b.ts).then(b.dur.total_cmp(&a.dur)));
    let mut end = f64::NEG_INFINITY;
    let mut nodes = Vec::with_capacity(kernels.len());
    for event in kernels {
        if event.dur > 0.0 && event.ts + event.dur <= end {
            continue;
        }
        let kind = event.args.get("op_name").and_then(|kind| kind.as_str()).unwrap_or_default().to_owned();
        if CONTROL_FLOW.contains(&kind.as_str()) {
            end = end.max(event.ts + event.dur);
        }
        let name = event.name.strip_suffix(KERNEL).unwrap_or(&event.name).to_owned();
        nodes.push(NodeTime { name, kind, ms: event.dur / 1e3, operators: Vec::new() });
    }
    Some(nodes)
}

const KERNEL: &str = "_kernel_time";
const CONTROL_FLOW: [&str; 3] = ["Loop", "If", "Scan"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_execution_is_read_and_nested_nodes_are_not_counted_twice() {
        let text = r#"[
            {"cat":"Session","name":"model_run","ts":0,"dur":100,"args":{}},
            {"cat":"Node","name":"conv_kernel_time","ts":10,"dur":50,"args":{"op_name":"Conv"}},
            {"cat":"Session","name":"model_run","ts":200,"dur":100,"args":{}},
            {"cat":"Node","name":"conv_kernel_time","ts":210,"dur":20,"args":{"op_name":"Conv"}},
            {"cat":"Node","name":"inner_kernel_time","ts":245,"dur":5,"args":{"op_name":"Add"}},
            {"cat":"Node","name":"loop_kernel_time","ts":240,"dur":30,"args":{"op_name":"Loop"}},
            {"cat":"Node","name":"relu_kernel_time","ts":275,"dur":4,"args":{"op_name":"Relu"}}
        ]"#;
        let nodes = last_execution(text).unwrap();
        let seen: Vec<_> = nodes.iter().map(|node| (node.name.as_str(), node.kind.as_str(), node.ms)).collect();
        assert_eq!(seen, [("conv", "Conv", 0.02), ("loop", "Loop", 0.03), ("relu", "Relu", 0.004)]);
    }

    #[test]
    fn garbage_and_files_without_an_execution_give_nothing() {
        assert!(last_execution("[{").is_none());
        assert!(last_execution("[]").is_none());
    }
}
