//! The numeric contract, case by case: whatever the group, the batch, the chunks, the cache and the kernels, logits
//! are the bits that one rank gives that computes the whole prompt alone, in plain loops.
//!
//! The full product of what may vary has millions of cases. Tried are all group shapes with both merges and both
//! query forms, all pairs of values of any two dimensions, and the whole list of lengths on two group shapes; only the
//! longest sequences are cut where slow kernels would run them. Cases are chosen by a fixed seed and named in full when
//! they fail.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test that cannot build its fixture has failed, and a long one says how many cases it tried"
)]

use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    sync::{
        Arc, LazyLock, Mutex, OnceLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

use longreach_kernels::Isa;
use longreach_tests::tiny::{
    Rng, TinyModel,
    ranks::{self, Feed, GroupConfig, Outcome, Room, Script},
};
use longreach_types::{GroupShape, KvDtype, MergeForm, N_SHARDS, QueryForm, WeightForm};

/// Chooses the cases; any other must do as well.
const SEED: u64 = 20_260_726;

/// Accepted difference of rank counts that do not divide C, relative to the standard deviation of the logits.
const TOLERANCE: f32 = 1e-3;
/// The same where activations are rounded to eight bits: one that stands between two codes may take the other, which
/// is a difference of 1/127 in one number.
const CODE_TOLERANCE: f32 = 0.1;

const BLOCK_SIZES: [usize; 2] = [4, 32];
const KV_DTYPES: [KvDtype; 3] = [KvDtype::F32, KvDtype::F16, KvDtype::Bf16];

/// Sequences that run beside the one in question.
const N_MATES: usize = 16;

/// Positions of the sequence in question where the longest length costs too much: beyond one round over the ranks.
const MAX_LEN: usize = 260;

/// The same where plain loops or portable lanes run it, whose multiply-adds are calls.
const MAX_SLOW_LEN: usize = 130;

/// Positions that mates reach at most: company matters, not its length.
const MAX_MATE_LEN: usize = 36;

static MODELS: LazyLock<Vec<TinyModel>> = LazyLock::new(|| TinyModel::all().unwrap());

/// How many rows of the sequence run in a step.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Chunks {
    Whole,
    Of(usize),
    /// One right row and three wrong ones, which the next step overwrites: refused drafts.
    Drafts,
}

const CHUNKS: [Chunks; 7] = [
    Chunks::Whole,
    Chunks::Of(1),
    Chunks::Of(7),
    Chunks::Of(32),
    Chunks::Of(33),
    Chunks::Of(256),
    Chunks::Drafts,
];

/// Lengths at the edges of blocks and of rounds over the ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Len {
    One,
    Blocks(isize),
    Rounds(isize),
    Long,
}

const LENS: [Len; 8] = [
    Len::One,
    Len::Blocks(-1),
    Len::Blocks(0),
    Len::Blocks(1),
    Len::Rounds(-1),
    Len::Rounds(0),
    Len::Rounds(1),
    Len::Long,
];

impl Len {
    fn get(self, block_size: usize, dcp_size: usize) -> usize {
        match self {
            Self::One => 1,
            Self::Blocks(more) => block_size.strict_add_signed(more),
            Self::Rounds(more) => (dcp_size * block_size).strict_add_signed(more),
            Self::Long => long_len(block_size),
        }
    }
}

fn long_len(block_size: usize) -> usize {
    3 * N_SHARDS * block_size + 5
}

/// One point of the product.
#[derive(Clone, Copy, Debug)]
struct Case {
    model: usize,
    shape: (usize, usize),
    merge_form: MergeForm,
    query_form: QueryForm,
    isa: Isa,
    n_threads: usize,
    kv_dtype: KvDtype,
    weights: WeightForm,
    block_size: usize,
    len: Len,
    chunks: Chunks,
    has_company: bool,
    has_prefix: bool,
    all_logits: bool,
    /// Every byte of the pool before: nothing, NaN in every format, or the rest of someone else's numbers.
    fill: u8,
}

