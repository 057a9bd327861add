//! Which tensor goes where: rule sets that rename, classify and place the tensors of a checkpoint. Rules are data
//! (serde), so that a new family of models needs no code.
//!
//! # Patterns
//! A pattern is matched against the dot-separated segments of a name:
//!
//! | segment | matches |
//! |---|---|
//! | `to_q` | itself |
//! | `to_q\|to_k` | either; alternatives may hold `*` |
//! | `norm_*` | any run of characters inside one segment |
//! | `{block}` | a decimal number, the block |
//! | `**` | any number of segments, also none, as few as possible |
//!
//! Every segment with `*` or `|` is a capture; a template refers to them as `{1}`, `{2}`, … and to the block as `{block}`.

use crate::{TensorClass, WeightsError};
use serde::{Deserialize, Serialize};

/// Renames every name that matches `from`; applied in order, each rule at most once per name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rename {
    /// Pattern.
    pub from: String,
    /// Template.
    pub to: String,
}

/// Where a tensor is stored and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// Quantised and tiled, in its block's region. The pattern needs `{block}`.
    Region,
    /// Quantised and tiled, outside the regions (adapter factors).
    Matrix,
    /// Unquantised, outside the regions.
    Plain,
}

/// Class and place of the tensors that match; the first rule that matches wins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Pattern for the renamed name.
    pub pattern: String,
    /// Memory class.
    pub class: TensorClass,
    /// Place.
    pub place: Placement,
}

/// An ordered set of renames and rules.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RuleSet {
    /// Name, recorded in the artefact.
    pub name: String,
    /// Renames to canonical names.
    #[serde(default)]
    pub renames: Vec<Rename>,
    /// Classes and places.
    pub rules: Vec<Rule>,
}

/// What a pattern captured.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Captures {
    /// The number at `{block}`.
    pub block: Option<u32>,
    /// Segments before `{block}`, joined.
    pub prefix: String,
    /// Wildcards in order.
    pub wild: Vec<String>,
    /// Index of the alternative taken, per capture; orders tensors within a region as their rule lists them.
    pub order: Vec<usize>,
}

/// The outcome of applying a rule set to a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Matched {
    /// Canonical name.
    pub name: String,
    /// Index of the rule, or `None` where no rule matched.
    pub rule: Option<usize>,
    /// Captures of that rule.
    pub captures: Captures,
}

