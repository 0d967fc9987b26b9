//! The list of targets.

mod files;
mod messages;
mod requests;

use crate::Target;

/// Every target.
pub const TARGETS: &[Target] = &[
    Target { name: "gguf", run: files::gguf, seeds: files::gguf_seeds, n_mutations: 2000 },
    Target {
        name: "safetensors",
        run: files::safetensors,
        seeds: files::safetensors_seeds,
        n_mutations: 2000,
    },
    Target { name: "tokenizer", run: files::tokenizer, seeds: files::tokenizer_seeds, n_mutations: 300 },
    Target {
        name: "chat_template",
        run: files::chat_template,
        seeds: files::chat_template_seeds,
        n_mutations: 500,
    },
    Target { name: "kv_push", run: messages::kv_push, seeds: messages::kv_push_seeds, n_mutations: 5000 },
    Target {
        name: "worker_messages",
        run: messages::worker,
        seeds: messages::worker_seeds,
        n_mutations: 5000,
    },
    Target { name: "group_messages", run: messages::group, seeds: messages::group_seeds, n_mutations: 5000 },
    Target {
        name: "collective",
        run: messages::collective,
        seeds: messages::collective_seeds,
        n_mutations: 5000,
    },
    Target { name: "http_body", run: requests::http_body, seeds: requests::http_seeds, n_mutations: 5000 },
    Target { name: "grpc_request", run: requests::grpc, seeds: requests::grpc_seeds, n_mutations: 5000 },
    Target { name: "etcd_values", run: requests::etcd, seeds: requests::etcd_seeds, n_mutations: 5000 },
];