impl Case {
    fn model(&self) -> &'static TinyModel {
        &MODELS[self.model]
    }

    fn shape(&self) -> GroupShape {
        GroupShape::new(self.shape.0, self.shape.1).unwrap()
    }

    fn config(&self) -> GroupConfig {
        GroupConfig {
            shape: self.shape(),
            isa: self.isa,
            n_threads: self.n_threads,
            merge_form: self.merge_form,
            query_form: self.query_form,
            weights: self.weights,
            ..GroupConfig::reference(self.block_size, self.kv_dtype)
        }
    }

    fn source(&self) -> Source {
        Source {
            model: self.model,
            block_size: self.block_size,
            kv_dtype: self.kv_dtype,
            weights: self.weights,
        }
    }

    fn len(&self) -> usize {
        let is_slow = self.block_size > 4 && matches!(self.isa, Isa::Reference | Isa::Portable);
        let max = if is_slow { MAX_SLOW_LEN } else { usize::MAX };
        self.len.get(self.block_size, self.shape.1).min(self.source().stream_len()).min(max)
    }
}

/// What decides the bits of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Source {
    model: usize,
    block_size: usize,
    kv_dtype: KvDtype,
    weights: WeightForm,
}

/// Logits of the two streams.
type Logits = [Vec<Vec<f32>>; 2];

impl Source {
    /// Positions of the first stream: the longest length, less room for drafts where the model's context is short.
    /// In large blocks each model goes there in one number format.
    fn stream_len(&self) -> usize {
        let is_all = self.block_size == 4 || self.kv_dtype == KV_DTYPES[self.model % 3];
        let len = long_len(self.block_size).min(MODELS[self.model].context_len - 3);
        if is_all { len } else { len.min(MAX_LEN) }
    }

    /// Tokens of stream `stream`.
    fn stream(&self, stream: usize) -> Vec<u32> {
        let len = if stream == 0 { self.stream_len() } else { MAX_MATE_LEN };
        MODELS[self.model].tokens(SEED + stream as u64, len)
    }

    /// Both streams, each computed alone and in one step, on a group of `shape`, in plain loops.
    fn whole(&self, shape: GroupShape) -> Logits {
        let alone = |stream| {
            let tokens = self.stream(stream);
            let (len, n_logits) = (tokens.len(), tokens.len());
            let feed = Feed { seq: 0, start: 0, tokens, n_logits };
            Script { rooms: vec![Room { len, shared: None }], steps: vec![vec![feed]], fill: 0, seed: 1 }
        };
        let config = GroupConfig {
            shape,
            weights: self.weights,
            ..GroupConfig::reference(self.block_size, self.kv_dtype)
        };
        let outcomes = ranks::run(&MODELS[self.model], &config, &[0, 1].map(alone)).unwrap();
        <[Outcome; 2]>::try_from(outcomes).unwrap().map(|mut outcome| outcome.remove(0))
    }

    /// What one rank gives, computed once.
    fn reference(self) -> Arc<Logits> {
        type Slot = Arc<OnceLock<Arc<Logits>>>;
        static DONE: LazyLock<Mutex<HashMap<Source, Slot>>> = LazyLock::new(Mutex::default);
        let slot = Arc::clone(DONE.lock().unwrap().entry(self).or_default());
        let compute = || {
            let logits = self.whole(GroupShape::SINGLE);
            assert!(logits.iter().flatten().flatten().all(|x| x.is_finite()), "{self:?}");
            Arc::new(logits)
        };
        Arc::clone(slot.get_or_init(compute))
    }
}

/// A sequence on its way through a script.
struct Run {
    seq: usize,
    stream: usize,
    tokens: Vec<u32>,
    next: usize,
    chunks: Chunks,
    all_logits: bool,
    /// The step in which it starts.
    from_step: usize,
    /// Rows of the first step, where that is not as the others.
    first: Option<usize>,
}