impl RuleSet {
    /// DCM and Wan2.1 checkpoints in the original, diffusers and dual-expert layouts. Canonical names are diffusers names
    /// without adapter wrappers, so consumers know one spelling. Mind the norm swap: the original `norm3` (affine, before
    /// cross-attention) is diffusers' `norm2`.
    pub fn wan() -> RuleSet {
        let renames = [
            ("module|transformer|diffusion_model.**", "{2}"),
            ("model.diffusion_model.**", "{1}"),
            ("**.base_layer.*", "{1}.{2}"),
            ("**.lora_A|lora_B.lora1|default.weight", "{1}.{2}.weight"),
            ("**.lora_down.weight", "{1}.lora_A.weight"),
            ("**.lora_up.weight", "{1}.lora_B.weight"),
            ("blocks.{block}.self_attn.q|k|v.**", "blocks.{block}.attn1.to_{1}.{2}"),
            ("blocks.{block}.self_attn.o.**", "blocks.{block}.attn1.to_out.0.{1}"),
            ("blocks.{block}.self_attn.norm_*.**", "blocks.{block}.attn1.{1}.{2}"),
            ("blocks.{block}.cross_attn.q|k|v.**", "blocks.{block}.attn2.to_{1}.{2}"),
            ("blocks.{block}.cross_attn.o.**", "blocks.{block}.attn2.to_out.0.{1}"),
            ("blocks.{block}.cross_attn.norm_*.**", "blocks.{block}.attn2.{1}.{2}"),
            ("blocks.{block}.norm3.**", "blocks.{block}.norm2.{1}"),
            ("blocks.{block}.ffn.0.**", "blocks.{block}.ffn.net.0.proj.{1}"),
            ("blocks.{block}.ffn.2.**", "blocks.{block}.ffn.net.2.{1}"),
            ("blocks.{block}.modulation", "blocks.{block}.scale_shift_table"),
            ("time_embedding.0.*", "condition_embedder.time_embedder.linear_1.{1}"),
            ("time_embedding.2.*", "condition_embedder.time_embedder.linear_2.{1}"),
            ("time_projection.1.*", "condition_embedder.time_proj.{1}"),
            ("text_embedding.0.*", "condition_embedder.text_embedder.linear_1.{1}"),
            ("text_embedding.2.*", "condition_embedder.text_embedder.linear_2.{1}"),
            ("head.modulation", "scale_shift_table"),
            ("head.head.*", "proj_out.{1}"),
        ];
        let rules = [
            ("blocks.{block}.attn1.to_q|to_k|to_v.weight", TensorClass::AttentionBase, Placement::Region),
            ("blocks.{block}.attn1.to_out.0.weight", TensorClass::AttentionBase, Placement::Region),
            ("blocks.{block}.attn2.to_q|to_k|to_v.weight", TensorClass::AttentionBase, Placement::Region),
            ("blocks.{block}.attn2.to_out.0.weight", TensorClass::AttentionBase, Placement::Region),
            ("blocks.{block}.ffn.net.0.proj.weight", TensorClass::Ffn, Placement::Region),
            ("blocks.{block}.ffn.net.2.weight", TensorClass::Ffn, Placement::Region),
            ("blocks.{block}.**.lora_A|lora_B.**", TensorClass::Adapter, Placement::Matrix),
            ("blocks.{block}.attn1|attn2.norm_*.weight", TensorClass::Norm, Placement::Plain),
            ("blocks.{block}.norm*.weight|bias", TensorClass::Norm, Placement::Plain),
            ("blocks.{block}.**.bias", TensorClass::Bias, Placement::Plain),
            ("blocks.{block}.**.alpha", TensorClass::Adapter, Placement::Plain),
            ("blocks.{block}.scale_shift_table", TensorClass::Step, Placement::Plain),
            ("scale_shift_table", TensorClass::Step, Placement::Plain),
            ("condition_embedder|condition_embedder_lora.**", TensorClass::Embedder, Placement::Plain),
            ("patch_embedding.weight|bias", TensorClass::Embedder, Placement::Plain),
            ("proj_out|proj_out_lora.weight|bias", TensorClass::Embedder, Placement::Plain),
        ];
        RuleSet::from_tables("wan", &renames, &rules)
    }

    /// Any stack of numbered blocks: two-dimensional `….N.….weight` tensors are quantised and grouped by N.
    pub fn generic() -> RuleSet {
        let renames = [("**.base_layer.*", "{1}.{2}"), ("**.lora_A|lora_B.lora1|default.weight", "{1}.{2}.weight")];
        let rules = [
            ("**.lora_A|lora_B.**", TensorClass::Adapter, Placement::Matrix),
            ("**.*embed*|*Embed*.**", TensorClass::Embedder, Placement::Plain),
            ("**.*norm*|*Norm*|ln_*|ln.**", TensorClass::Norm, Placement::Plain),
            ("**.bias", TensorClass::Bias, Placement::Plain),
            ("**.*bias*.**", TensorClass::Other, Placement::Plain),
            (
                "**.{block}.**.*attn*|*Attn*|*attention*|*Attention*.**.weight",
                TensorClass::AttentionBase,
                Placement::Region,
            ),
            (
                "**.{block}.**.*ffn*|*mlp*|*MLP*|*feed_forward*|*Dense*|fc1|fc2.**.weight",
                TensorClass::Ffn,
                Placement::Region,
            ),
            ("**.{block}.**.weight", TensorClass::Other, Placement::Region),
            ("**", TensorClass::Other, Placement::Plain),
        ];
        RuleSet::from_tables("generic", &renames, &rules)
    }

