//! `cargo xtask s3-server`: Garage, a server of S3 that many run, built once and kept. It runs beside Weft, and nothing of it is linked: its licence is
//! the AGPL.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use weft_testing::{garage, garage_root};

use crate::command::{Error, run as command};

const VERSION: &str = "2.5.0";
/// Garage wants a name and a key of these forms. They are for tests on one machine.
const KEY_NAME: &str = "GK0123456789abcdef01234567";
const KEY: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
const BUCKET: &str = "blocks";
const REGION: &str = "garage";

#[derive(clap::Args)]
pub struct Arguments {
    /// Only build it
    #[arg(long)]
    build: bool,
    /// Where it listens, on this machine
    #[arg(long, default_value_t = 3900)]
    port: u16,
    /// Where it keeps what it has; by default beside the program, from one run to the next
    #[arg(long, value_name = "DIRECTORY")]
    data: Option<PathBuf>,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let root = garage_root().unwrap_or_else(|| PathBuf::from("target/garage"));
    if garage().is_none() {
        eprintln!("building Garage {VERSION}, which takes some twenty minutes of one core");
        // In a folder of its own: neither this workspace's settings nor its lock file are its.
        let mut install = Command::new("cargo");
        install
            .current_dir("/")
            .args([
                "install",
                "garage",
                "--version",
                VERSION,
                "--locked",
                "--no-default-features",
            ])
            .args(["--features", "sqlite,bundled-libs", "--root"])
            .arg(&root);
        command(&mut install)?;
    }
    let Some(program) = garage().filter(|_| !arguments.build) else {
        return Ok(ExitCode::SUCCESS);
    };
    let data = arguments.data.clone().unwrap_or_else(|| root.join("data"));
    let settings = data.join("garage.toml");
    let failed = |path: &Path| {
        let path = path.to_owned();
        |source| Error::File { path, source }
    };
    fs::create_dir_all(&data).map_err(failed(&data))?;
    let port = arguments.port;
    let text = format!(
        "metadata_dir = \"{0}/meta\"\ndata_dir = \"{0}/data\"\ndb_engine = \"sqlite\"\nreplication_factor = 1\n\
         rpc_bind_addr = \"127.0.0.1:{1}\"\nrpc_public_addr = \"127.0.0.1:{1}\"\nrpc_secret = \"{KEY}\"\n\
         [s3_api]\ns3_region = \"{REGION}\"\napi_bind_addr = \"127.0.0.1:{port}\"\n",
        data.display(),
        port.wrapping_add(1),
    );
    fs::write(&settings, text).map_err(failed(&settings))?;
    println!("export AWS_ENDPOINT_URL=http://127.0.0.1:{port} AWS_REGION={REGION}");
    println!("export AWS_ACCESS_KEY_ID={KEY_NAME} AWS_SECRET_ACCESS_KEY={KEY}");
    println!("the bucket is s3://{BUCKET}; it runs until it is interrupted");
    let mut server = Command::new(program);
    server
        .arg("-c")
        .arg(&settings)
        .args(["server", "--single-node", "--default-bucket"])
        .env("GARAGE_DEFAULT_ACCESS_KEY", KEY_NAME)
        .env("GARAGE_DEFAULT_SECRET_KEY", KEY)
        .env("GARAGE_DEFAULT_BUCKET", BUCKET);
    command(&mut server)?;
    Ok(ExitCode::SUCCESS)
}