impl Run {
    /// The rows of the next step.
    fn feed(&mut self, rng: &mut Rng) -> Feed {
        let left = self.tokens.len() - self.next;
        let n = match (self.first.take(), self.chunks) {
            (Some(n), _) => n,
            (None, Chunks::Whole) => left,
            (None, Chunks::Of(n)) => n.min(left),
            (None, Chunks::Drafts) => 1,
        };
        let mut tokens = self.tokens[self.next..][..n].to_vec();
        if self.chunks == Chunks::Drafts {
            // Tokens of the sequence itself, but not at their place.
            tokens.extend((0..3).map(|_| rng.pick(&self.tokens)));
        }
        let n_logits = match (self.all_logits, n == left) {
            (true, _) => tokens.len(),
            (false, true) => tokens.len() - n + 1,
            (false, false) => 0,
        };
        let feed = Feed { seq: self.seq, start: self.next, tokens, n_logits };
        self.next += n;
        feed
    }

    fn room(&self, shared: Option<(usize, usize)>) -> Room {
        let n_drafts = if self.chunks == Chunks::Drafts { 3 } else { 0 };
        Room { len: self.tokens.len() + n_drafts, shared }
    }
}

/// A stream, and the positions at which a sequence follows it.
type Follow = (usize, Range<usize>);

impl Case {
    /// What runs, and what each sequence of it follows.
    fn script(&self, seed: u64) -> (Script, Vec<Follow>) {
        let mut rng = Rng::new(seed);
        let (mut runs, mut rooms, mut follows) = (Vec::new(), Vec::new(), Vec::new());
        let mut add = |run: Run, shared, follows_to| {
            rooms.push(run.room(shared));
            follows.push((run.stream, run.next..follows_to));
            runs.push(run);
        };
        let tokens = self.source().stream(0)[..self.len()].to_vec();
        // A prefix is whole blocks, and leaves at least one row to run.
        let n_shareable = (tokens.len() - 1) / self.block_size;
        let n_shared = if self.has_prefix && n_shareable > 0 { 1 + rng.below(n_shareable) } else { 0 };
        let cached_len = n_shared * self.block_size;
        if n_shared > 0 {
            // Whose blocks are shared: it goes on with other tokens while the one in question runs.
            let tail =
                self.model().tokens(seed, (self.block_size + 3).min(self.model().context_len - cached_len));
            let donor = Run {
                seq: 0,
                stream: 0,
                tokens: [&tokens[..cached_len], &tail].concat(),
                next: 0,
                chunks: Chunks::Of(1),
                all_logits: self.all_logits,
                from_step: 0,
                first: Some(cached_len),
            };
            add(donor, None, cached_len);
        }
        let main = Run {
            seq: usize::from(n_shared > 0),
            stream: 0,
            next: cached_len,
            chunks: self.chunks,
            all_logits: self.all_logits,
            from_step: usize::from(n_shared > 0),
            first: None,
            tokens,
        };
        let (first_mate, n_tokens) = (main.seq + 1, main.tokens.len());
        add(main, (n_shared > 0).then_some((0, n_shared)), n_tokens);
        for seq in (first_mate..first_mate + N_MATES).filter(|_| self.has_company) {
            let mate = self.mate(seq, &mut rng);
            let n_tokens = mate.tokens.len();
            add(mate, None, n_tokens);
        }
        let steps = steps(runs, &mut rng);
        (Script { rooms, steps, fill: self.fill, seed }, follows)
    }

    fn mate(&self, seq: usize, rng: &mut Rng) -> Run {
        let stream = seq % 2;
        let len = rng.pick(&LENS).get(self.block_size, self.shape.1).min(MAX_MATE_LEN);
        let tokens = self.source().stream(stream);
        Run {
            seq,
            stream,
            tokens: tokens[..len.min(tokens.len())].to_vec(),
            next: 0,
            chunks: rng.pick(&CHUNKS),
            all_logits: self.all_logits,
            from_step: rng.below(3),
            first: None,
        }
    }
}

