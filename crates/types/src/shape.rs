//! Shape of a decode group: how N ranks share heads (tensor parallel) and positions (context parallel).
//!
//! Ranks are numbered head group first: rank `n` is DCP rank `n mod D` of head group `n / D`. Everything that
//! is not attention (output and feed-forward projections, vocabulary) is split over all N ranks.

use std::{fmt, ops::Range, str::FromStr};

use crate::layout::N_SHARDS;

/// N ranks, of which `dcp_size` share the positions of each head group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupShape {
    n_ranks: usize,
    dcp_size: usize,
}

/// A group that cannot exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShapeError {
    /// The number of ranks is not in 1..=8.
    RankCount(usize),
    /// `dcp_size` does not divide the number of ranks.
    DcpSize {
        /// Ranks asked for.
        n_ranks: usize,
        /// DCP size asked for.
        dcp_size: usize,
    },
}

impl fmt::Display for ShapeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RankCount(n_ranks) => {
                write!(f, "a decode group has 1 to {N_SHARDS} ranks, not {n_ranks}")
            }
            Self::DcpSize { n_ranks, dcp_size } => {
                write!(f, "dcp {dcp_size} does not divide the {n_ranks} ranks of the group")
            }
        }
    }
}

impl std::error::Error for ShapeError {}

impl GroupShape {
    /// One rank that holds everything: a prefill worker, or a group of one.
    pub const SINGLE: Self = Self { n_ranks: 1, dcp_size: 1 };

    /// A group of `n_ranks` (1 to 8), every `dcp_size` of which share positions.
    pub const fn new(n_ranks: usize, dcp_size: usize) -> Result<Self, ShapeError> {
        if n_ranks == 0 || n_ranks > N_SHARDS {
            return Err(ShapeError::RankCount(n_ranks));
        }
        if dcp_size == 0 || !n_ranks.is_multiple_of(dcp_size) {
            return Err(ShapeError::DcpSize { n_ranks, dcp_size });
        }
        Ok(Self { n_ranks, dcp_size })
    }

    /// N, all ranks of the group.
    pub const fn n_ranks(self) -> usize {
        self.n_ranks
    }

    /// D, ranks that share the positions of one head group.
    pub const fn dcp_size(self) -> usize {
        self.dcp_size
    }

    /// N / D, the attention tensor-parallel size.
    pub const fn n_head_groups(self) -> usize {
        self.n_ranks / self.dcp_size
    }

    /// The head group of rank `rank`.
    pub const fn head_group(self, rank: usize) -> usize {
        rank / self.dcp_size
    }

    /// The DCP rank of rank `rank`.
    pub const fn dcp_rank(self, rank: usize) -> usize {
        rank % self.dcp_size
    }

    /// The ranks of head group `head_group`.
    pub const fn ranks_of(self, head_group: usize) -> Range<usize> {
        head_group * self.dcp_size..(head_group + 1) * self.dcp_size
    }

    /// The canonical segments (of [`N_SHARDS`]) that rank `rank` holds of every row-parallel sum.
    pub const fn segments(self, rank: usize) -> Range<usize> {
        rank * N_SHARDS / self.n_ranks..(rank + 1) * N_SHARDS / self.n_ranks
    }

    /// Whether results are the same bits as those of one rank: N divides C.
    pub const fn is_canonical(self) -> bool {
        N_SHARDS.is_multiple_of(self.n_ranks)
    }

    /// Query and KV heads of rank `rank`.
    pub fn head_split(self, rank: usize, n_q_heads: usize, n_kv_heads: usize, seg_heads: usize) -> HeadSplit {
        let bounds = canonical_bounds(n_q_heads, seg_heads);
        let own = |rank: usize| {
            let segments = self.segments(rank);
            bounds[segments.start]..bounds[segments.end]
        };
        let ranks = self.ranks_of(self.head_group(rank));
        let group_q = own(ranks.start).start..own(ranks.end - 1).end;
        let group_size = n_q_heads / n_kv_heads;
        let kv = if group_q.is_empty() {
            0..0
        } else {
            group_q.start / group_size..(group_q.end - 1) / group_size + 1
        };
        HeadSplit { group_q, own_q: own(rank), kv, group_size }
    }

    /// How many times the KV of one token is stored over the group, at least: 1 is ideal, N the worst.
    pub fn duplication(self, n_q_heads: usize, n_kv_heads: usize) -> f64 {
        let stored: usize = (0..self.n_head_groups())
            .map(|group| self.head_split(group * self.dcp_size, n_q_heads, n_kv_heads, 1).kv.len())
            .sum();
        stored as f64 / n_kv_heads as f64
    }
}

