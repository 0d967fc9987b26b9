//! How a batch is cut: a tile is some rows of one sequence and the query heads of one KV head.

use std::ops::Range;

use super::{AttnInput, record_len};

/// Queries a tile has at most (but at least one row): enough to pay for converting a block, few enough that
/// their records stay in the nearer caches.
const MAX_QUERIES: usize = 48;

/// Rows of one sequence times the query heads of one KV head.
pub(super) struct Tile {
    pub(super) seq: usize,
    pub(super) rows: Range<usize>,
    pub(super) kv_head: usize,
    heads: Vec<usize>,
}

/// One row and head of a tile.
#[derive(Clone, Copy)]
pub(super) struct Query {
    pub(super) row: usize,
    pub(super) head: usize,
    /// Absolute position.
    pub(super) pos: usize,
}

impl Tile {
    /// The tile's queries, rows ascending.
    pub(super) fn queries(&self, input: &AttnInput<'_>) -> impl Iterator<Item = Query> {
        let seq = &input.seqs[self.seq];
        let (first_pos, first_row) = (seq.first_pos, seq.rows.start);
        self.rows.clone().flat_map(move |row| {
            self.heads.iter().map(move |&head| Query { row, head, pos: first_pos + row - first_row })
        })
    }

    /// Number of queries.
    pub(super) fn n_queries(&self) -> usize {
        self.rows.len() * self.heads.len()
    }

    /// Numbers of the tile's records.
    pub(super) fn state_len(&self, input: &AttnInput<'_>) -> usize {
        self.n_queries() * record_len(input.arena.geometry().v_dim)
    }
}

/// Cuts a batch into tiles, the most expensive (latest) rows of each sequence first, so that threads finish
/// together.
pub(super) fn tiles(input: &AttnInput<'_>) -> Vec<Tile> {
    let heads_of: Vec<Vec<usize>> = (0..input.arena.geometry().n_kv_heads)
        .map(|kv| (0..input.n_q_heads).filter(|&head| input.kv_index[head] as usize == kv).collect())
        .collect();
    let mut tiles = Vec::new();
    for (seq_idx, seq) in input.seqs.iter().enumerate() {
        for (kv_head, heads) in heads_of.iter().enumerate().filter(|(_, heads)| !heads.is_empty()) {
            let n_rows = (MAX_QUERIES / heads.len()).max(1);
            let starts = seq.rows.clone().step_by(n_rows).rev();
            tiles.extend(starts.map(|start| Tile {
                seq: seq_idx,
                rows: start..seq.rows.end.min(start + n_rows),
                kv_head,
                heads: heads.clone(),
            }));
        }
    }
    tiles
}
