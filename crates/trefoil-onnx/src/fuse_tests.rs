//! Every fusion rule, one by one.

use crate::fuse::{self, Rules};
use crate::rules::{CHAINS, Chain, SHARED, TREES, Tree};
use crate::testing::{graph, prepare};
use std::collections::{BTreeMap, BTreeSet};
use trefoil_core::{Granularity, OperatorGraph};

/// A graph that one rule turns into one group, and a value inside it that nobody outside may read then.
const TREE_CASES: &[(&str, &str, &str)] = &[
    ("gelu-erf", "d = Div(x, c1); e = Erf(d); a = Add(e, c2); m = Mul(x, a); y = Mul(m, c3)", "e"),
    ("gelu-erf", "d = Mul(c1, x); e = Erf(d); a = Add(c2, e); m = Mul(a, x); y = Mul(c3, m)", "m"),
    ("gelu-erf-half-first", "h = Mul(x, c3); d = Div(x, c1); e = Erf(d); a = Add(e, c2); y = Mul(h, a)", "h"),
    ("gelu-erf-half-last", "d = Div(x, c1); e = Erf(d); a = Add(e, c2); h = Mul(a, c3); y = Mul(x, h)", "a"),
    (
        "gelu-tanh",
        "p = Pow(x, c1); q = Mul(p, c2); s = Add(x, q); t = Mul(s, c3); u = Tanh(t); v = Add(u, c4); h = Mul(x, c5); y = Mul(h, v)",
        "u",
    ),
    (
        "gelu-tanh-half-last",
        "p = Pow(x, c1); q = Mul(p, c2); s = Add(x, q); t = Mul(s, c3); u = Tanh(t); v = Add(u, c4); w = Mul(x, v); y = Mul(w, c5)",
        "w",
    ),
    (
        "gelu-tanh-cube",
        "p = Mul(x, x); o = Mul(p, x); q = Mul(o, c2); s = Add(x, q); t = Mul(s, c3); u = Tanh(t); v = Add(u, c4); h = Mul(x, c5); y = Mul(h, v)",
        "p",
    ),
    ("silu", "s = Sigmoid(x); y = Mul(x, s)", "s"),
    ("quick-gelu", "m = Mul(x, c1); s = Sigmoid(m); y = Mul(x, s)", "m"),
    ("hard-swish", "h = HardSigmoid(x); y = Mul(x, h)", "h"),
    ("hard-swish-clip", "a = Add(x, c1); b = Clip(a, c2, c3); m = Mul(x, b); y = Div(m, c4)", "b"),
    ("mish", "p = Softplus(x); t = Tanh(p); y = Mul(x, t)", "t"),
    (
        "layer-norm",
        "m = ReduceMean(x); d = Sub(x, m); p = Pow(d, c1); v = ReduceMean(p); a = Add(v, c2); s = Sqrt(a); y = Div(d, s)",
        "d",
    ),
    (
        "layer-norm-square",
        "m = ReduceMean(x); d = Sub(x, m); p = Mul(d, d); v = ReduceMean(p); a = Add(v, c2); s = Sqrt(a); y = Div(d, s)",
        "v",
    ),
    (
        "layer-norm-reciprocal",
        "m = ReduceMean(x); d = Sub(x, m); p = Pow(d, c1); v = ReduceMean(p); a = Add(v, c2); s = Sqrt(a); r = Reciprocal(s); y = Mul(d, r)",
        "m",
    ),
    (
        "rms-norm",
        "p = Pow(x, c1); v = ReduceMean(p, i1); a = Add(v, c2); s = Sqrt(a); r = Reciprocal(s); y = Mul(x, r)",
        "v",
    ),
    (
        "rms-norm-division",
        "p = Pow(x, c1); v = ReduceMean(p); a = Add(v, c2); s = Sqrt(a); r = Div(c3, s); y = Mul(x, r)",
        "s",
    ),
    ("rms-norm-direct", "p = Pow(x, c1); v = ReduceMean(p); a = Add(v, c2); s = Sqrt(a); y = Div(x, s)", "p"),
    (
        "rms-norm-square",
        "p = Mul(x, x); v = ReduceMean(p); a = Add(v, c2); s = Sqrt(a); r = Reciprocal(s); y = Mul(x, r)",
        "r",
    ),
    ("softmax", "m = ReduceMax(x); d = Sub(x, m); e = Exp(d); s = ReduceSum(e); y = Div(e, s)", "e"),
    ("softmax-plain", "e = Exp(x); s = ReduceSum(e); y = Div(e, s)", "e"),
];

