//! What the scheduler chose for one step, the same bytes for every rank of the group.
//!
//! A plan names block tables by DCP rank, so that each rank reads its own row of the same plan and no branch
//! around a collective can depend on rank-local data.

use std::ops::Range;

use crate::{BlockId, Epoch, SeqId, StepId, TokenId};

/// One forward pass over one batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// The step's number; ranks refuse one out of order.
    pub step: StepId,
    /// The group's life; ranks refuse a stale one.
    pub epoch: Epoch,
    /// The sequences of the batch, in batch order.
    pub seqs: Vec<SeqStep>,
}

/// One sequence's part of a step: rows `context_len .. context_len + tokens.len()`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SeqStep {
    /// Whose rows these are.
    pub seq: SeqId,
    /// Tokens whose KV is already computed: the absolute position of the first new row.
    pub context_len: usize,
    /// The new rows (`query_len` of them, at least one).
    pub tokens: Vec<TokenId>,
    /// How many of the last rows need logits: 1 when the step samples, 0 inside a chunked prefill.
    pub n_logits: usize,
    /// Block tables by DCP rank, covering at least `context_len + query_len` positions.
    pub tables: Vec<Vec<BlockId>>,
}

/// One row of the batch: where its token stands, and to whom it belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanRow {
    /// Index into [`StepPlan::seqs`].
    pub seq_idx: usize,
    /// Absolute position.
    pub pos: usize,
    /// The token.
    pub token: TokenId,
}

impl SeqStep {
    /// Rows computed in this step.
    pub fn query_len(&self) -> usize {
        self.tokens.len()
    }

    /// Keys visible to the last row.
    pub fn seq_len(&self) -> usize {
        self.context_len + self.tokens.len()
    }
}

impl StepPlan {
    /// All rows of the batch, sequence by sequence.
    pub fn rows(&self) -> impl Iterator<Item = PlanRow> + '_ {
        self.seqs.iter().enumerate().flat_map(|(seq_idx, seq)| {
            seq.tokens.iter().enumerate().map(move |(i, &token)| PlanRow {
                seq_idx,
                pos: seq.context_len + i,
                token,
            })
        })
    }

    /// Number of rows.
    pub fn n_rows(&self) -> usize {
        self.seqs.iter().map(SeqStep::query_len).sum()
    }

    /// Row range of each sequence, in batch order.
    pub fn row_ranges(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.seqs.iter().scan(0, |next, seq| {
            let start = *next;
            *next += seq.query_len();
            Some(start..*next)
        })
    }

    /// The rows that need logits, ascending.
    pub fn logit_rows(&self) -> Vec<usize> {
        self.row_ranges()
            .zip(&self.seqs)
            .flat_map(|(rows, seq)| rows.end - seq.n_logits.min(rows.len())..rows.end)
            .collect()
    }

    /// A digest of everything in the plan (FNV-1a over its canonical words). Every rank computes it from the
    /// plan it decoded and compares it with its peers' before the first collective of the step.
    pub fn digest(&self) -> u64 {
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        let mut word = |value: u64| {
            for byte in value.to_le_bytes() {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
            }
        };
        word(self.step.0);
        word(self.epoch.0);
        word(self.seqs.len() as u64);
        for seq in &self.seqs {
            word(seq.seq.0);
            word(seq.context_len as u64);
            word(seq.n_logits as u64);
            word(seq.tokens.len() as u64);
            seq.tokens.iter().for_each(|token| word(u64::from(token.0)));
            word(seq.tables.len() as u64);
            for table in &seq.tables {
                word(table.len() as u64);
                table.iter().for_each(|block| word(u64::from(block.0)));
            }
        }
        hash
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> StepPlan {
        let seq = |id, context_len, n: u32, n_logits| SeqStep {
            seq: SeqId(id),
            context_len,
            tokens: (0..n).map(TokenId).collect(),
            n_logits,
            tables: vec![vec![BlockId(3)], vec![]],
        };
        StepPlan {
            step: StepId(1),
            epoch: Epoch(2),
            seqs: vec![seq(7, 4, 3, 0), seq(8, 9, 1, 1), seq(9, 0, 4, 2)],
        }
    }

    #[test]
    fn rows_carry_absolute_positions_and_logit_rows_are_the_last_ones() {
        let plan = plan();
        assert_eq!(plan.n_rows(), 8);
        assert_eq!(plan.rows().map(|row| row.pos).collect::<Vec<_>>(), [4, 5, 6, 9, 0, 1, 2, 3]);
        assert_eq!(plan.logit_rows(), [3, 6, 7]);
    }

    #[test]
    fn any_changed_field_changes_the_digest() {
        let base = plan();
        let mut edits: Vec<StepPlan> = Vec::new();
        let mut edit = |change: &dyn Fn(&mut StepPlan)| {
            let mut copy = base.clone();
            change(&mut copy);
            edits.push(copy);
        };
        edit(&|p| p.step.0 += 1);
        edit(&|p| p.epoch.0 += 1);
        edit(&|p| p.seqs[0].seq.0 += 1);
        edit(&|p| p.seqs[0].context_len += 1);
        edit(&|p| p.seqs[0].n_logits += 1);
        edit(&|p| p.seqs[0].tokens[0].0 += 1);
        edit(&|p| p.seqs[0].tables[0][0].0 += 1);
        edit(&|p| p.seqs[0].tables.swap(0, 1));
        edit(&|p| p.seqs.swap(0, 1));
        edit(&|p| drop(p.seqs.pop()));
        assert!(edits.iter().all(|copy| copy.digest() != base.digest()));
    }
}
