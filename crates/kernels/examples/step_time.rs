//! Time of the operations of one small model (30 layers, hidden 576, 9 query and 3 KV heads of 64, feed-forward
//! 1536, vocabulary 49152), by operation, with random weights.
//!
//! `cargo run --release -p longreach-kernels --example step_time -- [threads] [isa] [weight type] [context]`
#![allow(clippy::print_stdout, reason = "this program's output is its purpose")]

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use longreach_kernels::*;
use longreach_types::{BlockId, DcpLayout, KvDtype, WeightForm};

const HIDDEN: usize = 576;
const FFN: usize = 1536;
const N_LAYERS: usize = 30;
const N_Q: usize = 9;
const N_KV: usize = 3;
const HEAD: usize = 64;
const VOCAB: usize = 49152;
const BLOCK: usize = 32;
const QKV: usize = (N_Q + 2 * N_KV) * HEAD;

struct Layer {
    qkv: PackedMatrix,
    o: PackedMatrix,
    gate_up: PackedMatrix,
    down: PackedMatrix,
}

struct Model {
    layers: Vec<Layer>,
    head: PackedMatrix,
    rope: RopeTable,
    norm: Vec<f32>,
}

fn random(exec: &Exec, ty: StoredType, n_rows: usize, k: usize) -> PackedMatrix {
    let mut state = 1_u32;
    let mut bytes: Vec<u8> = (0..n_rows * ty.row_bytes(k).expect("whole blocks"))
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        })
        .collect();
    let width = ty.block_bytes();
    for block in bytes.chunks_mut(width) {
        match ty {
            StoredType::F32 => block[3] = 0x3c,
            StoredType::F16 | StoredType::BF16 => block[1] = 0x2c,
            StoredType::Q6K => block[209] = 0x10,
            _ => {
                block[1] = 0x20;
                block[3] = 0x20;
            }
        }
    }
    let view = MatrixView { ty, n_rows, k, bytes: &bytes };
    PackedMatrix::pack(exec, &[(view, 0..n_rows)], std::slice::from_ref(&(0..k)), WeightForm::AsStored)
        .expect("the shape fits")
}

impl Model {
    fn new(exec: &Exec, ty: StoredType, n_pos: usize) -> Self {
        // Super-blocks of 256 do not divide this hidden size; widths are the next that do.
        let layers = (0..N_LAYERS)
            .map(|_| Layer {
                qkv: random(exec, ty, QKV, HIDDEN),
                o: random(exec, ty, HIDDEN, HIDDEN),
                gate_up: random(exec, ty, 2 * FFN, HIDDEN),
                down: random(exec, ty, HIDDEN, FFN),
            })
            .collect();
        let table = vec![0.7; n_pos * HEAD / 2];
        let rope = RopeTable::new(table.clone(), table, HEAD / 2).expect("the table is whole");
        let head = random(exec, StoredType::Q8_0, VOCAB, HIDDEN);
        Self { layers, head, rope, norm: vec![1.0; HIDDEN] }
    }
}

#[derive(Default)]
struct Clock(BTreeMap<&'static str, Duration>);

impl Clock {
    fn time<R>(&mut self, name: &'static str, work: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = work();
        *self.0.entry(name).or_default() += start.elapsed();
        result
    }
}

struct Batch<'a> {
    seqs: &'a [AttnSeq<'a>],
    positions: Vec<u32>,
    n_logits: usize,
}

