//! A cluster of processes with every door locked: certificates between the roles, certificates and a password to etcd,
//! where the cluster's user reaches the cluster's keys and no others, and TLS to clients.

use std::{fs, path::Path, time::Duration};

use etcd_client::{Client, ConnectOptions, Identity, Permission, PermissionType, TlsOptions};
use longreach::certs::{CertRequest, MadeCerts};
use longreach_cluster::KeySpace;
use longreach_local::{
    EtcdCluster, EtcdFiles, EtcdOptions, Role as Process, RoleProcess, RolePrograms, RoleSpec, Site,
};
use longreach_proto::inference::inference_service_client::InferenceServiceClient;
use longreach_tests::{
    cluster::{
        ask::{Ask, Output},
        eventually,
        model::ServedModel,
    },
    tiny::Error,
};
use longreach_tls::{Role, TlsFiles};
use tempfile::TempDir;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};

const CLUSTER: &str = "locked";
const USER: &str = "longreach";
const PASSWORD: &str = "s3cret: with spaces and ünïcode";
const START: Duration = Duration::from_secs(30);
const GRACE: Duration = Duration::from_secs(20);

/// Files that all processes share.
struct Ground {
    dir: TempDir,
    certs: MadeCerts,
    etcd: EtcdCluster,
    model: ServedModel,
}

impl Ground {
    async fn new() -> Result<Self, Error> {
        let dir = tempfile::tempdir()?;
        let out = dir.path().join("certs");
        let request =
            CertRequest { out, names: Vec::new(), cluster: CLUSTER.to_owned(), days: 1, force: false };
        let certs = request.write()?;
        let (ca, public) =
            (certs.files(Role::Router).ca, certs.files(Role::Router).ca.with_file_name("public"));
        let files = EtcdFiles { ca, cert: public.with_extension("pem"), key: public.with_extension("key") };
        let etcd =
            EtcdCluster::start(EtcdOptions { tls: Some(files.clone()), ..EtcdOptions::default() }).await?;
        lock(&etcd, &files).await?;
        let model = ServedModel::golden("llama", Some(512))?;
        fs::write(dir.path().join("password"), format!("{PASSWORD}\n"))?;
        Ok(Self { dir, certs, etcd, model })
    }

    fn site(&self) -> Site {
        let program = RolePrograms::Command(env!("CARGO_BIN_EXE_chaos").into());
        let mut site = Site::new(program, self.dir.path(), &self.model.path);
        site.set("cluster.name", CLUSTER)
            .set("cluster.etcd", self.etcd.endpoints())
            .set("cluster.etcd_user", USER)
            .set("cluster.etcd_password_file", text(&self.dir.path().join("password")))
            .set("engine.kv_mem", "4 MiB")
            .set("engine.block_size", 4);
        site
    }

    /// `spec` with the certificate of `role`, to the other roles and to etcd.
    fn role(&self, spec: RoleSpec, role: Role) -> Result<RoleProcess, Error> {
        let TlsFiles { ca, cert, key } = self.certs.files(role);
        let spec = ["tls.", "cluster.etcd_"].into_iter().fold(spec, |spec, section| {
            spec.set(&format!("{section}ca"), text(&ca))
                .set(&format!("{section}cert"), text(&cert))
                .set(&format!("{section}key"), text(&key))
        });
        Ok(self.site().role(spec)?)
    }

