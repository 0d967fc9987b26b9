//! The glossary as code: identifiers, the layout of KV positions over ranks, and the small value types that
//! every other crate speaks in.
//!
//! This crate has no dependencies and does no I/O, so that any crate may use it without pulling a tree
//! behind it. It holds no behaviour beyond arithmetic and validation.

mod dtype;
mod ids;
mod layout;
mod plan;
mod request;
mod secret;
mod shape;

pub use dtype::{KvDtype, WeightForm};
pub use ids::{
    BlockHash, BlockId, Epoch, HandoffId, Incarnation, RequestId, SeqId, StepId, TokenId, WorkerId,
};
pub use layout::{DcpLayout, LayoutError, N_SHARDS};
pub use plan::{PlanRow, SeqStep, StepPlan};
pub use request::{
    FinishReason, MAX_LOGPROBS, Prompt, SamplingError, SamplingParams, TokenLogprob, TokenLogprobs, Usage,
};
pub use secret::{GroupSecret, SecretFormError};
pub use shape::{GroupShape, HeadSplit, MergeForm, QueryForm, ShapeError, canonical_bounds};
