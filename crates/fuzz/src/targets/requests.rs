//! What clients send, and what the coordinator holds.

use std::{fs, sync::OnceLock};

use longreach_cluster::{
    Batch, Change, DecodeRegistration, Entry, EpochRecord, GroupId, Key, KeySpace, PrefillRegistration,
    ReadyRecord, Record, Revision, Snapshot, WatchEvent,
};
use longreach_proto::inference as pb;
use longreach_router::fuzzing::{Discovery, Faces, MetadataMap, call_metadata};
use longreach_text::TextModel;
use longreach_types::{Epoch, GroupSecret, Incarnation, WorkerId};
use prost::Message;

use super::files::tokenizer_seeds;
use crate::parts;

/// The faces of a router with a byte-level tokenizer.
fn faces() -> &'static Faces {
    static FACES: OnceLock<Faces> = OnceLock::new();
    FACES.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a temporary folder can be made");
        let seed = &tokenizer_seeds()[0];
        let parts = parts::split(seed);
        for (name, content) in ["tokenizer.json", "tokenizer_config.json"].into_iter().zip(parts) {
            fs::write(dir.path().join(name), content).expect("a temporary file can be written");
        }
        Faces::new(TextModel::load(dir.path()).expect("a seed is accepted"))
    })
}

/// A body of either OpenAI endpoint.
pub(super) fn http_body(body: &[u8]) -> bool {
    faces().chat_body(body) | faces().completion_body(body)
}

/// Both endpoints, with all that clients write.
pub(super) fn http_seeds() -> Vec<Vec<u8>> {
    let common = r#""temperature":0.7,"top_p":0.9,"top_k":-1,"min_p":0.01,"repetition_penalty":1.1,
        "presence_penalty":0.5,"frequency_penalty":-0.5,"logit_bias":{"7":-3.5,"12":100},"seed":-9,"n":2,
        "max_tokens":32,"min_tokens":1,"stop":["\n\n","\u00e9"],"stop_token_ids":[3],"ignore_eos":true,
        "include_stop_str_in_output":false,"request_id":"r","session_id":"s","cache_salt":"x","priority":-2,
        "response_format":{"type":"text"},"modalities":["text"],"tools":[],"user":"u","best_of":2"#;
    let chat = format!(
        r#"{{"messages":[{{"role":"system","content":"be brief"}},{{"role":"user","content":[{{"type":"text",
        "text":"hi \ud83d\ude00"}}]}},{{"role":"assistant","content":"x","name":"n"}}],"logprobs":true,
        "top_logprobs":3,"stream":true,"stream_options":{{"include_usage":true}},
        "chat_template_kwargs":{{"enable_thinking":false}},"max_completion_tokens":9,{common}}}"#
    );
    let text = format!(r#"{{"prompt":["hi","there"],"logprobs":2,"echo":false,{common}}}"#);
    let lists = r#"{"prompt":[[1,2,3],[4]],"suffix":"","model":""}"#.to_owned();
    let tokens = r#"{"prompt":[72,105],"stop":"x","seed":18446744073709551615}"#.to_owned();
    [chat, text, lists, tokens].map(String::into_bytes).into()
}

/// A message of the typed face, and perhaps the name and the metadata of its call. The first byte says which message.
pub(super) fn grpc(bytes: &[u8]) -> bool {
    let parts = parts::split(bytes);
    if let [_, client_id, metadata @ ..] = parts.as_slice() {
        let mut map = MetadataMap::new();
        for (name, value) in ["grpc-timeout", "traceparent"].into_iter().zip(metadata) {
            if let Ok(value) = String::from_utf8_lossy(value).parse() {
                map.insert(name, value);
            }
        }
        call_metadata(String::from_utf8_lossy(client_id).into_owned(), &map);
    }
    let Some((&kind, message)) = parts[0].split_first() else { return false };
    match kind {
        0 => pb::GenerateStreamRequest::decode(message).is_ok_and(|message| faces().generate(message)),
        1 => pb::ChatStreamRequest::decode(message).is_ok_and(|message| faces().chat(message)),
        2 => pb::DetokenizeRequest::decode(message).is_ok_and(|message| faces().detokenize(message)),
        _ => false,
    }
}

