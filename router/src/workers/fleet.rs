//! What the workers of all pools have in common: how they hold KV, and how many they are.
//!
//! Two workers whose layouts differ are never paired: a group's reservation names its layout, and only a prefill
//! worker of the same one is asked. That keeps requests right; here an operator is told, once for each worker, with
//! both values. Which of two layouts is the wrong one nobody can know, and during an upgrade neither is, so a worker
//! is compared with what most others have.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use longreach_proto::worker::KvLayout;
use longreach_types::WorkerId;

use crate::metrics::Metrics;

/// How a worker holds KV, as far as this router can read it.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Layout {
    /// In the words of this build.
    Known(Box<KvLayout>),
    /// In words that it does not know: a later build's, perhaps.
    Unknown(String),
}

/// A worker that differs from most others.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mismatch {
    /// The first field that differs.
    field: &'static str,
    /// Its value on the worker.
    value: String,
    /// Its value on most others.
    usual: String,
}

/// All workers' layouts. The pools share it.
pub(crate) struct Fleet {
    layouts: Mutex<BTreeMap<(&'static str, WorkerId), Layout>>,
    metrics: Metrics,
}

impl Fleet {
    /// Nobody yet.
    pub(crate) fn new(metrics: Metrics) -> Self {
        Self { layouts: Mutex::default(), metrics }
    }

    /// A worker was registered with `layout`, in words.
    pub(crate) fn registered(&self, role: &'static str, name: &WorkerId, layout: &str) {
        let known = layout.parse().map(|layout| Layout::Known(Box::new(layout)));
        self.learn(role, name, known.unwrap_or_else(|_| Layout::Unknown(layout.to_owned())));
    }

    /// A worker described itself.
    pub(crate) fn described(&self, role: &'static str, name: &WorkerId, layout: &KvLayout) {
        self.learn(role, name, Layout::Known(Box::new(layout.clone())));
    }

    /// A worker is gone.
    pub(crate) fn left(&self, role: &'static str, name: &WorkerId) {
        self.layouts().remove(&(role, name.clone()));
    }

    /// How many workers a role has.
    pub(crate) fn counted(&self, role: &'static str, n_workers: usize) {
        self.metrics.workers(role, n_workers);
    }

    fn learn(&self, role: &'static str, name: &WorkerId, layout: Layout) {
        let mismatch = {
            let mut layouts = self.layouts();
            let key = (role, name.clone());
            if layouts.get(&key) == Some(&layout) {
                return;
            }
            layouts.remove(&key);
            let mismatch = usual(layouts.values()).and_then(|usual| difference(&layout, usual));
            layouts.insert(key, layout);
            mismatch
        };
        if let Some(Mismatch { field, value, usual }) = mismatch {
            tracing::warn!(
                role,
                worker = %name,
                field,
                value,
                usual,
                "worker is not paired with the others: it holds KV differently"
            );
            self.metrics.layout_mismatch(role, field);
        }
    }

    fn layouts(&self) -> MutexGuard<'_, BTreeMap<(&'static str, WorkerId), Layout>> {
        self.layouts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The layout that most have.
fn usual<'a>(layouts: impl Iterator<Item = &'a Layout>) -> Option<&'a Layout> {
    let mut counts = Vec::<(&Layout, usize)>::new();
    for layout in layouts {
        match counts.iter_mut().find(|(known, _)| *known == layout) {
            Some((_, count)) => *count += 1,
            None => counts.push((layout, 1)),
        }
    }
    counts.into_iter().max_by_key(|(_, count)| *count).map(|(layout, _)| layout)
}

fn difference(layout: &Layout, usual: &Layout) -> Option<Mismatch> {
    match (layout, usual) {
        (Layout::Known(one), Layout::Known(other)) => {
            one.first_difference(other).map(|(field, value, usual)| Mismatch { field, value, usual })
        }
        (one, other) if one != other => {
            let words = |layout: &Layout| match layout {
                Layout::Known(layout) => layout.to_string(),
                Layout::Unknown(words) => words.clone(),
            };
            Some(Mismatch { field: "layout", value: words(one), usual: words(other) })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use longreach_types::KvDtype;

    use super::*;

    fn layout(kv_dtype: KvDtype, block_size: usize) -> Layout {
        Layout::Known(Box::new(KvLayout {
            model_fingerprint: [7; 16],
            n_layers: 2,
            n_kv_heads: 1,
            head_dim: 8,
            kv_dtype,
            block_size,
            n_shards: 8,
            wire_version: 1,
        }))
    }

    #[test]
    fn a_worker_is_compared_with_what_most_have_and_both_values_are_named() {
        let (most, few) = (layout(KvDtype::F32, 32), layout(KvDtype::F16, 32));
        let layouts = [few.clone(), most.clone(), most.clone()];
        assert_eq!(usual(layouts.iter()), Some(&most));
        assert_eq!(usual([].iter()), None);
        let named = |field, value: &str, usual: &str| {
            Some(Mismatch { field, value: value.to_owned(), usual: usual.to_owned() })
        };
        assert_eq!(difference(&few, &most), named("kv_dtype", "f16", "f32"));
        assert_eq!(difference(&layout(KvDtype::F32, 64), &most), named("block_size", "64", "32"));
        assert_eq!(difference(&most, &most), None);
        let unknown = Layout::Unknown("a later build's".to_owned());
        assert_eq!(difference(&unknown, &few).unwrap().value, "a later build's");
    }
}
