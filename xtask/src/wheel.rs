//! `cargo xtask wheel`: the wheel that many Linux systems and every Python from 3.11 on can install, and a look at it from fresh environments.
//!
//! It is linked by zig against the symbols of an old C library, so that it starts on systems older than this one; maturin then looks at every
//! symbol, and refuses to call a wheel what it is not.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::command::{Error, output, root, run as run_command};
use crate::python::Environment;

#[derive(clap::Args)]
pub struct Arguments {
    /// Where the wheel goes.
    #[arg(long, value_name = "DIR", default_value = "dist")]
    out: PathBuf,
    /// The oldest C library that it is for, as PyPI names it.
    #[arg(long, value_name = "TAG", default_value = "manylinux_2_28")]
    compatibility: String,
    /// Build by the compiler and for the C library of this machine.
    #[arg(long, conflicts_with = "compatibility")]
    plain: bool,
    /// Pythons that it is used with, as versions or as paths; python3 without. uv fetches a version that is not there
    #[arg(long, value_delimiter = ',', value_name = "PYTHONS")]
    python: Vec<String>,
    /// Take this wheel, and build none.
    #[arg(long, value_name = "FILE")]
    built: Option<PathBuf>,
}

/// What is done with it by each Python: bytes from one agent to another, with nothing else installed.
const USED: &str = r#"
import importlib.metadata, platform, weft
there = {found.metadata["Name"] for found in importlib.metadata.distributions()}
assert there == {"weft"}, there
owner, reader = weft.Agent("owner"), weft.Agent("reader")
kept = owner.allocate(1 << 20)
memoryview(kept)[:] = bytes(range(256)) * 4096
owner.publish("bytes", kept)
peer = reader.connect(owner.address)
mine = bytearray(1 << 20)
summary = peer.read(reader.register(mine), peer.region("bytes"), checksum=True).wait()
assert mine == bytes(memoryview(kept))
print(f"Python {platform.python_version()}: weft {weft.__version__}, {summary.bytes} bytes over {summary.transport}")
"#;

/// What a wheel takes when it is installed.
const INSTALLED_BYTES_MAX: u64 = 30 << 20;
/// How long the command takes to say its version; most of that is Python's.
const START_TIME_MAX: Duration = Duration::from_millis(500);

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let tools = Environment::make("target/wheel/tools")?;
    let wheel = match &arguments.built {
        Some(wheel) => wheel.clone(),
        None => build(arguments, &tools)?,
    };
    check(&wheel)?;
    for wanted in &arguments.python {
        use_with(&interpreter(wanted, &tools)?, &wheel)?;
    }
    if arguments.built.is_some() {
        return Ok(ExitCode::SUCCESS);
    }
    let out = root().join(&arguments.out);
    let kept = out.join(wheel.file_name().unwrap_or_default());
    let copied = fs::create_dir_all(&out).and_then(|()| fs::copy(&wheel, &kept));
    copied.map_err(|source| Error::File {
        path: kept.clone(),
        source,
    })?;
    println!("{}", arguments.out.join(kept.file_name().unwrap_or_default()).display());
    Ok(ExitCode::SUCCESS)
}

fn build(arguments: &Arguments, tools: &Environment) -> Result<PathBuf, Error> {
    tools.pip_install(&["maturin>=1.9,<2"])?;
    let built = root().join("target/wheel/built");
    let _ = fs::remove_dir_all(&built);
    let mut maturin = tools.python();
    maturin
        .args(["-m", "maturin", "build", "--release", "--locked", "--out"])
        .arg(&built)
        .current_dir(root());
    if arguments.plain {
        maturin.args(["--compatibility", "linux"]);
    } else {
        tools.pip_install(&["ziglang"])?;
        // maturin asks the first Python that it finds for zig.
        maturin.env("PATH", tools.search_path());
        maturin.args(["--zig", "--compatibility", &arguments.compatibility]);
    }
    run_command(&mut maturin)?;
    only_file(&built)
}

/// A Python by its path, or by its version.
fn interpreter(wanted: &str, tools: &Environment) -> Result<PathBuf, Error> {
    if wanted.contains('/') {
        return Ok(wanted.into());
    }
    tools.pip_install(&["uv"])?;
    let find = || output(tools.installed("uv").args(["python", "find", "--no-project", wanted]));
    let found = match find() {
        Ok(found) => found,
        Err(_) => {
            run_command(tools.installed("uv").args(["python", "install", wanted]))?;
            find()?
        }
    };
    Ok(found.trim().into())
}

/// Installs the wheel for a Python, with nothing beside it, not even pip, and moves bytes.
fn use_with(python: &Path, wheel: &Path) -> Result<(), Error> {
    const BARE: &str = "target/wheel/bare";
    let _ = fs::remove_dir_all(root().join(BARE));
    let environment = Environment::make_for(BARE, python)?;
    environment.pip_install(&["--no-index", "--no-deps", &wheel.to_string_lossy()])?;
    let uninstall = ["-m", "pip", "uninstall", "--quiet", "--yes", "setuptools", "pip"];
    run_command(environment.python().args(uninstall))?;
    run_command(environment.python().args(["-c", USED]).current_dir("/"))?;
    run_command(environment.installed("weft").arg("--version").current_dir("/"))
}

/// Installs the wheel where nothing else is, and uses it.
fn check(wheel: &Path) -> Result<(), Error> {
    let fresh = root().join("target/wheel/fresh");
    let _ = fs::remove_dir_all(&fresh);
    let environment = Environment::make("target/wheel/fresh")?;
    let before = size(&fresh);
    environment.pip_install(&[&wheel.to_string_lossy()])?;
    let installed = size(&fresh).saturating_sub(before);
    let packed = wheel.metadata().map_or(0, |metadata| metadata.len());
    let weft = || environment.installed("weft");
    let mut starts: Vec<Duration> = Vec::new();
    let mut version = String::new();
    for _ in 0..5 {
        let start = Instant::now();
        version = output(weft().arg("--version"))?;
        starts.push(start.elapsed());
    }
    starts.sort_unstable();
    let start = starts[0];
    output(
        environment
            .python()
            .args(["-c", "import weft; print(weft.__version__)"]),
    )?;
    run_command(weft().arg("doctor"))?;
    println!(
        "{}: {:.1} MB packed, {:.1} MB installed; says its version in {:.0} ms",
        version.trim(),
        packed as f64 / 1e6,
        installed as f64 / 1e6,
        start.as_secs_f64() * 1e3
    );
    for (wrong, what) in [
        (installed > INSTALLED_BYTES_MAX, "takes too much when it is installed"),
        (start > START_TIME_MAX, "takes too long to start"),
    ] {
        if wrong {
            return Err(Error::NotUnderstood {
                program: wheel.display().to_string(),
                said: what.to_owned(),
            });
        }
    }
    Ok(())
}

fn only_file(directory: &Path) -> Result<PathBuf, Error> {
    let failed = |source| Error::File {
        path: directory.to_owned(),
        source,
    };
    let first = fs::read_dir(directory).map_err(failed)?.next();
    let first = first.ok_or_else(|| failed(std::io::ErrorKind::NotFound.into()))?;
    Ok(first.map_err(failed)?.path())
}

fn size(path: &Path) -> u64 {
    let Ok(metadata) = path.symlink_metadata() else {
        return 0;
    };
    match fs::read_dir(path) {
        Ok(inside) if metadata.is_dir() => inside.flatten().map(|entry| size(&entry.path())).sum(),
        _ => metadata.len(),
    }
}