/// A prompt in each form, with every option.
pub(super) fn grpc_seeds() -> Vec<Vec<u8>> {
    let options = pb::GenerateOptions {
        temperature: Some(0.7),
        top_k: Some(40),
        top_p: Some(0.9),
        min_p: Some(0.01),
        logit_bias: [(7, -3.5)].into(),
        seed: Some(9),
        n: Some(2),
        max_tokens: Some(32),
        stop: vec!["\n\n".to_owned()],
        stop_token_ids: vec![3],
        top_logprobs: Some(3),
        session_id: Some("s".to_owned()),
        ..pb::GenerateOptions::default()
    };
    let prompt = |prompt| Some(pb::Prompt { prompt: Some(prompt) });
    let generate = |prompt| pb::GenerateStreamRequest {
        model: String::new(),
        request_id: "r".to_owned(),
        prompt,
        options: Some(options.clone()),
    };
    let message = |role: &str| pb::ChatMessage { role: role.to_owned(), content: "hi".to_owned() };
    let chat = pb::ChatPrompt {
        messages: vec![message("system"), message("user")],
        add_generation_prompt: Some(true),
    };
    let text = generate(prompt(pb::prompt::Prompt::Text("Hi it's".to_owned())));
    let ids = generate(prompt(pb::prompt::Prompt::TokenIds(pb::TokenIds { ids: vec![72, 105] })));
    let chat = pb::ChatStreamRequest {
        model: String::new(),
        request_id: String::new(),
        chat: Some(chat),
        options: Some(options.clone()),
    };
    let detokenize = pb::DetokenizeRequest { model: String::new(), token_ids: vec![72, 105, 258] };
    let tagged = |kind: u8, bytes: Vec<u8>| [vec![kind], bytes].concat();
    let trace: &[u8] = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    vec![
        parts::join(&[&tagged(0, text.encode_to_vec())[..], b"client", b"250m", trace]),
        tagged(0, ids.encode_to_vec()),
        tagged(1, chat.encode_to_vec()),
        tagged(2, detokenize.encode_to_vec()),
    ]
}

/// Keys and values in turn, as a snapshot and then, one after the other, as changes. An empty value deletes.
pub(super) fn etcd(bytes: &[u8]) -> bool {
    let keys = keys();
    let parts = parts::split(bytes);
    let entries: Vec<Entry> = parts
        .chunks_exact(2)
        .zip(1..)
        .map(|(pair, revision)| Entry {
            key: format!("{}{}", keys.all(), String::from_utf8_lossy(pair[0])),
            value: pair[1].to_vec(),
            revision: Revision(revision),
        })
        .collect();
    let mut stepwise = Discovery::new(keys.clone());
    let mut n_workers = 0;
    for entry in entries.clone() {
        let revision = entry.revision;
        let change = if entry.value.is_empty() {
            Change::Delete { key: entry.key, revision }
        } else {
            Change::Put(entry)
        };
        n_workers = stepwise.apply(WatchEvent::Changes(Batch { changes: vec![change] }));
    }
    // A snapshot has each key once, as it was last put.
    let last: std::collections::BTreeMap<_, _> =
        entries.into_iter().map(|entry| (entry.key.clone(), entry)).collect();
    let entries: Vec<Entry> = last.into_values().filter(|entry| !entry.value.is_empty()).collect();
    let revision = Revision(parts.len() as u64);
    let n_at_once =
        Discovery::new(keys).apply(WatchEvent::Snapshot(Snapshot { revision, entries: entries.clone() }));
    assert_eq!(n_workers, n_at_once, "changes one by one lead elsewhere than a snapshot");
    assert_eq!(stepwise.apply(WatchEvent::Snapshot(Snapshot { revision, entries })), n_at_once);
    n_workers > 0
}

/// A cluster with a prefill worker and a group, and one whose worker comes again.
pub(super) fn etcd_seeds() -> Vec<Vec<u8>> {
    let keys = keys();
    let group = GroupId("g".to_owned());
    let prefill = |incarnation| PrefillRegistration {
        id: WorkerId("p".to_owned()),
        incarnation: Incarnation(incarnation),
        endpoint: "http://127.0.0.1:1".to_owned(),
        layout_hash: "00ff-f32-b32-v1".to_owned(),
    };
    let rank = DecodeRegistration {
        id: DecodeRegistration::id_of(&group, 0),
        incarnation: Incarnation(8),
        rank: 0,
        n_ranks: 1,
        dcp_size: 1,
        endpoint: "http://[::1]:2".to_owned(),
        peer_addr: "[::1]:3".to_owned(),
        layout_hash: "00ff-f32-b32-v1".to_owned(),
    };
    let epoch =
        EpochRecord { epoch: Epoch(4), secret: GroupSecret::new([5; 32]), members: vec![rank.clone()] };
    let ready = ReadyRecord {
        epoch: Epoch(4),
        endpoint: "http://localhost:2".to_owned(),
        n_ranks: 1,
        dcp_size: 1,
        layout_hash: "00ff-f32-b32-v1".to_owned(),
        max_seq_len: 4096,
    };
    let name = |key: Key| {
        let key = keys.encode(&key).expect("plain names are keys");
        key.as_bytes()[keys.all().as_str().len()..].to_vec()
    };
    let p = || name(Key::Prefill(WorkerId("p".to_owned())));
    let whole = [
        p(),
        prefill(6).encode(),
        name(Key::Rank { group: group.clone(), rank: 0 }),
        rank.encode(),
        name(Key::Epoch(group.clone())),
        epoch.encode(),
        name(Key::Ready(group)),
        ready.encode(),
    ];
    let again = [p(), prefill(6).encode(), p(), Vec::new(), p(), prefill(7).encode()];
    vec![parts::join(&whole), parts::join(&again)]
}

fn keys() -> KeySpace {
    KeySpace::new("fuzzed").expect("a plain name is a cluster's")
}
