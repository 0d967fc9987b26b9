//! Every format against the independent f64 expansion.

use super::*;
use crate::testing::{Rng, expand_f64, random_stored};

#[test]
fn every_format_expands_to_the_independent_values() {
    let mut rng = Rng(1);
    for ty in StoredType::ALL {
        for _ in 0..20 {
            let bytes = random_stored(ty, 512, &mut rng);
            let mut out = vec![0.0; 512];
            dequantize_row(ty, &bytes, &mut out).unwrap();
            for (i, (x, exact)) in out.iter().zip(expand_f64(ty, &bytes)).enumerate() {
                // The f64 value is exact in every format but Q4_K and Q5_K, whose minimum is added in f32.
                let expected = exact as f32;
                assert!(
                    x.to_bits() == expected.to_bits() || *x == 0.0 && expected == 0.0,
                    "{ty} value {i}: {x:e} is not {expected:e}"
                );
            }
        }
    }
}

#[test]
fn a_part_of_a_row_expands_to_that_part_of_the_values() {
    let mut rng = Rng(2);
    for ty in StoredType::ALL {
        let bytes = random_stored(ty, 512, &mut rng);
        let mut whole = vec![0.0; 512];
        let mut part = vec![0.0; 96];
        dequantize_row(ty, &bytes, &mut whole).unwrap();
        expand(ty, &bytes, 288, &mut part);
        assert_eq!(part, whole[288..384], "{ty}");
    }
}

#[test]
fn wrong_lengths_are_refused_with_numbers() {
    let mut out = [0.0; 40];
    let error = dequantize_row(StoredType::Q4_0, &[0; 36], &mut out).unwrap_err();
    assert_eq!(error.to_string(), "a row of 40 values is not whole blocks of Q4_0, which hold 32 each");
    let error = dequantize_row(StoredType::Q8_0, &[0; 33], &mut out[..32]).unwrap_err();
    assert_eq!(error.to_string(), "Q8_0 data has 33 bytes where its shape needs 34");
    assert_eq!(StoredType::Q6K.row_bytes(300), None);
    assert_eq!(StoredType::Q6K.row_bytes(512), Some(420));
}
