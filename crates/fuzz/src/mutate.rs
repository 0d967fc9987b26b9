//! Small, seeded damage to valid inputs. libFuzzer does this better; it needs another toolchain.

/// A source of numbers that a seed names. (SplitMix64.)
#[derive(Clone, Debug)]
pub struct Rng(u64);

/// Numbers at which arithmetic goes wrong.
const EDGES: [u64; 8] =
    [0, 1, 0x7f, 0xff, 0x7fff_ffff, 0xffff_ffff, 0x7fff_ffff_ffff_ffff, 0xffff_ffff_ffff_ffff];

impl Rng {
    /// The numbers of `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`, or 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next_u64() % bound.max(1) as u64) as usize
    }
}

/// `input` with one to four places changed; `other` is a source of pieces.
pub fn mutate(input: &[u8], other: &[u8], rng: &mut Rng) -> Vec<u8> {
    let mut bytes = input.to_vec();
    for _ in 0..=rng.below(4) {
        let at = rng.below(bytes.len());
        match rng.below(7) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << rng.below(8),
            1 if !bytes.is_empty() => bytes[at] = rng.next_u64() as u8,
            2 => bytes.truncate(at),
            3 => drop(bytes.drain(at..(at + 1 + rng.below(16)).min(bytes.len()))),
            4 => bytes.insert(at, rng.next_u64() as u8),
            5 => {
                let from = rng.below(other.len());
                let piece = &other[from..(from + 1 + rng.below(64)).min(other.len())];
                drop(bytes.splice(at..at, piece.iter().copied()));
            }
            _ => {
                let edge = EDGES[rng.below(EDGES.len())].to_le_bytes();
                let len = [1, 2, 4, 8][rng.below(4)].min(bytes.len() - at);
                bytes[at..at + len].copy_from_slice(&edge[..len]);
            }
        }
    }
    bytes
}
