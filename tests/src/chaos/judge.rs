//! What became of one output, by comparison with the undisturbed one: a pure function of the two.
//!
//! Clients of the public API get tokens without indices, so a repeated or a skipped token can be told from a wrong one
//! only by what follows. The comparison looks for the shift under which the rest agrees again; without one the output
//! is altered. Equality of the whole is all that counts for a pass; the kinds are for the person who has to find out.

/// How an output differs from the undisturbed one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Not at all.
    Whole,
    /// Tokens are missing.
    Lost {
        /// How many.
        n_tokens: usize,
    },
    /// Tokens came more than once.
    Duplicated {
        /// How many.
        n_tokens: usize,
    },
    /// Another token than there should be.
    Altered {
        /// Index of the first.
        at: usize,
    },
    /// It did not come to its end.
    Failed {
        /// What the client was told.
        problem: String,
        /// Tokens that had come by then.
        n_tokens: usize,
    },
}

/// The shortest stretch that shows a shift: a shorter one may agree by chance.
const MIN_AGREEMENT: usize = 3;

/// Compares the tokens of an output that has ended with what they should be.
pub fn compare(expected: &[u32], got: &[u32]) -> Verdict {
    let at = expected.iter().zip(got).take_while(|(one, other)| one == other).count();
    let (expected_rest, got_rest) = (&expected[at..], &got[at..]);
    match (expected_rest, got_rest) {
        ([], []) => return Verdict::Whole,
        (rest, []) => return Verdict::Lost { n_tokens: rest.len() },
        _ => {}
    }
    // A repeat: what came is what should have come some tokens earlier.
    if let Some(n_tokens) = (1..=at).find(|shift| agrees(&expected[at - shift..], got_rest)) {
        return Verdict::Duplicated { n_tokens };
    }
    if let Some(n_tokens) = (1..expected_rest.len()).find(|&shift| agrees(&expected_rest[shift..], got_rest))
    {
        return Verdict::Lost { n_tokens };
    }
    Verdict::Altered { at }
}

/// Whether the shorter of the two is the beginning of the other, and long enough to mean something.
fn agrees(one: &[u32], other: &[u32]) -> bool {
    let len = one.len().min(other.len());
    len >= MIN_AGREEMENT && one[..len] == other[..len]
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: [u32; 10] = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3];

    #[test]
    fn every_kind_of_damage_is_named() {
        let with = |change: fn(&mut Vec<u32>)| {
            let mut got = OUTPUT.to_vec();
            change(&mut got);
            compare(&OUTPUT, &got)
        };
        assert_eq!(with(|_| {}), Verdict::Whole);
        assert_eq!(with(|got| got.truncate(7)), Verdict::Lost { n_tokens: 3 });
        assert_eq!(with(|got| drop(got.drain(4..6))), Verdict::Lost { n_tokens: 2 });
        assert_eq!(with(|got| got.insert(4, 1)), Verdict::Duplicated { n_tokens: 1 });
        assert_eq!(with(|got| drop(got.splice(6..6, [1, 5, 9]))), Verdict::Duplicated { n_tokens: 3 });
        assert_eq!(with(|got| got[5] = 7), Verdict::Altered { at: 5 });
        assert_eq!(with(|got| got.push(8)), Verdict::Altered { at: 10 });
        assert_eq!(compare(&OUTPUT, &[]), Verdict::Lost { n_tokens: 10 });
        assert_eq!(compare(&[], &[]), Verdict::Whole);
    }

    #[test]
    fn only_equal_outputs_are_whole() {
        for cut in 0..OUTPUT.len() {
            for token in 0..8 {
                let mut got = OUTPUT.to_vec();
                got[cut] = token;
                assert_eq!(compare(&OUTPUT, &got) == Verdict::Whole, got == OUTPUT);
            }
        }
    }
}