/// A graph that one chain rule (after all trees) turns into one operator, and the value in between.
const CHAIN_CASES: &[(&str, &str, &str)] = &[
    ("generator", "r = RandomNormal(); y = Gather(x, r)", "r"),
    ("dequantize", "d = DequantizeLinear(x, c1); y = Conv(d, c2)", "d"),
    ("contraction-batch-norm", "m = Conv(x, c1); y = BatchNormalization(m, c2, c3, c4, c5)", "m"),
    ("contraction-batch-norm", "m = MatMul(x, c1); y = Add(c2, m)", "m"),
    ("contraction-batch-norm", "m = ConvTranspose(x, c1); y = Sub(m, c2)", "m"),
    ("contraction-residual", "m = MatMul(x, c1); y = Add(r, m)", "m"),
    ("contraction-activation", "m = Gemm(x, c1); y = Relu(m)", "m"),
    ("contraction-activation", "m = Conv(x, c1); s = Sigmoid(m); y = Mul(m, s)", "m"),
    ("contraction-activation", "m = Conv(x, c1); y = Clip(m, c2, c3)", "m"),
    (
        "contraction-activation",
        "m = MatMul(x, c1); d = Div(m, c1); e = Erf(d); a = Add(e, c2); n = Mul(m, a); y = Mul(n, c3)",
        "m",
    ),
    ("contraction-activation", "m = Conv(x, c1); y = LeakyRelu(m)", "m"),
    ("contraction-activation", "m = Conv(x, c1); y = HardSwish(m)", "m"),
    ("contraction-activation", "m = Conv(x, c1); s = HardSigmoid(m); y = Mul(m, s)", "m"),
    ("normalization-affine", "m = LayerNormalization(x, c1); y = Mul(m, c2)", "m"),
    ("batch-norm-activation", "m = BatchNormalization(x, c2, c3, c4, c5); y = Relu(m)", "m"),
    ("elementwise", "m = Exp(x); y = Mul(m, z)", "m"),
    ("quantize", "d = DequantizeLinear(x, c1); m = Relu(d); y = QuantizeLinear(m, c2)", "m"),
    ("layout-run", "m = Transpose(x); y = Unsqueeze(m, i1)", "m"),
    ("layout-after", "m = Softmax(x); y = Transpose(m)", "m"),
    ("layout-before", "m = Reshape(x, i1); y = MatMul(m, z)", "m"),
];

fn tree(name: &str) -> &'static Tree {
    TREES.iter().find(|tree| tree.name == name).unwrap_or_else(|| panic!("no tree `{name}`"))
}

fn chain(name: &str) -> &'static Chain {
    CHAINS.iter().find(|chain| chain.name == name).unwrap_or_else(|| panic!("no chain `{name}`"))
}

/// Number of groups of activation nodes after fusing.
fn group_count(text: &str, outputs: &[&str], rules: Rules<'_>) -> usize {
    let prepared = prepare(graph(text, outputs)).unwrap();
    let mut groups = fuse::fuse(&prepared, rules);
    let nodes = 0..prepared.model().node_count() as u32;
    nodes.map(|node| groups.find(node)).collect::<BTreeSet<_>>().len()
}

#[test]
fn every_tree_matches_its_function_and_respects_readers() {
    for &(name, text, inner) in TREE_CASES {
        let rules = Rules { trees: std::slice::from_ref(tree(name)), shared: &[], chains: &[] };
        assert_eq!(group_count(text, &[], rules), 1, "{name}");
        assert!(group_count(text, &[inner], rules) > 1, "{name}: `{inner}` is a model output");
        let last = text.rsplit(';').next().unwrap().split('=').next().unwrap().trim();
        let also_read = format!("{text}; out = Concat({last}, {inner})");
        assert!(group_count(&also_read, &[], rules) > 2, "{name}: `{inner}` is read outside");
    }
}

#[test]
fn every_chain_joins_and_respects_readers() {
    for &(name, text, between) in CHAIN_CASES {
        // The quantize rule needs the dequantize rule before it; nothing else needs another chain.
        let mut chains = vec![*chain(name)];
        if name == "quantize" {
            chains = vec![*chain("dequantize"), *chain("elementwise"), *chain("quantize")];
        }
        let rules = Rules { trees: TREES, shared: &[], chains: &chains };
        assert_eq!(group_count(text, &[], rules), 1, "{name}: {text}");
        assert!(group_count(text, &[between], rules) > 1, "{name}: `{between}` is a model output");
        let last = text.rsplit(';').next().unwrap().split('=').next().unwrap().trim();
        let also_read = format!("{text}; o = Frobnicate({last}, {between})");
        assert!(group_count(&also_read, &[], rules) > 2, "{name}: `{between}` is read elsewhere");
        let without: Vec<Chain> = chains.iter().filter(|rule| rule.name != name).copied().collect();
        let rules = Rules { trees: TREES, shared: &[], chains: &without };
        assert!(group_count(text, &[], rules) > 1, "{name}: joined without the rule");
    }
}

