//! Models small enough to try every case.
//!
//! Golden models come with reference logits; random ones are written here as GGUF, because what can go wrong
//! depends on shapes and number formats that no small published model has: head counts that do not divide by the
//! ranks, feed-forward widths that leave ranks without a segment, a vocabulary smaller than the group, super-blocks
//! that a segment bound cuts. Their weights mean nothing, so only comparisons are made with them, never of text.

pub mod ranks;

use std::{fs, path::PathBuf, sync::Arc};

use half::{bf16, f16};
use longreach_gguf::{GgmlType, GgufBuilder};
use longreach_model::files::ModelFiles;
use tempfile::TempDir;

/// Positions of a random model.
const CONTEXT_LEN: usize = 1024;

/// The golden models of the supported architectures.
pub const GOLDEN: [&str; 4] = ["llama", "llama3-rope", "mistral", "qwen2"];

/// An opened model.
pub struct TinyModel {
    /// For messages.
    pub name: &'static str,
    /// Its mapped files.
    pub files: Arc<ModelFiles>,
    /// Entries of its vocabulary.
    pub vocab_size: usize,
    /// Positions it was made for.
    pub context_len: usize,
    /// Where a random model lies.
    _dir: Option<TempDir>,
}

/// Why a model or a group could not be made. Tests only show it.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// Shape and number formats of a random model.
#[derive(Clone, Copy, Debug)]
pub struct TinySpec {
    /// For messages.
    pub name: &'static str,
    /// `llama` or `qwen2`, which has biases.
    pub architecture: &'static str,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads, key-value heads, and their width.
    pub heads: (usize, usize, usize),
    /// Width of the feed-forward part.
    pub ffn: usize,
    /// Entries of the vocabulary.
    pub vocab_size: usize,
    /// Keys a query sees.
    pub window: Option<usize>,
    /// Formats, by ggml's names.
    pub types: Types,
}

