//! Servers of S3 for tests, each a process of its own, and a [`Gate`] before them that does harm.
//!
//! There are two: `s3s-fs`, which keeps objects as files and is served by the test program itself, started once more; and Garage, where `cargo xtask s3-server` has
//! installed it. A test file that starts servers has a test of this form, which is that process:
//!
//! ```no_run
//! #[test]
//! #[ignore = "the server of the other tests"]
//! fn s3_server() {
//!     weft_testing_s3::serve();
//! }
//! ```

mod gate;

use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub use gate::{Gate, Harm};

const ROOT: &str = "WEFT_TEST_S3_ROOT";
const PORT: &str = "WEFT_TEST_S3_PORT";
const PATIENCE: Duration = Duration::from_secs(60);

/// The name and the key by which every server here is asked. Garage wants these forms.
pub const KEY_NAME: &str = "GK0123456789abcdef01234567";
pub const KEY: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
pub const BUCKET: &str = "blocks";
pub const REGION: &str = "garage";

/// Which program serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Files,
    Garage,
}

/// A server that runs until this is dropped.
#[derive(Debug)]
pub struct Server {
    kind: Kind,
    root: tempfile::TempDir,
    port: u16,
    child: Option<Child>,
}

impl Kind {
    /// Those that this machine has.
    #[track_caller]
    pub fn all() -> Vec<Kind> {
        match weft_testing::has(weft_testing::Need::Garage) {
            true => vec![Kind::Files, Kind::Garage],
            false => vec![Kind::Files],
        }
    }
}

impl Server {
    /// Starts one, with an empty bucket.
    pub fn start(kind: Kind) -> Server {
        let root = tempfile::tempdir().expect("a folder");
        if kind == Kind::Files {
            std::fs::create_dir(root.path().join(BUCKET)).expect("a bucket");
        }
        let mut server = Server {
            kind,
            root,
            port: free_port(),
            child: None,
        };
        server.restart();
        server
    }

    pub fn kind(&self) -> Kind {
        self.kind
    }
    pub fn port(&self) -> u16 {
        self.port
    }
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
    /// Where it keeps what it has.
    pub fn root(&self) -> &Path {
        self.root.path()
    }

    /// Ends it at once, as a power failure would.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("a child of this process");
            child.wait().expect("a child of this process");
        }
    }

    /// Holds it; connections stay, and nobody answers.
    pub fn freeze(&self) {
        self.signal(libc::SIGSTOP);
    }
    pub fn thaw(&self) {
        self.signal(libc::SIGCONT);
    }

    fn signal(&self, signal: i32) {
        let id = self.child.as_ref().expect("it runs").id();
        // SAFETY: a plain call; the number is that of a child that has not been waited for.
        unsafe { libc::kill(id as i32, signal) };
    }

    /// Takes the bucket away with all that is in it.
    pub fn remove_bucket(&self) {
        assert_eq!(self.kind, Kind::Files, "only of a server whose buckets are folders");
        std::fs::rename(self.root.path().join(BUCKET), self.root.path().join("away")).expect("a bucket");
    }
    /// Brings it back.
    pub fn return_bucket(&self) {
        std::fs::rename(self.root.path().join("away"), self.root.path().join(BUCKET)).expect("no bucket");
    }

    /// Starts it again, at the same port and with what it had.
    pub fn restart(&mut self) {
        self.kill();
        let mut command = match self.kind {
            Kind::Files => {
                let mut command = Command::new(std::env::current_exe().expect("a path"));
                command.args(["--exact", "s3_server", "--ignored", "--nocapture"]);
                command
            }
            Kind::Garage => self.garage(),
        };
        let child = command
            .env(ROOT, self.root.path())
            .env(PORT, self.port.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        self.child = Some(child.expect("a server starts"));
        let until = Instant::now() + PATIENCE;
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            assert!(Instant::now() < until, "the server does not answer");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn garage(&self) -> Command {
        let (root, port) = (self.root.path(), self.port);
        let settings = root.join("garage.toml");
        if !settings.exists() {
            let text = format!(
                "metadata_dir = \"{0}/meta\"\ndata_dir = \"{0}/data\"\ndb_engine = \"sqlite\"\nreplication_factor = 1\n\
                 rpc_bind_addr = \"127.0.0.1:{1}\"\nrpc_public_addr = \"127.0.0.1:{1}\"\nrpc_secret = \"{KEY}\"\n\
                 [s3_api]\ns3_region = \"{REGION}\"\napi_bind_addr = \"127.0.0.1:{port}\"\n",
                root.display(),
                free_port(),
            );
            std::fs::write(&settings, text).expect("a file");
        }
        let mut command = Command::new(weft_testing::garage().expect("asked for where it is"));
        command
            .arg("-c")
            .arg(settings)
            .args(["server", "--single-node", "--default-bucket"]);
        command
            .env("GARAGE_DEFAULT_ACCESS_KEY", KEY_NAME)
            .env("GARAGE_DEFAULT_SECRET_KEY", KEY)
            .env("GARAGE_DEFAULT_BUCKET", BUCKET);
        command
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("bound").port()
}

/// The server that [`Server::start`] has started: returns at once where this process is none.
pub fn serve() {
    let (Some(root), Ok(port)) = (std::env::var_os(ROOT), std::env::var(PORT)) else {
        return;
    };
    // Its parent may be killed.
    // SAFETY: a plain call without pointers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    serve_at(port.parse().expect("a port"), PathBuf::from(root));
}

/// Serves what is in this folder, each folder of it being a bucket, until the process ends.
pub fn serve_at(port: u16, root: PathBuf) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    runtime.expect("an executor").block_on(async move {
        let files = s3s_fs::FileSystem::new(root).expect("a folder");
        let mut service = s3s::service::S3ServiceBuilder::new(files);
        service.set_auth(s3s::auth::SimpleAuth::from_single(KEY_NAME, KEY));
        let service = service.build();
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", port))
            .await
            .expect("the port is free");
        loop {
            let Ok((socket, _)) = listener.accept().await else {
                continue;
            };
            let _ = socket.set_nodelay(true);
            let service = service.clone();
            tokio::spawn(async move {
                let server = hyper_util::server::conn::auto::Builder::new(hyper_util::rt::TokioExecutor::new());
                let _ = server
                    .serve_connection(hyper_util::rt::TokioIo::new(socket), service)
                    .await;
            });
        }
    });
}