    /// The built-in set that fits the names: [`RuleSet::wan`] where a Wan attention projection is among them, else
    /// [`RuleSet::generic`].
    pub fn detect<'a>(names: impl Iterator<Item = &'a str>) -> RuleSet {
        let wan = RuleSet::wan();
        for name in names {
            let name = wan.canonical_name(name);
            if match_name("blocks.{block}.attn1.to_q.weight", &name).is_some() {
                return wan;
            }
        }
        RuleSet::generic()
    }

    /// Reads a rule set from JSON and checks its patterns.
    pub fn from_json(text: &str) -> Result<RuleSet, WeightsError> {
        let rules: RuleSet = serde_json::from_str(text)
            .map_err(|error| WeightsError::Rules { rules: "given".to_string(), reason: error.to_string() })?;
        rules.check()?;
        Ok(rules)
    }

    /// Checks what the types cannot: region rules need `{block}`, templates only refer to captures that exist.
    pub fn check(&self) -> Result<(), WeightsError> {
        let wrong = |reason: String| Err(WeightsError::Rules { rules: self.name.clone(), reason });
        for rule in &self.rules {
            if rule.place == Placement::Region && !rule.pattern.split('.').any(|segment| segment == "{block}") {
                return wrong(format!("pattern `{}` places tensors in regions but has no {{block}}", rule.pattern));
            }
        }
        for pattern in self.renames.iter().map(|rename| &rename.from).chain(self.rules.iter().map(|rule| &rule.pattern))
        {
            if pattern.split('.').any(str::is_empty) {
                return wrong(format!("pattern `{pattern}` has an empty segment"));
            }
            if pattern.split('.').filter(|segment| *segment == "**").count() > 4 {
                return wrong(format!("pattern `{pattern}` has more than four `**`"));
            }
        }
        for rename in &self.renames {
            let captures = rename.from.split('.').filter(|segment| is_capture(segment)).count();
            let mut rest = rename.to.as_str();
            while let Some((_, tail)) = rest.split_once('{') {
                let Some((word, tail)) = tail.split_once('}') else {
                    return wrong(format!("template `{}` has an unclosed brace", rename.to));
                };
                let known = if word == "block" {
                    rename.from.split('.').any(|segment| segment == "{block}")
                } else {
                    word.parse::<usize>().is_ok_and(|number| (1..=captures).contains(&number))
                };
                if !known {
                    return wrong(format!(
                        "template `{}` refers to {{{word}}}, which `{}` does not capture",
                        rename.to, rename.from
                    ));
                }
                rest = tail;
            }
        }
        Ok(())
    }

    /// The canonical form of a name.
    pub fn canonical_name(&self, name: &str) -> String {
        let mut name = name.to_string();
        for rename in &self.renames {
            if let Some(captures) = match_name(&rename.from, &name) {
                name = fill_template(&rename.to, &captures);
            }
        }
        name
    }

    /// Renames and classifies; `dims` is the tensor's rank, because only matrices are quantised.
    pub(crate) fn apply(&self, name: &str, dims: usize) -> Matched {
        let name = self.canonical_name(name);
        for (number, rule) in self.rules.iter().enumerate() {
            if rule.place != Placement::Plain && dims != 2 {
                continue;
            }
            if let Some(captures) = match_name(&rule.pattern, &name) {
                return Matched { name, rule: Some(number), captures };
            }
        }
        Matched { name, rule: None, captures: Captures::default() }
    }

    fn from_tables(name: &str, renames: &[(&str, &str)], rules: &[(&str, TensorClass, Placement)]) -> RuleSet {
        RuleSet {
            name: name.to_string(),
            renames: renames
                .iter()
                .map(|(from, to)| Rename { from: (*from).to_string(), to: (*to).to_string() })
                .collect(),
            rules: rules
                .iter()
                .map(|&(pattern, class, place)| Rule { pattern: pattern.to_string(), class, place })
                .collect(),
        }
    }
}