/// Steps until all is run, in another batch order each time.
fn steps(mut runs: Vec<Run>, rng: &mut Rng) -> Vec<Vec<Feed>> {
    let mut steps: Vec<Vec<Feed>> = Vec::new();
    while runs.iter().any(|run| run.next < run.tokens.len()) {
        let ready = runs.iter_mut().filter(|run| run.from_step <= steps.len() && run.next < run.tokens.len());
        let mut step: Vec<_> = ready.map(|run| run.feed(rng)).collect();
        rng.shuffle(&mut step);
        steps.push(step);
    }
    steps.retain(|step| !step.is_empty());
    steps
}

/// The first place where a case gives other bits than `reference`, in words; otherwise the number of rows compared.
fn difference(outcome: &Outcome, follows: &[Follow], reference: &Logits) -> Result<usize, String> {
    let mut n_rows = 0;
    for (seq, (stream, range)) in follows.iter().enumerate() {
        for pos in range.clone().filter(|&pos| !outcome[seq][pos].is_empty()) {
            let (got, want) = (&outcome[seq][pos], &reference[*stream][pos]);
            let differs = |token: &usize| got[*token].to_bits() != want[*token].to_bits();
            if let Some(token) = (0..want.len()).find(differs) {
                let (got, want) = (got[token], want[token]);
                return Err(format!(
                    "sequence {seq}, position {pos}, token {token}: {got:e} is not {want:e}"
                ));
            }
            n_rows += 1;
        }
    }
    Ok(n_rows)
}

/// Runs cases of one group, each on a pool of its own, and names the first that differs from `reference`.
fn check(cases: &[Case], seed: u64, reference: &Logits) -> Result<(), String> {
    let name =
        |i: usize| format!("{:?} of model {:?}, seed {}", cases[i], cases[i].model().name, seed + i as u64);
    let scripted = cases.iter().zip(seed..).map(|(case, seed)| case.script(seed));
    let (scripts, follows): (Vec<_>, Vec<_>) = scripted.unzip();
    let outcomes = ranks::run(cases[0].model(), &cases[0].config(), &scripts)
        .map_err(|error| format!("{}: {error}", name(0)))?;
    for (i, (outcome, follows)) in outcomes.iter().zip(&follows).enumerate() {
        let n_rows =
            difference(outcome, follows, reference).map_err(|error| format!("{}: {error}", name(i)))?;
        assert!(n_rows > 0, "{}: nothing was compared", name(i));
    }
    Ok(())
}

