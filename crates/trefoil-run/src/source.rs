//! Where an executor gets its segments' sub-models from.

use crate::RunError;
use std::collections::BTreeSet;
use std::path::PathBuf;
use trefoil_core::{OperatorGraph, OperatorId, Plan, SegmentId};
use trefoil_onnx::Prepared;
use trefoil_units::SubModel;

/// Yields the ONNX sub-model of each segment of a plan.
pub trait SegmentSource {
    /// The sub-model of `segment`. Its ports carry the tensors' names in the prepared model, in any order.
    ///
    /// # Errors
    /// [`RunError::Extract`] when the segment cannot be cut out or written.
    fn segment(&self, plan: &Plan, segment: SegmentId) -> Result<SubModel, RunError>;
}

/// Sub-models that were extracted before, one per segment of the plan. What worker processes use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtractedSegments(pub Vec<SubModel>);

impl ExtractedSegments {
    /// Extracts every segment of a plan.
    ///
    /// # Errors
    /// Those of the source.
    pub fn of(plan: &Plan, source: &dyn SegmentSource) -> Result<Self, RunError> {
        let ids = (0..plan.segments.len() as u32).map(SegmentId);
        ids.map(|segment| source.segment(plan, segment)).collect::<Result<_, _>>().map(Self)
    }
}

impl SegmentSource for ExtractedSegments {
    fn segment(&self, plan: &Plan, segment: SegmentId) -> Result<SubModel, RunError> {
        self.0.get(segment.0 as usize).cloned().ok_or_else(|| RunError::Extract {
            what: format!("segment {} of {}", segment.0, plan.segments.len()),
            reason: format!("only {} sub-models were extracted", self.0.len()),
        })
    }
}

/// Yields the sub-model of any convex set of operators; what verification needs to look inside a segment.
pub trait OperatorSource: SegmentSource {
    /// The sub-model of a convex set of operators of model `model` (an index in [`Plan::models`]).
    ///
    /// # Errors
    /// [`RunError::Extract`] when the set cannot be cut out or written.
    fn operators(&self, model: u32, operators: &BTreeSet<OperatorId>) -> Result<SubModel, RunError>;
}

/// A prepared model, its operators, and the folder that sub-models are extracted to.
#[derive(Debug, Clone)]
pub struct PreparedModelSource<'a> {
    /// The prepared model.
    pub prepared: &'a Prepared,
    /// Its operators, as the plan's ids refer to them.
    pub graph: &'a OperatorGraph,
    /// Folder for sub-models; those of one folder share one copy of the weights.
    pub folder: PathBuf,
}

/// Extracts from prepared models, in the order of [`Plan::models`].
#[derive(Debug, Clone)]
pub struct PreparedSource<'a>(pub Vec<PreparedModelSource<'a>>);

impl<'a> PreparedSource<'a> {
    /// For a plan of one model.
    pub fn new(prepared: &'a Prepared, graph: &'a OperatorGraph, folder: impl Into<PathBuf>) -> Self {
        Self(vec![PreparedModelSource { prepared, graph, folder: folder.into() }])
    }
}

impl SegmentSource for PreparedSource<'_> {
    fn segment(&self, plan: &Plan, segment: SegmentId) -> Result<SubModel, RunError> {
        let description = plan.segments.get(segment.0 as usize).ok_or_else(|| RunError::Extract {
            what: format!("segment {}", segment.0),
            reason: format!("the plan has {}", plan.segments.len()),
        })?;
        self.operators(description.model, &description.operators.iter().copied().collect())
    }
}

impl OperatorSource for PreparedSource<'_> {
    fn operators(&self, model: u32, operators: &BTreeSet<OperatorId>) -> Result<SubModel, RunError> {
        let what = || format!("{} operators of model {model}", operators.len());
        let source = self
            .0
            .get(model as usize)
            .ok_or_else(|| RunError::Extract { what: what(), reason: format!("there are {} models", self.0.len()) })?;
        let extracted = source
            .prepared
            .extract(source.graph, operators, &source.folder)
            .map_err(|error| RunError::Extract { what: what(), reason: error.to_string() })?;
        Ok(SubModel { path: extracted.path, inputs: extracted.inputs, outputs: extracted.outputs })
    }
}