fn forward(exec: &Exec, model: &Model, arena: &mut KvArena, batch: &Batch<'_>, clock: &mut Clock) {
    let n = batch.positions.len();
    let mut x = vec![0.1_f32; n * HIDDEN];
    let (mut normed, mut qkv) = (vec![0.0; n * HIDDEN], vec![0.0; n * QKV]);
    let (mut records, mut attn) = (vec![0.0; n * N_Q * (HEAD + 2)], vec![0.0; n * HIDDEN]);
    let (mut gate_up, mut act) = (vec![0.0; n * 2 * FFN], vec![0.0; n * FFN]);
    let mut y = vec![0.0; n * HIDDEN];
    let layout = DcpLayout::new(BLOCK, 1).expect("B and D are not 0");
    let kv_index: Vec<u32> = (0..N_Q as u32).map(|head| head / 3).collect();
    for (l, layer) in model.layers.iter().enumerate() {
        clock.time("norm", || rms_norm(exec, &x, &model.norm, 1e-5, &mut normed));
        clock.time("qkv", || matmul(exec, &layer.qkv, &normed, None, &mut qkv));
        let rope = Rope {
            table: &model.rope,
            style: RopeStyle::Interleaved,
            positions: &batch.positions,
            row_stride: QKV,
            n_heads: N_Q + N_KV,
            head_dim: HEAD,
        };
        clock.time("rope", || rope_apply(exec, &rope, &mut qkv));
        clock.time("store", || {
            for seq in batch.seqs {
                for (i, row) in seq.rows.clone().enumerate() {
                    let pos = seq.first_pos + i;
                    let slot = KvSlot { layer: l, block: seq.blocks[pos / BLOCK], offset: pos % BLOCK };
                    let kv = &qkv[row * QKV + N_Q * HEAD..][..2 * N_KV * HEAD];
                    let (k, v) = kv.split_at(N_KV * HEAD);
                    kv_store(arena, slot, k, v);
                }
            }
        });
        let input = AttnInput {
            arena,
            layer: l,
            q: &qkv,
            q_stride: QKV,
            n_q_heads: N_Q,
            kv_index: &kv_index,
            scale: 0.125,
            window: None,
            layout,
            dcp_rank: 0,
            seqs: batch.seqs,
        };
        clock.time("attention", || attention(exec, &input, &mut records));
        let merge = Merge { n_parts: 1, v_dim: HEAD, sinks: &[] };
        clock.time("merge", || merge_partials(exec, &merge, &records, &mut attn));
        clock.time("o", || matmul(exec, &layer.o, &attn, None, &mut y));
        clock.time("add", || add_assign(exec, &mut x, &y));
        clock.time("norm", || rms_norm(exec, &x, &model.norm, 1e-5, &mut normed));
        clock.time("gate_up", || matmul(exec, &layer.gate_up, &normed, None, &mut gate_up));
        clock.time("silu", || silu_mul(exec, &gate_up, FFN, &mut act));
        clock.time("down", || matmul(exec, &layer.down, &act, None, &mut y));
        clock.time("add", || add_assign(exec, &mut x, &y));
    }
    let mut logits = vec![0.0; batch.n_logits * VOCAB];
    clock.time("head", || matmul(exec, &model.head, &normed[..batch.n_logits * HIDDEN], None, &mut logits));
}

fn report(name: &str, n_tokens: usize, n_runs: usize, total: Duration, clock: &Clock) {
    let per_run = total / n_runs as u32;
    println!("{name}: {:.1} tok/s, {per_run:.2?} a step", n_tokens as f64 / per_run.as_secs_f64());
    let parts = clock.0.iter().map(|(op, time)| format!("{op} {:.2?}", *time / n_runs as u32));
    println!("    {}", parts.collect::<Vec<_>>().join(", "));
}

fn bench(exec: &Exec, model: &Model, name: &str, batch: &Batch<'_>, n_blocks: usize) {
    let geometry = KvGeometry::uniform(N_KV, HEAD, BLOCK, KvDtype::F16);
    let mut arena = KvArena::new(geometry, N_LAYERS, n_blocks);
    let mut best = (Duration::MAX, Clock::default());
    let n_runs = if batch.positions.len() > 64 { 3 } else { 30 };
    forward(exec, model, &mut arena, batch, &mut Clock::default());
    for _ in 0..3 {
        let mut clock = Clock::default();
        let start = Instant::now();
        (0..n_runs).for_each(|_| forward(exec, model, &mut arena, batch, &mut clock));
        if start.elapsed() < best.0 {
            best = (start.elapsed(), clock);
        }
    }
    report(name, batch.positions.len(), n_runs, best.0, &best.1);
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let arg = |i: usize| args.get(i).map(String::as_str);
    let n_threads = arg(0).map_or(2, |text| text.parse().expect("a number of threads"));
    let isa = arg(1).map_or(Isa::best(), |text| text.parse().expect("an isa"));
    let name = arg(2).unwrap_or("Q4_1");
    let ty = StoredType::ALL.into_iter().find(|ty| ty.name() == name).expect("a weight type");
    let context: usize = arg(3).map_or(512, |text| text.parse().expect("a context length"));
    let exec = Exec::new(isa, n_threads).expect("the processor can run it");
    let model = Model::new(&exec, ty, context + 1);
    println!("{name} {isa}, {n_threads} threads, context {context}");

    let blocks: Vec<BlockId> = (0..(context / BLOCK + 1) as u32).map(BlockId).collect();
    let seqs = [AttnSeq { blocks: &blocks, rows: 0..context, first_pos: 0 }];
    let prefill = Batch { seqs: &seqs, positions: (0..context as u32).collect(), n_logits: 1 };
    bench(&exec, &model, "prefill", &prefill, blocks.len());
    for n_seqs in [1, 4, 16] {
        let tables: Vec<Vec<BlockId>> = (0..n_seqs)
            .map(|i| blocks.iter().map(|b| BlockId(b.0 + (i * blocks.len()) as u32)).collect())
            .collect();
        let seqs: Vec<AttnSeq<'_>> = tables
            .iter()
            .enumerate()
            .map(|(i, blocks)| AttnSeq { blocks, rows: i..i + 1, first_pos: context })
            .collect();
        let decode = Batch { seqs: &seqs, positions: vec![context as u32; n_seqs], n_logits: n_seqs };
        bench(&exec, &model, &format!("decode batch {n_seqs}"), &decode, n_seqs * blocks.len());
    }
}