/// The heads one rank works on. All ranges are of global head numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadSplit {
    /// Query heads of the rank's head group: it computes partial attention for all of them.
    pub group_q: Range<usize>,
    /// The contiguous share of `group_q` that the rank keeps after the merge: its slice of `o_proj`.
    pub own_q: Range<usize>,
    /// KV heads that the query heads of the group read, and the rank stores.
    pub kv: Range<usize>,
    /// Query heads a KV head.
    pub group_size: usize,
}

impl HeadSplit {
    /// For each query head of the group, in order, the index of its KV head among those stored here.
    pub fn kv_index(&self) -> Vec<u32> {
        self.group_q.clone().map(|head| (head / self.group_size - self.kv.start) as u32).collect()
    }
}

/// The [`N_SHARDS`] + 1 bounds of the canonical segments of a sum over `len` terms:
/// `align · floor(i·(len/align)/C)`. `align` must divide `len`.
pub fn canonical_bounds(len: usize, align: usize) -> [usize; N_SHARDS + 1] {
    debug_assert!(align > 0 && len.is_multiple_of(align));
    std::array::from_fn(|i| align * (i * (len / align) / N_SHARDS))
}

/// How the D partial results of attention become one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MergeForm {
    /// One all-to-all of packed partials over heads; the receiver merges in canonical order. The default.
    #[default]
    A2a,
    /// All-gather of the log-sum-exp, local correction, reduce-scatter over heads.
    AgRs,
}

/// How a rank comes by the query heads of its whole head group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum QueryForm {
    /// Every rank computes all query heads of its group; no communication. The default.
    #[default]
    Replicate,
    /// Every rank computes its own share, then all-gathers over heads.
    Gather,
}

impl fmt::Display for MergeForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::A2a => "a2a",
            Self::AgRs => "ag_rs",
        })
    }
}

impl FromStr for MergeForm {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "a2a" => Ok(Self::A2a),
            "ag_rs" => Ok(Self::AgRs),
            _ => Err(format!("unknown merge form {text:?}: choose a2a or ag_rs")),
        }
    }
}

impl fmt::Display for QueryForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Replicate => "replicate",
            Self::Gather => "gather",
        })
    }
}

impl FromStr for QueryForm {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "replicate" => Ok(Self::Replicate),
            "gather" => Ok(Self::Gather),
            _ => Err(format!("unknown query form {text:?}: choose replicate or gather")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(n_ranks: usize, dcp_size: usize, n_q_heads: usize) -> Vec<usize> {
        let shape = GroupShape::new(n_ranks, dcp_size).unwrap();
        (0..n_ranks).map(|rank| shape.head_split(rank, n_q_heads, n_q_heads, 1).own_q.len()).collect()
    }

    #[test]
    fn nine_heads_are_cut_at_the_canonical_bounds() {
        assert_eq!(own(2, 2, 9), [4, 5]);
        assert_eq!(own(4, 4, 9), [2, 2, 2, 3]);
        assert_eq!(own(8, 1, 9), [1, 1, 1, 1, 1, 1, 1, 2]);
    }

    #[test]
    fn shares_partition_the_heads_for_any_count() {
        for n_ranks in 1..=8 {
            for dcp_size in (1..=n_ranks).filter(|d| n_ranks % d == 0) {
                let shape = GroupShape::new(n_ranks, dcp_size).unwrap();
                for (n_q, n_kv) in [(1, 1), (4, 2), (7, 7), (9, 3), (12, 4), (14, 2), (32, 8)] {
                    let mut next = 0;
                    for rank in 0..n_ranks {
                        let split = shape.head_split(rank, n_q, n_kv, 1);
                        assert_eq!(split.own_q.start, next);
                        next = split.own_q.end;
                        assert!(split.own_q.is_empty() || split.group_q.contains(&split.own_q.start));
                        assert!(split.kv_index().iter().all(|&i| (i as usize) < split.kv.len()));
                    }
                    assert_eq!(next, n_q);
                }
            }
        }
    }

    #[test]
    fn duplication_counts_the_copies_that_dcp_removes() {
        let dup = |n, d| GroupShape::new(n, d).unwrap().duplication(32, 4);
        assert_eq!([dup(8, 8), dup(8, 2), dup(8, 1)], [1.0, 1.0, 2.0]);
    }

    #[test]
    fn bad_shapes_are_refused() {
        assert_eq!(GroupShape::new(0, 1), Err(ShapeError::RankCount(0)));
        assert_eq!(GroupShape::new(9, 1), Err(ShapeError::RankCount(9)));
        assert_eq!(GroupShape::new(4, 3), Err(ShapeError::DcpSize { n_ranks: 4, dcp_size: 3 }));
    }
}
