//! The paper's memory classes of DCM-Wan2.1-1.3B, from shapes alone (HeteroVDiff, memory table; DESIGN 6).

use trefoil_weights::artefact::memory_classes;
use trefoil_weights::checkpoint::SourceType;
use trefoil_weights::shapes::WanSizes;
use trefoil_weights::{FloatType, PackPlan, RuleSet, TensorClass};

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn plan() -> PackPlan {
    let dtype = SourceType::Float(FloatType::Bf16);
    let tensors = WanSizes::DCM_1_3B.tensors();
    let rules = RuleSet::detect(tensors.iter().map(|(name, _)| name.as_str()));
    assert_eq!(rules.name, "wan");
    PackPlan::new(tensors.iter().map(|(name, shape)| (name.as_str(), &dtype, shape.as_slice())), &rules).unwrap()
}

#[test]
fn the_checkpoint_has_the_published_size() {
    let tensors = WanSizes::DCM_1_3B.tensors();
    assert_eq!(tensors.len(), 1317);
    let count = |keep: &dyn Fn(&str) -> bool| -> u64 {
        tensors.iter().filter(|(name, _)| keep(name)).map(|(_, shape)| shape.iter().product::<u64>()).sum()
    };
    assert_eq!(count(&|name| !name.contains("_lora") && !name.contains(".lora_")), 1_418_996_800);
    assert_eq!(count(&|name| name.contains(".lora_")), 94_371_840);
    assert_eq!(count(&|name| name.starts_with("condition_embedder_lora")), 25_574_400);
}

#[test]
fn memory_classes_are_the_paper_s() {
    let plan = plan();
    let memory = memory_classes(plan.stored());
    assert_eq!(memory.attention_base_with_biases, 30 * 8 * (1536 * 1536 + 1536 * 4));
    assert_eq!(memory.ffn, 30 * 2 * 1536 * 8960);
    assert_eq!(memory.scales, 30 * 4 * (8 * 1536 + 8960 + 1536));
    assert_eq!(memory.factors, 30 * 8 * (2 * 128 * 1536 + 4 * (128 + 1536)));
    for (bytes, published) in [
        (memory.attention_base_with_biases, "541.4"),
        (memory.ffn, "787.5"),
        (memory.scales, "2.6"),
        (memory.factors, "91.5"),
        (memory.paper_total, "1423.0"),
    ] {
        assert_eq!(format!("{:.1}", mib(bytes)), published);
    }
    // Two condition embedders and heads in f32, the rest of the biases, norms and tables.
    assert!((190.0..205.0).contains(&mib(memory.uncounted)), "{}", mib(memory.uncounted));
    assert!(plan.unmatched.is_empty() && plan.padded().next().is_none());
}

#[test]
fn a_region_is_attention_and_feed_forward_of_one_block() {
    let plan = plan();
    assert_eq!(plan.regions().len(), 30);
    for region in plan.regions() {
        let class = |wanted| -> u64 {
            region.tensors.iter().filter(|tensor| tensor.spec.class == wanted).map(|tensor| tensor.bytes).sum()
        };
        assert_eq!(class(TensorClass::AttentionBase), 18 << 20);
        assert_eq!(class(TensorClass::Ffn), (26 << 20) + (1 << 18));
        assert_eq!(region.bytes, (44 << 20) + (1 << 18));
        let names: Vec<&str> = region.tensors.iter().map(|tensor| tensor.spec.name.as_str()).collect();
        assert!(names[0].ends_with("attn1.to_q.weight") && names[9].ends_with("ffn.net.2.weight"), "{names:?}");
    }
    // The INT8 factors of a block, which the paper adds to the region: 47.25 MiB.
    let factors: u64 = plan
        .outside()
        .iter()
        .filter(|tensor| tensor.spec.class == TensorClass::Adapter && tensor.spec.block == Some(0))
        .map(|tensor| tensor.bytes)
        .sum();
    assert_eq!(factors, 3 << 20);
    assert!(plan.check_limit(Some(44 << 20)).unwrap_err().to_string().contains("block"));
    plan.check_limit(Some(45 << 20)).unwrap();
}