    /// A client that believes the cluster's CA, as one outside does.
    async fn client(&self, router: &RoleProcess) -> Result<InferenceServiceClient<Channel>, Error> {
        let ca = Certificate::from_pem(fs::read(self.certs.files(Role::Router).ca)?);
        let addr = router.grpc_addr().ok_or("a router has an address")?;
        let endpoint = Endpoint::from_shared(format!("https://{addr}"))?;
        let tls = ClientTlsConfig::new().ca_certificate(ca);
        Ok(InferenceServiceClient::new(endpoint.tls_config(tls)?.connect().await?))
    }
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Makes etcd ask for passwords, with one user who may touch nothing but the cluster's keys.
async fn lock(etcd: &EtcdCluster, files: &EtcdFiles) -> Result<(), Error> {
    let tls = TlsOptions::new()
        .ca_certificate(etcd_client::Certificate::from_pem(fs::read(&files.ca)?))
        .identity(Identity::from_pem(fs::read(&files.cert)?, fs::read(&files.key)?));
    let mut admin = Client::connect(etcd.endpoints(), Some(ConnectOptions::new().with_tls(tls))).await?;
    let prefix = KeySpace::new(CLUSTER)?.all().as_str().to_owned();
    let keys = Permission::new(PermissionType::Readwrite, prefix).with_prefix();
    admin.role_add("cluster").await?;
    admin.role_grant_permission("cluster", keys).await?;
    admin.role_add("root").await?;
    for (user, password, role) in [("root", "root", "root"), (USER, PASSWORD, "cluster")] {
        admin.user_add(user, password, None).await?;
        admin.user_grant_role(user, role).await?;
    }
    admin.auth_enable().await?;
    Ok(())
}

async fn output(client: &mut InferenceServiceClient<Channel>, ask: &Ask) -> Result<Vec<u32>, Error> {
    let mut events = client.generate_stream(ask.stream_request()).await?.into_inner();
    let mut output = Output::default();
    while let Some(event) = events.message().await? {
        output.take(event);
    }
    Ok(output.tokens)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_behind_locks_answer_and_lose_nothing_when_one_is_killed() -> Result<(), Error> {
    let ground = Ground::new().await?;
    let TlsFiles { cert, .. } = ground.certs.files(Role::Router);
    let public = |end: &str| text(&cert.with_file_name(format!("public.{end}")));
    let router =
        RoleSpec::router("router").set("face_tls.cert", public("pem")).set("face_tls.key", public("key"));
    let mut processes = vec![
        ground.role(router, Role::Router)?,
        ground.role(RoleSpec::prefill("prefill-0"), Role::Prefill)?,
        ground.role(RoleSpec::rank("decode-0", 0, 2), Role::Decode)?,
        ground.role(RoleSpec::rank("decode-0", 1, 2), Role::Decode)?,
    ];
    for process in &mut processes {
        process.start()?;
    }
    // The router's health is behind the lock of its clients, so it is known to be ready by its answers.
    for worker in &mut processes[1..] {
        worker.wait_ready(START).await?;
    }
    let router = &processes[0];
    let is_up = async || match ground.client(router).await {
        Ok(mut client) => output(&mut client, &Ask::tokens([1, 2, 3]).max_tokens(2)).await.is_ok(),
        Err(_) => false,
    };
    assert!(eventually(is_up).await, "the router does not answer: {}", router.log());
    let mut client = ground.client(router).await?;
    // A prompt that is handed off: the group computes none as long as this itself.
    let ask = Ask::tokens((0..400_u32).map(|i| i * 7 % 250).collect::<Vec<_>>()).max_tokens(60);
    let undisturbed = output(&mut client, &ask).await?;
    assert_eq!(undisturbed.len(), 60);
    let figures = processes[1].probe().metrics().await?;
    let n_ended =
        figures.lines().find_map(|line| line.strip_prefix("longreach_prefill_sequences_ended_total "));
    assert!(n_ended.is_some_and(|n| n != "0"), "nothing was handed off: {figures}");

    processes[3].kill().await?;
    processes[3].start()?;
    processes[3].wait_ready(START).await?;
    assert_eq!(output(&mut client, &ask).await?, undisturbed);

    // Who has the certificate and not the password is kept out, and says why.
    fs::write(ground.dir.path().join("wrong"), "wrong")?;
    let spec = RoleSpec::prefill("stranger")
        .set("cluster.etcd_password_file", text(&ground.dir.path().join("wrong")));
    let mut stranger = ground.role(spec, Role::Prefill)?;
    stranger.start()?;
    assert!(
        eventually(async || stranger.log().contains("authentication failed")).await,
        "{}",
        stranger.log()
    );
    assert!(!stranger.probe().is_ready().await);
    stranger.kill().await?;

    drop(client);
    for process in processes.iter_mut().filter(|process| process.role() != Process::Router) {
        let status = process.drain(GRACE).await?;
        assert!(status.success(), "{}: {status}: {}", process.name(), process.log());
    }
    Ok(())
}