/// Whether a pattern segment is numbered in templates.
fn is_capture(segment: &str) -> bool {
    segment.contains('*') || segment.contains('|')
}

/// Matches a whole name; see the module docs.
fn match_name(pattern: &str, name: &str) -> Option<Captures> {
    let pattern: Vec<&str> = pattern.split('.').collect();
    let name: Vec<&str> = name.split('.').collect();
    let mut captures = Captures::default();
    match_segments(&pattern, &name, 0, &mut captures).then_some(captures)
}

/// Matches the rest of the pattern against the name from segment `at` on, backtracking over `**`.
fn match_segments(pattern: &[&str], name: &[&str], at: usize, captures: &mut Captures) -> bool {
    let Some((&segment, pattern)) = pattern.split_first() else {
        return at == name.len();
    };
    let undo = captures.clone();
    if segment == "**" {
        for end in at..=name.len() {
            captures.wild.push(name[at..end].join("."));
            captures.order.push(0);
            if match_segments(pattern, name, end, captures) {
                return true;
            }
            captures.clone_from(&undo);
        }
        return false;
    }
    let Some(&text) = name.get(at) else { return false };
    if segment == "{block}" {
        // `+3` and `007` are not block numbers: a name must be recoverable from its number.
        let Ok(block) = text.parse::<u32>() else { return false };
        if block.to_string() != text || captures.block.is_some() {
            return false;
        }
        captures.block = Some(block);
        captures.prefix = name[..at].join(".");
    } else if is_capture(segment) {
        let Some(taken) = segment.split('|').position(|alternative| match_glob(alternative, text)) else {
            return false;
        };
        captures.wild.push(text.to_string());
        captures.order.push(taken);
    } else if segment != text {
        return false;
    }
    if match_segments(pattern, name, at + 1, captures) {
        return true;
    }
    captures.clone_from(&undo);
    false
}

/// `*` stands for any run of characters.
fn match_glob(glob: &str, text: &str) -> bool {
    let mut parts = glob.split('*');
    let first = parts.next().unwrap_or("");
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let mut last = None;
    for part in parts {
        if let Some(middle) = last.replace(part) {
            let Some(at) = rest.find(middle) else { return false };
            rest = &rest[at + middle.len()..];
        }
    }
    last.map_or(rest.is_empty(), |last| rest.ends_with(last))
}

