//! The forward pass of one rank over one batch.
//!
//! One path serves decode (one row a sequence), chunked prefill and the verification of drafts (several rows): insert
//! the new keys and values, then attend with one mask rule. Collectives stand in the same order on every rank and
//! depend on the plan alone. Per layer:
//!
//! ```text
//! norm -> q,k,v -> rotate -> store k,v -> attend locally -> merge over the head group -> o -> sum over ranks
//! norm -> gate,up -> silu·up -> down -> sum over ranks
//! ```

use longreach_collective::CommError;
use longreach_types::{MergeForm, QueryForm, StepPlan};

use crate::{
    backend::{Backend, BatchLayout, MergeShape},
    shard::{Layer, ModelShard},
};

/// Called after each layer whose keys and values are final: the device, the layer, the KV.
pub type LayerHook<'a, B> = dyn FnMut(&B, usize, &<B as Backend>::Kv) + 'a;

/// The groups of ranks that one rank belongs to.
pub struct Comms<C> {
    /// All ranks of the decode group.
    pub world: C,
    /// The ranks that share positions with this one.
    pub head_group: C,
}

/// Why a step did not complete. Any of these ends the group's epoch.
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The ranks hold different plans.
    #[error("ranks disagree about step {step}: plan digests {digests:x?}")]
    PlanDigest {
        /// The step.
        step: u64,
        /// Digest of each rank, in rank order.
        digests: Vec<u64>,
    },
    /// The plan names no block for a position this rank owns.
    #[error("the plan holds no block for position {pos}")]
    MissingBlock {
        /// The position.
        pos: usize,
    },
    /// A token id is not below the vocabulary size.
    #[error("token {token} is outside the vocabulary of {vocab_size}")]
    TokenRange {
        /// The token.
        token: u32,
        /// Entries of the vocabulary.
        vocab_size: usize,
    },
    /// A position is past the end of the rotation tables.
    #[error("position {pos} is past the model's context of {max_position}")]
    PositionRange {
        /// The position.
        pos: usize,
        /// Context length.
        max_position: usize,
    },
}

/// Tensors reused from step to step.
#[derive(Default)]
pub struct Scratch<T> {
    x: T,
    normed: T,
    qkv: T,
    q: T,
    partials: T,
    merged: T,
    delta: T,
    gate_up: T,
    ffn: T,
    selected: T,
    logits: T,
    gathered: T,
}

impl<B: Backend> ModelShard<B> {
    /// Runs one step. Returns the logits of [`StepPlan::logit_rows`], `[n][vocab_size]`, the same on every rank.
    ///
    /// `on_layer` is called after each layer whose keys and values are final, so that they can be sent away while
    /// the next layer computes.
    pub fn forward(
        &self,
        plan: &StepPlan,
        kv: &mut B::Kv,
        comms: &mut Comms<B::Comm>,
        scratch: &mut Scratch<B::Tensor>,
        on_layer: &mut LayerHook<'_, B>,
    ) -> Result<Vec<f32>, ForwardError> {
        self.agree_on_plan(plan, comms)?;
        self.check_ranges(plan)?;
        let batch = BatchLayout::new(plan, self.kv_shape.layout, self.kv_shape.dcp_rank)
            .map_err(|pos| ForwardError::MissingBlock { pos })?;
        let mut step = Step { shard: self, backend: &self.backend, batch: &batch, comms, scratch };
        step.backend.embed(self.embedding(), &batch.tokens, &mut step.scratch.x);
        for (idx, layer) in self.layers.iter().enumerate() {
            step.attention(idx, layer, kv)?;
            on_layer(&self.backend, idx, kv);
            step.feed_forward(layer)?;
        }
        step.logits()
    }

    /// Compares plan digests before the first collective whose size depends on the plan.
    fn agree_on_plan(&self, plan: &StepPlan, comms: &mut Comms<B::Comm>) -> Result<(), ForwardError> {
        if self.shape.n_ranks() == 1 {
            return Ok(());
        }
        let digests = self.backend.gather_word(&mut comms.world, plan.digest())?;
        if digests.iter().any(|&digest| digest != digests[0]) {
            return Err(ForwardError::PlanDigest { step: plan.step.0, digests });
        }
        Ok(())
    }

    /// Token ids index the embedding, and positions the rotation tables; the plan is equal on all ranks by now, so
    /// all of them refuse it together.
    fn check_ranges(&self, plan: &StepPlan) -> Result<(), ForwardError> {
        let (vocab_size, max_position) = (self.config.vocab_size, self.config.max_position);
        for row in plan.rows() {
            if row.token.0 as usize >= vocab_size {
                return Err(ForwardError::TokenRange { token: row.token.0, vocab_size });
            }
            if row.pos >= max_position {
                return Err(ForwardError::PositionRange { pos: row.pos, max_position });
            }
        }
        Ok(())
    }
}