/// Does `work` for every item on all cores, and shows every failure.
fn on_all_cores<T: Sync>(items: &[T], work: impl Fn(usize, &T) -> Result<(), String> + Sync) {
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let take = || {
        let i = next.fetch_add(1, Relaxed);
        items.get(i).map(|item| (i, item))
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((i, item)) = take() {
                    if let Err(failure) = work(i, item) {
                        failures.lock().unwrap().push(failure);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{} of {} differ:\n{}", failures.len(), items.len(), failures.join("\n"));
}

fn check_against_one_rank(i: usize, cases: &[Case]) -> Result<(), String> {
    check(cases, SEED + 1000 * i as u64, &cases[0].source().reference())
}

/// Rows of level indices in which any two levels of any two factors stand together at least once: each new row
/// begins with a pair that is missing and takes for the other factors what adds most.
fn all_pairs(n_levels: &[usize], rng: &mut Rng) -> Vec<Vec<usize>> {
    let n = n_levels.len();
    let mut missing: HashSet<(usize, usize, usize, usize)> = HashSet::new();
    for (a, b) in (0..n).flat_map(|b| (0..b).map(move |a| (a, b))) {
        missing.extend((0..n_levels[a]).flat_map(|x| (0..n_levels[b]).map(move |y| (a, x, b, y))));
    }
    let mut rows = Vec::new();
    while !missing.is_empty() {
        let mut open: Vec<_> = missing.iter().copied().collect();
        open.sort_unstable();
        let (a, x, b, y) = open[rng.below(open.len())];
        let mut row = vec![None; n];
        (row[a], row[b]) = (Some(x), Some(y));
        let mut order: Vec<_> = (0..n).filter(|&factor| factor != a && factor != b).collect();
        rng.shuffle(&mut order);
        for factor in order {
            let gain = |level: usize| {
                let pair = |(other, chosen): (usize, &Option<usize>)| {
                    let chosen = (*chosen)?;
                    let (low, high) =
                        ((other, chosen).min((factor, level)), (other, chosen).max((factor, level)));
                    missing.contains(&(low.0, low.1, high.0, high.1)).then_some(())
                };
                row.iter().enumerate().filter_map(pair).count()
            };
            let first = rng.below(n_levels[factor]);
            let levels = (0..n_levels[factor]).map(|i| (first + i) % n_levels[factor]);
            row[factor] = levels.max_by_key(|&level| gain(level));
        }
        let row: Vec<_> = row.into_iter().flatten().collect();
        missing.retain(|&(a, x, b, y)| row[a] != x || row[b] != y);
        rows.push(row);
    }
    rows
}

/// Shapes whose number of ranks `wanted` wants, with every D that divides it.
fn shapes(wanted: impl Fn(usize) -> bool) -> Vec<(usize, usize)> {
    let sizes = |n: usize| (1..=n).filter(move |d| n.is_multiple_of(*d)).map(move |d| (n, d));
    (1..=N_SHARDS).filter(|&n| wanted(n)).flat_map(sizes).collect()
}

#[test]
fn logits_are_the_same_bits_whatever_two_things_vary() {
    let shapes = shapes(|n| N_SHARDS.is_multiple_of(n));
    let isas = Isa::available();
    let n_levels = [
        shapes.len() * 4,
        MODELS.len(),
        isas.len() * KV_DTYPES.len(),
        LENS.len(),
        CHUNKS.len(),
        3,
        2,
        2,
        2,
        2,
        2,
    ];
    let rows = all_pairs(&n_levels, &mut Rng::new(SEED));
    let cases = rows.iter().map(|row| Case {
        shape: shapes[row[0] / 4],
        merge_form: [MergeForm::A2a, MergeForm::AgRs][row[0] / 2 % 2],
        query_form: [QueryForm::Replicate, QueryForm::Gather][row[0] % 2],
        model: row[1],
        isa: isas[row[2] / 3],
        kv_dtype: KV_DTYPES[row[2] % 3],
        len: LENS[row[3]],
        chunks: CHUNKS[row[4]],
        fill: [0xff, 0, 0x42][row[5]],
        block_size: BLOCK_SIZES[row[6]],
        has_company: row[7] == 1,
        has_prefix: row[8] == 1,
        all_logits: row[9] == 1,
        n_threads: 1 + row[10],
        weights: WeightForm::AsStored,
    });
    on_all_cores(&cases.collect::<Vec<_>>(), |i, case| check_against_one_rank(i, &[*case]));
}

/// A case to change one thing in.
fn plain(model: usize, shape: (usize, usize)) -> Case {
    Case {
        model,
        shape,
        merge_form: MergeForm::A2a,
        query_form: QueryForm::Replicate,
        isa: Isa::best(),
        n_threads: 1,
        kv_dtype: KV_DTYPES[model % 3],
        weights: WeightForm::AsStored,
        block_size: 4,
        len: Len::Long,
        chunks: Chunks::Of(7),
        has_company: false,
        has_prefix: false,
        all_logits: true,
        fill: 0xff,
    }
}

#[test]
fn every_length_in_every_chunk_size_is_the_same_bits() {
    let mut groups = Vec::new();
    // Large blocks make long sequences: a third of the models goes there.
    let models = |block_size| (0..MODELS.len()).step_by(if block_size == 4 { 1 } else { 3 });
    let pairs = BLOCK_SIZES.into_iter().flat_map(|size| models(size).map(move |model| (size, model)));
    for (block_size, model) in pairs {
        let shape = [(8, 8), (4, 2)][(model + block_size / 32) % 2];
        let merge_form = [MergeForm::A2a, MergeForm::AgRs][model / 2 % 2];
        let query_form = [QueryForm::Replicate, QueryForm::Gather][model / 4 % 2];
        let base = Case { block_size, merge_form, query_form, ..plain(model, shape) };
        let cases = LENS.into_iter().flat_map(|len| CHUNKS.map(|chunks| Case { len, chunks, ..base }));
        // A chunk as long as the sequence is the whole of it.
        let differs = |case: &Case| !matches!(case.chunks, Chunks::Of(n) if n >= case.len());
        groups.push(cases.filter(differs).collect::<Vec<_>>());
    }
    on_all_cores(&groups, |i, cases| check_against_one_rank(i, cases));
}

#[test]
fn every_kernel_gives_every_model_the_same_bits_in_every_kv_format() {
    let mut cases = Vec::new();
    for model in 0..MODELS.len() {
        for (isa, kv_dtype) in
            Isa::available().into_iter().flat_map(|isa| KV_DTYPES.map(|dtype| (isa, dtype)))
        {
            cases.push(Case { isa, kv_dtype, ..plain(model, (2, 2)) });
        }
    }
    on_all_cores(&cases, |i, case| check_against_one_rank(i, &[*case]));
}

#[test]
fn weights_expanded_to_f32_are_the_same_bits_in_any_group() {
    let cases = (0..MODELS.len()).flat_map(|model| {
        [(8, 4), (4, 1), (2, 2)].map(|shape| Case { weights: WeightForm::F32, ..plain(model, shape) })
    });
    on_all_cores(&cases.collect::<Vec<_>>(), |i, case| check_against_one_rank(i, &[*case]));
}

/// Rank counts that do not divide C merge in rank order: their bits are their own, but as independent of chunks,
/// batch, forms and kernels as the others'.
#[test]
fn uneven_rank_counts_agree_with_themselves_to_the_bit_and_with_one_rank_within_tolerance() {
    let shapes = shapes(|n| !N_SHARDS.is_multiple_of(n));
    let n_unlike_one_rank = AtomicUsize::new(0);
    let groups: Vec<_> = shapes
        .iter()
        .enumerate()
        .flat_map(|(i, &shape)| [0, 1].map(|n| (shape, (2 * i + n) % MODELS.len())))
        .collect();
    on_all_cores(&groups, |i, &(shape, model)| {
        let base =
            Case { kv_dtype: KvDtype::F32, has_company: true, has_prefix: true, ..plain(model, shape) };
        let own = base.source().whole(base.shape());
        for (form, merge_form) in [MergeForm::A2a, MergeForm::AgRs].into_iter().enumerate() {
            for (n, query_form) in [QueryForm::Replicate, QueryForm::Gather].into_iter().enumerate() {
                let case = Case { merge_form, query_form, chunks: CHUNKS[1 + 2 * form + n], ..base };
                check(&[case], SEED + i as u64, &own)?;
            }
        }
        let (one, expanded) =
            (base.source().reference(), Source { weights: WeightForm::F32, ..base.source() });
        let n_unlike =
            own.iter().flatten().flatten().zip(one.iter().flatten().flatten()).filter(|(a, b)| a != b);
        n_unlike_one_rank.fetch_add(n_unlike.count(), Relaxed);
        within(CODE_TOLERANCE, &own, &one)
            .and_then(|()| within(TOLERANCE, &expanded.whole(base.shape()), &expanded.reference()))
            .map_err(|error| format!("{base:?} of {:?}: {error}", base.model().name))
    });
    // Were the order of sums without effect on bits, equality would prove nothing.
    assert!(n_unlike_one_rank.into_inner() > 0);
}

fn within(tolerance: f32, got: &Logits, want: &Logits) -> Result<(), String> {
    let all = || want.iter().flatten().flatten();
    let n = all().count() as f32;
    let mean = all().sum::<f32>() / n;
    let std = (all().map(|x| (x - mean).powi(2)).sum::<f32>() / n).sqrt();
    let errors = || got.iter().flatten().flatten().zip(all()).map(|(got, want)| (got - want).abs() / std);
    if errors().all(|error| error <= tolerance) {
        return Ok(());
    }
    Err(format!("differs from one rank by {:e} standard deviations", errors().fold(0.0, f32::max)))
}