/// Puts captures into a template; an empty capture takes its dot along.
fn fill_template(template: &str, captures: &Captures) -> String {
    let mut name = template.to_string();
    if let Some(block) = captures.block {
        name = name.replace("{block}", &block.to_string());
    }
    for (number, text) in captures.wild.iter().enumerate() {
        name = name.replace(&format!("{{{}}}", number + 1), text);
    }
    name.split('.').filter(|segment| !segment.is_empty()).collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn built_in_sets_are_well_formed_and_survive_json() {
        for rules in [RuleSet::wan(), RuleSet::generic()] {
            rules.check().unwrap();
            assert_eq!(RuleSet::from_json(&serde_json::to_string(&rules).unwrap()).unwrap(), rules);
        }
    }

    #[test]
    fn wan_names_of_every_layout_meet() {
        let wan = RuleSet::wan();
        for (given, want) in [
            ("blocks.7.self_attn.q.weight", "blocks.7.attn1.to_q.weight"),
            ("blocks.7.attn1.to_q.base_layer.weight", "blocks.7.attn1.to_q.weight"),
            ("transformer.blocks.7.attn1.to_q.weight", "blocks.7.attn1.to_q.weight"),
            ("model.diffusion_model.blocks.7.self_attn.q.weight", "blocks.7.attn1.to_q.weight"),
            ("blocks.0.cross_attn.o.bias", "blocks.0.attn2.to_out.0.bias"),
            ("blocks.0.self_attn.norm_q.weight", "blocks.0.attn1.norm_q.weight"),
            ("blocks.0.norm3.bias", "blocks.0.norm2.bias"),
            ("blocks.29.ffn.0.weight", "blocks.29.ffn.net.0.proj.weight"),
            ("blocks.29.attn2.to_k.lora_A.lora1.weight", "blocks.29.attn2.to_k.lora_A.weight"),
            ("blocks.29.attn2.to_k.lora_B.default.weight", "blocks.29.attn2.to_k.lora_B.weight"),
            ("blocks.29.attn2.to_k.lora_B.weight", "blocks.29.attn2.to_k.lora_B.weight"),
            ("time_projection.1.bias", "condition_embedder.time_proj.bias"),
            ("head.modulation", "scale_shift_table"),
            ("unrelated", "unrelated"),
        ] {
            assert_eq!(wan.canonical_name(given), want, "{given}");
        }
    }

    #[test]
    fn generic_rules_take_the_first_number_as_the_block() {
        let rules = RuleSet::generic();
        let class = |name: &str, dims| {
            let matched = rules.apply(name, dims);
            let rule = &rules.rules[matched.rule.unwrap()];
            (rule.class, rule.place, matched.captures.block, matched.captures.prefix)
        };
        assert_eq!(
            class("encoder.block.3.layer.0.SelfAttention.q.weight", 2),
            (TensorClass::AttentionBase, Placement::Region, Some(3), "encoder.block".to_string())
        );
        assert_eq!(class("encoder.block.3.layer.1.DenseReluDense.wi_0.weight", 2).0, TensorClass::Ffn);
        assert_eq!(
            class("encoder.block.3.layer.0.SelfAttention.relative_attention_bias.weight", 2).1,
            Placement::Plain
        );
        assert_eq!(class("shared.weight", 2).1, Placement::Plain);
        assert_eq!(class("layers.4.conv.weight", 4).1, Placement::Plain);
    }

    #[test]
    fn bad_rule_sets_are_refused() {
        for (text, want) in [
            (r#"{"name":"x","rules":[{"pattern":"a.weight","class":"ffn","place":"region"}]}"#, "no {block}"),
            (r#"{"name":"x","renames":[{"from":"a.*","to":"{2}"}],"rules":[]}"#, "does not capture"),
            (r#"{"name":"x","renames":[{"from":"a.*","to":"{1"}],"rules":[]}"#, "unclosed"),
            (r#"{"name":"x","rules":[{"pattern":"a..b","class":"ffn","place":"plain"}]}"#, "empty segment"),
            (r#"{"name":"x","rulez":[]}"#, "unknown field"),
        ] {
            let error = RuleSet::from_json(text).unwrap_err().to_string();
            assert!(error.contains(want), "{error}");
        }
    }

    proptest! {
        #[test]
        fn globs_agree_with_the_obvious_definition(glob in "[ab*]{0,6}", text in "[ab]{0,8}") {
            fn oracle(glob: &[u8], text: &[u8]) -> bool {
                match (glob.first(), text.first()) {
                    (None, None) => true,
                    (Some(b'*'), _) => oracle(&glob[1..], text) || (!text.is_empty() && oracle(glob, &text[1..])),
                    (Some(want), Some(have)) => want == have && oracle(&glob[1..], &text[1..]),
                    _ => false,
                }
            }
            prop_assert_eq!(match_glob(&glob, &text), oracle(glob.as_bytes(), text.as_bytes()));
        }

        #[test]
        fn any_name_is_classified_without_panic(name in "[a-z0-9._*{}|]{0,40}", dims in 0usize..4) {
            for rules in [RuleSet::wan(), RuleSet::generic()] {
                rules.apply(&name, dims);
            }
        }
    }
}