/// One step in progress.
struct Step<'a, B: Backend> {
    shard: &'a ModelShard<B>,
    backend: &'a B,
    batch: &'a BatchLayout,
    comms: &'a mut Comms<B::Comm>,
    scratch: &'a mut Scratch<B::Tensor>,
}

impl<B: Backend> Step<'_, B> {
    fn attention(&mut self, idx: usize, layer: &Layer<B>, kv: &mut B::Kv) -> Result<(), ForwardError> {
        let (shard, s) = (self.shard, &mut *self.scratch);
        self.backend.rms_norm(&s.x, &layer.attn_norm, shard.config.rms_eps, &mut s.normed);
        self.backend.matmul(&layer.qkv, &s.normed, layer.qkv_bias.as_ref(), &mut s.qkv);
        self.backend.rotate(&shard.rope, &shard.qkv_columns, self.batch, &mut s.qkv);
        self.backend.store_kv(kv, idx, &shard.qkv_columns, self.batch, &s.qkv);
        let q = match shard.query_form {
            QueryForm::Replicate => &s.qkv,
            QueryForm::Gather => {
                let columns = &shard.query_columns;
                self.backend.gather_columns(&mut self.comms.head_group, &s.qkv, columns, &mut s.q)?;
                &s.q
            }
        };
        let shape = &shard.attention[idx];
        self.backend.attend(kv, shape, self.batch, q, &mut s.partials);
        self.merge()?;
        let s = &mut *self.scratch;
        self.backend.matmul(&layer.o, &s.merged, None, &mut s.delta);
        self.reduce_into_x(layer.o_bias.as_ref())
    }

    /// Partials of all heads of the group become the finished heads that this rank keeps.
    fn merge(&mut self) -> Result<(), ForwardError> {
        let shape = MergeShape { n_rows: self.batch.tokens.len(), ..self.shard.merge_shape.clone() };
        let (s, comm) = (&mut *self.scratch, &mut self.comms.head_group);
        if shape.shares.len() == 1 {
            self.backend.finish(&shape, &s.partials, &mut s.merged);
            return Ok(());
        }
        match self.shard.merge_form {
            MergeForm::A2a => self.backend.merge_a2a(comm, &shape, &s.partials, &mut s.merged)?,
            MergeForm::AgRs => self.backend.merge_ag_rs(comm, &shape, &s.partials, &mut s.merged)?,
        }
        Ok(())
    }

    fn feed_forward(&mut self, layer: &Layer<B>) -> Result<(), ForwardError> {
        let s = &mut *self.scratch;
        self.backend.rms_norm(&s.x, &layer.ffn_norm, self.shard.config.rms_eps, &mut s.normed);
        self.backend.matmul(&layer.gate_up, &s.normed, None, &mut s.gate_up);
        self.backend.silu_mul(&s.gate_up, &mut s.ffn);
        self.backend.matmul(&layer.down, &s.ffn, None, &mut s.delta);
        self.reduce_into_x(None)
    }

    fn reduce_into_x(&mut self, bias: Option<&B::Vector>) -> Result<(), ForwardError> {
        let s = &mut *self.scratch;
        if self.shard.shape.n_ranks() > 1 {
            self.backend.all_reduce(&mut self.comms.world, &mut s.delta)?;
        }
        if let Some(bias) = bias {
            self.backend.add_bias(&mut s.delta, bias);
        }
        self.backend.add(&mut s.x, &s.delta);
        Ok(())
    }

    fn logits(&mut self) -> Result<Vec<f32>, ForwardError> {
        if self.batch.logit_rows.is_empty() {
            return Ok(Vec::new());
        }
        let (shard, s) = (self.shard, &mut *self.scratch);
        self.backend.select_rows(&s.x, &self.batch.logit_rows, &mut s.selected);
        self.backend.rms_norm(&s.selected, &shard.final_norm, shard.config.rms_eps, &mut s.normed);
        self.backend.matmul(&shard.head, &s.normed, None, &mut s.logits);
        if shard.shape.n_ranks() == 1 {
            return Ok(self.backend.read(&s.logits).into_owned());
        }
        let columns = &shard.vocab_columns;
        self.backend.gather_columns(&mut self.comms.world, &s.logits, columns, &mut s.gathered)?;
        Ok(self.backend.read(&s.gathered).into_owned())
    }
}