#[test]
fn every_rule_has_a_case() {
    let cases: BTreeSet<&str> = TREE_CASES.iter().chain(CHAIN_CASES).map(|case| case.0).collect();
    for name in TREES.iter().map(|tree| tree.name).chain(CHAINS.iter().map(|chain| chain.name)) {
        assert!(cases.contains(name), "no case for rule `{name}`");
    }
    for tree in TREES {
        crate::pattern::Pattern::parse(tree.pattern).unwrap();
    }
}

fn operators(text: &str, outputs: &[&str]) -> OperatorGraph {
    prepare(graph(text, outputs)).unwrap().operator_graph(Granularity::Fused, &[]).unwrap()
}

fn kinds(text: &str) -> Vec<String> {
    operators(text, &[]).operators.into_iter().map(|operator| operator.kind).collect()
}

#[test]
fn whole_kernels_come_together() {
    assert_eq!(
        kinds("a = Conv(x, c1); b = BatchNormalization(a, c2, c3, c4, c5); d = Add(b, r); y = Relu(d)"),
        ["Conv+BatchNormalization+Add+Relu"]
    );
    assert_eq!(
        kinds(
            "d = DequantizeLinear(x, c1); w = DequantizeLinear(c2, c3); m = Conv(d, w); n = Relu(m); y = QuantizeLinear(n, c4)"
        ),
        ["DequantizeLinear+Conv+Relu+QuantizeLinear"]
    );
    // An activation ends a contraction; two contractions never share an operator; an affine step follows a norm.
    assert_eq!(
        kinds("a = MatMul(x, c1); b = Relu(a); d = MatMul(b, c2); y = Add(d, c3)"),
        ["MatMul+Relu", "MatMul+Add"]
    );
    assert_eq!(
        kinds(
            "p = Pow(x, c1); v = ReduceMean(p); a = Add(v, c2); s = Sqrt(a); q = Reciprocal(s); m = Mul(x, q); y = Mul(m, c3)"
        ),
        ["Pow+ReduceMean+Add+Sqrt+Reciprocal+Mul+Mul"]
    );
}

#[test]
fn two_convolutions_of_one_sum_are_two_operators() {
    // Only one of them can take the sum along.
    assert_eq!(kinds("a = Conv(x, c1); b = Conv(z, c2); d = Add(a, b); y = Relu(d)").len(), 2);
}

#[test]
fn a_shared_dequantisation_goes_along_with_every_reader() {
    let graph = operators(
        "d = DequantizeLinear(x, c1); a = Conv(d, c2); q = QuantizeLinear(a, c3); b = MatMul(d, c4); r = QuantizeLinear(b, c5); y = Frobnicate(q, r)",
        &[],
    );
    assert_eq!(graph.len(), 3);
    let edges: Vec<&str> = graph.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(edges, ["x", "q", "r", "y"], "the dequantised tensor crosses no boundary");
    assert_eq!(graph.operators[0].nodes, [0, 1, 2]);
    assert_eq!(graph.operators[1].nodes, [0, 3, 4]);
    let alone =
        operators("d = DequantizeLinear(x, c1); a = Conv(d, c2); b = MatMul(d, c4); y = Frobnicate(a, b)", &["d"]);
    assert!(alone.operators.iter().any(|operator| operator.kind == "DequantizeLinear"), "a model output has a writer");
}

#[test]
fn random_sources_are_not_shared_or_folded() {
    let graph = operators("r = RandomNormal(); a = Add(x, r); y = Concat(a, r)", &[]);
    assert_eq!(graph.len(), 3, "both readers see the same draw");
}

#[test]
fn classes_are_listed_once() {
    let mut seen = BTreeMap::new();
    for &(class, operators) in crate::rules::OPERATOR_CLASSES {
        for &operator in operators {
            assert!(seen.insert(operator, class).is_none(), "{operator} stands twice");
        }
    }
    assert_eq!(SHARED.len(), 1);
}