/// Number formats of a random model's matrices.
#[derive(Clone, Copy, Debug)]
pub struct Types {
    /// Query, key and value projections.
    pub qkv: [&'static str; 3],
    /// Output projection of attention.
    pub o: &'static str,
    /// Gate and up projections.
    pub gate_up: [&'static str; 2],
    /// Down projection.
    pub down: &'static str,
    /// Embedding.
    pub embedding: &'static str,
    /// Output head; none for one tied to the embedding.
    pub head: Option<&'static str>,
}

impl Types {
    const fn all(ty: &'static str, head: Option<&'static str>) -> Self {
        Self { qkv: [ty; 3], o: ty, gate_up: [ty; 2], down: ty, embedding: ty, head }
    }
}

/// Random models that between them have every number format and every awkward shape.
pub const RANDOM: [TinySpec; 8] = [
    TinySpec {
        name: "nine heads, f32",
        architecture: "llama",
        hidden: 48,
        heads: (9, 3, 16),
        ffn: 100,
        vocab_size: 301,
        window: None,
        types: Types::all("F32", Some("F32")),
    },
    TinySpec {
        name: "nine heads, q8_0 and q4_1, tied",
        architecture: "llama",
        hidden: 64,
        heads: (9, 3, 32),
        ffn: 160,
        vocab_size: 259,
        window: None,
        types: Types { o: "Q5_0", gate_up: ["Q4_1"; 2], down: "Q4_1", ..Types::all("Q8_0", None) },
    },
    TinySpec {
        name: "seven heads of their own, q4_1, tied",
        architecture: "llama",
        hidden: 96,
        heads: (7, 7, 32),
        ffn: 224,
        vocab_size: 130,
        window: None,
        types: Types { down: "Q8_0", ..Types::all("Q4_1", None) },
    },
    TinySpec {
        name: "twelve heads, q4_k and q6_k",
        architecture: "llama",
        hidden: 256,
        heads: (12, 4, 32),
        ffn: 512,
        vocab_size: 203,
        window: None,
        types: Types {
            qkv: ["Q4_K", "Q4_K", "Q6_K"],
            o: "Q8_0",
            down: "Q6_K",
            embedding: "Q6_K",
            ..Types::all("Q4_K", Some("Q6_K"))
        },
    },
    TinySpec {
        name: "twelve heads with biases, bf16, tied",
        architecture: "qwen2",
        hidden: 80,
        heads: (12, 2, 16),
        ffn: 116,
        vocab_size: 97,
        window: None,
        types: Types::all("BF16", None),
    },
    TinySpec {
        name: "seven heads on one, f16, window of 37",
        architecture: "llama",
        hidden: 56,
        heads: (7, 1, 16),
        ffn: 90,
        vocab_size: 211,
        window: Some(37),
        types: Types::all("F16", Some("F16")),
    },
    TinySpec {
        name: "eight heads, a format each",
        architecture: "qwen2",
        hidden: 256,
        heads: (8, 8, 32),
        ffn: 288,
        vocab_size: 77,
        window: None,
        types: Types {
            qkv: ["Q5_K", "Q5_1", "Q4_0"],
            o: "Q4_K",
            gate_up: ["Q5_K", "Q4_K"],
            down: "Q5_1",
            embedding: "F16",
            head: Some("Q5_K"),
        },
    },
    TinySpec {
        name: "fewer heads, segments and tokens than ranks, q8_0",
        architecture: "llama",
        hidden: 32,
        heads: (3, 1, 32),
        ffn: 64,
        vocab_size: 5,
        window: None,
        types: Types::all("Q8_0", Some("F32")),
    },
];

/// Where the golden model `name` lies.
pub fn golden_dir(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared/golden/tiny").join(name)
}

impl TinyModel {
    /// The golden model `name`.
    pub fn golden(name: &'static str) -> Result<Self, Error> {
        Self::open(name, ModelFiles::open(&golden_dir(name))?, None)
    }

    /// A random model, the same for the same `spec`.
    pub fn random(spec: &TinySpec) -> Result<Self, Error> {
        let dir = TempDir::new()?;
        let path = dir.path().join("model.gguf");
        fs::write(&path, spec.gguf())?;
        Self::open(spec.name, ModelFiles::open(&path)?, Some(dir))
    }

    /// Any model whose files are open.
    pub fn at(name: &'static str, files: ModelFiles) -> Result<Self, Error> {
        Self::open(name, files, None)
    }

    fn open(name: &'static str, files: ModelFiles, dir: Option<TempDir>) -> Result<Self, Error> {
        let config = longreach_model::config::ModelConfig::from_files(&files)?;
        let (vocab_size, context_len) = (config.vocab_size, config.max_position);
        Ok(Self { name, files: Arc::new(files), vocab_size, context_len, _dir: dir })
    }

    /// Every golden and every random model.
    pub fn all() -> Result<Vec<Self>, Error> {
        GOLDEN.into_iter().map(Self::golden).chain(RANDOM.iter().map(Self::random)).collect()
    }

    /// `len` random tokens.
    pub fn tokens(&self, seed: u64, len: usize) -> Vec<u32> {
        let mut rng = Rng::new(seed);
        (0..len).map(|_| rng.below(self.vocab_size) as u32).collect()
    }
}

impl TinySpec {
    fn gguf(&self) -> Vec<u8> {
        const N_LAYERS: u32 = 2;
        let (n_q_heads, n_kv_heads, head_dim) = self.heads;
        let key = |name: &str| format!("{}.{name}", self.architecture);
        let mut keys = GgufBuilder::new(self.architecture).u32(&key("block_count"), N_LAYERS);
        for (name, value) in [
            ("context_length", CONTEXT_LEN),
            ("embedding_length", self.hidden),
            ("feed_forward_length", self.ffn),
            ("attention.head_count", n_q_heads),
            ("attention.head_count_kv", n_kv_heads),
            ("attention.key_length", head_dim),
            ("attention.value_length", head_dim),
            ("attention.sliding_window", self.window.unwrap_or(0)),
        ] {
            keys = keys.u32(&key(name), value as u32);
        }
        let keys = keys.f32(&key("attention.layer_norm_rms_epsilon"), 1e-5);
        let mut weights =
            Weights { builder: keys, rng: Rng::new(self.hidden as u64 * 1000 + self.ffn as u64) };
        weights.matrix("token_embd", self.types.embedding, [self.vocab_size, self.hidden], 1.0);
        weights.vector("output_norm.weight", self.hidden, 1.0);
        if let Some(ty) = self.types.head {
            weights.linear("output", ty, [self.vocab_size, self.hidden]);
        }
        (0..N_LAYERS).for_each(|layer| self.layer(layer, &mut weights));
        weights.builder.build()
    }

    fn layer(&self, layer: u32, weights: &mut Weights) {
        let (n_q_heads, n_kv_heads, head_dim) = self.heads;
        let name = |part: &str| format!("blk.{layer}.{part}");
        let widths = [n_q_heads, n_kv_heads, n_kv_heads].map(|n| n * head_dim);
        weights.vector(&name("attn_norm.weight"), self.hidden, 1.0);
        for ((part, ty), width) in ["attn_q", "attn_k", "attn_v"].into_iter().zip(self.types.qkv).zip(widths)
        {
            weights.linear(&name(part), ty, [width, self.hidden]);
            if self.architecture == "qwen2" {
                weights.vector(&name(&format!("{part}.bias")), width, 0.0);
            }
        }
        weights.linear(&name("attn_output"), self.types.o, [self.hidden, widths[0]]);
        weights.vector(&name("ffn_norm.weight"), self.hidden, 1.0);
        weights.linear(&name("ffn_gate"), self.types.gate_up[0], [self.ffn, self.hidden]);
        weights.linear(&name("ffn_up"), self.types.gate_up[1], [self.ffn, self.hidden]);
        weights.linear(&name("ffn_down"), self.types.down, [self.hidden, self.ffn]);
    }
}

/// Tensors under construction.
struct Weights {
    builder: GgufBuilder,
    rng: Rng,
}

impl Weights {
    fn add(&mut self, name: &str, ty: &str, shape: &[usize], bytes: &[u8]) {
        let ty = GgmlType::from_name(ty).expect("specifications name types of ggml");
        self.builder = std::mem::take(&mut self.builder).tensor(name, ty, shape, bytes);
    }

    /// `centre` plus or minus 0.3.
    fn vector(&mut self, name: &str, len: usize, centre: f32) {
        let bytes: Vec<u8> = (0..len).flat_map(|_| (centre + self.rng.within(0.3)).to_le_bytes()).collect();
        self.add(name, "F32", &[len], &bytes);
    }

    /// A matrix that keeps the size of what it is applied to.
    fn linear(&mut self, name: &str, ty: &str, shape: [usize; 2]) {
        self.matrix(name, ty, shape, 1.8 / (shape[1] as f32).sqrt());
    }

    fn matrix(&mut self, name: &str, ty: &str, shape: [usize; 2], amplitude: f32) {
        let bytes = self.rng.stored(ty, shape[0] * shape[1], amplitude);
        self.add(&format!("{name}.weight"), ty, &shape, &bytes);
    }
}

/// SplitMix64: the same numbers on every machine.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The sequence of `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.bits()) * n as u128) >> 64) as usize
    }

