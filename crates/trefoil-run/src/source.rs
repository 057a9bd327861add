//! Where an executor gets its segments' sub-models from.

use crate::RunError;
use trefoil_core::{Plan, SegmentId};
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