    /// One of `items`.
    pub fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }

    /// Puts `items` into another order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        (1..items.len()).for_each(|i| items.swap(i, self.below(i + 1)));
    }

    /// A number from −`amplitude` to `amplitude`.
    fn within(&mut self, amplitude: f32) -> f32 {
        ((self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0) * amplitude
    }

    /// `n` numbers of format `ty`, none much larger than `amplitude`. Codes of quantised blocks are random bytes;
    /// their scales are set so that values are finite and of the wanted size.
    fn stored(&mut self, ty: &str, n: usize, amplitude: f32) -> Vec<u8> {
        match ty {
            "F32" => return (0..n).flat_map(|_| self.within(amplitude).to_le_bytes()).collect(),
            "F16" => {
                return (0..n).flat_map(|_| f16::from_f32(self.within(amplitude)).to_le_bytes()).collect();
            }
            "BF16" => {
                return (0..n).flat_map(|_| bf16::from_f32(self.within(amplitude)).to_le_bytes()).collect();
            }
            _ => {}
        }
        let stored = GgmlType::from_name(ty).expect("specifications name types of ggml");
        // Where a block has its f16 scales, and the size of what each is multiplied with.
        let scales: &[(usize, f32)] = match ty {
            "Q8_0" => &[(0, 127.0)],
            "Q4_0" => &[(0, 8.0)],
            "Q5_0" => &[(0, 16.0)],
            "Q4_1" => &[(0, 8.0), (2, -1.0)],
            "Q5_1" => &[(0, 16.0), (2, -1.0)],
            "Q4_K" => &[(0, 32.0 * 8.0), (2, 32.0)],
            "Q5_K" => &[(0, 32.0 * 16.0), (2, 32.0)],
            _ => &[(208, 64.0 * 16.0)],
        };
        let (block_len, block_bytes) = (stored.block_len() as usize, stored.block_bytes() as usize);
        let mut bytes: Vec<u8> = (0..n / block_len * block_bytes).map(|_| self.bits() as u8).collect();
        for block in bytes.chunks_exact_mut(block_bytes) {
            for &(at, factor) in scales {
                let scale = (0.75 * amplitude + self.within(0.25 * amplitude)) / factor;
                block[at..at + 2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
            }
        }
        bytes
    }
}
