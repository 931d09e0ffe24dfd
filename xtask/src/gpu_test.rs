//! `cargo xtask gpu-test`: the tests and benchmarks that need a GPU, as one bundle that is carried to a machine with one; or run here, where there is one.
//!
//! The bundle holds programs without their symbols, a wheel, and a script that runs all of it. It needs nothing on the other machine but the driver, and Python with
//! torch for the part that is about tensors.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use serde_json::Value;
use weft_testing::Need;

use crate::command::{Error, cargo, root, run as run_command};
use crate::python::Environment;

#[derive(clap::Args)]
pub struct Arguments {
    /// Where the bundle goes.
    #[arg(long, value_name = "DIR", default_value = "target/gpu-bundle")]
    out: PathBuf,
    /// Leave the wheel out.
    #[arg(long)]
    no_wheel: bool,
}

/// Test programs, by package and name.
const TESTS: [(&str, &str); 13] = [
    ("weft-gpu", "device"),
    ("weft-gpu", "convert"),
    ("weft-gpu", "collective"),
    ("weft-gpu", "device_api"),
    ("weft-gpu", "fused_norm"),
    ("weft-gpu", "experts"),
    ("weft-gpu", "gauge"),
    ("weft-fabric", "cuda_conformance"),
    ("weft-fabric", "cuda_convert"),
    ("weft-fabric", "cuda_processes"),
    ("weft", "gpu"),
    ("weft", "proxy_gpu"),
    ("weft", "hand_off"),
];
const EXAMPLES: [(&str, &str); 6] = [
    ("weft-gpu", "copies"),
    ("weft-gpu", "conversions"),
    ("weft-gpu", "collectives"),
    ("weft-gpu", "fused"),
    ("weft-gpu", "moe"),
    ("weft", "kernel_put"),
];
/// Runs examples, and torch beside them.
const BESIDE: &str = "crates/gpu/examples/beside.py";
const BYTES_MAX: u64 = 40 << 20;

const SCRIPT: &str = r#"#!/bin/sh
# Runs everything in this bundle, on a machine with a GPU. Each part ends with its own summary. "./run transfers" runs what is about copies and transfers within the
# device alone, in less than two minutes.
cd "$(dirname "$0")"
export WEFT_REQUIRE=gpu
failed=0
tests="@tests@"
examples="copies conversions collectives"
if [ "$1" = transfers ]; then
    tests="device convert cuda_conformance cuda_convert gpu"
    examples="copies conversions"
fi
for test in $tests; do
    echo "== $test"
    "./$test" --test-threads=1 || failed=1
done
for example in $examples; do
    echo "== $example"
    "./$example" || failed=1
done
if [ "$1" = transfers ]; then
    for more in "" "--checksum" "--set gpu.stay=0s"; do
        echo "== bench $more"
        for what in "4KiB,64MiB --batch 1" "4KiB,16KiB,64KiB --batch 4096"; do
            ./weft bench transfer --transport shared_memory.gpu --max-bytes 256MiB --seconds 0.2 $more --block $what || failed=1
        done
    done
    exit $failed
fi
echo "== kernel_put, two processes that share the card by MPS"
CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) && export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY="$CUDA_MPS_PIPE_DIRECTORY"
nvidia-cuda-mps-control -d && ./kernel_put || failed=1
echo quit | nvidia-cuda-mps-control
unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
echo "== fused, moe"
if python3 -c "import torch" 2> /dev/null; then
    python3 beside.py ./fused ./moe || failed=1
else
    ./fused && ./moe || failed=1
fi
if command -v compute-sanitizer > /dev/null; then
    for tool in memcheck racecheck synccheck; do
        for test in fused_norm experts; do
            echo "== $tool $test"
            compute-sanitizer --tool $tool --error-exitcode 1 "./$test" --test-threads=1 --exact one_launch_for_all_ranks || failed=1
        done
    done
fi
echo "== bench"
./weft bench transfer --transport shared_memory.gpu,shared_memory.gpu_host,tcp.gpu --block 4KiB,16KiB,64KiB,64MiB --batch 1,1024,4096 --max-bytes 256MiB || failed=1
if ls ./*.whl > /dev/null 2>&1; then
    echo "== Python"
    python3 -m pip install --quiet --no-deps --no-index --upgrade --target site ./*.whl && PYTHONPATH=site python3 tensors.py || failed=1
    PYTHONPATH=site python3 torch_cuda.py || failed=1
    PYTHONPATH=site python3 torch_rows.py || failed=1
fi
exit $failed
"#;

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let out = root().join(&arguments.out);
    let _ = fs::remove_dir_all(&out);
    fs::create_dir_all(&out).map_err(|source| Error::File {
        path: out.clone(),
        source,
    })?;
    for (package, test) in TESTS {
        let program = built(cargo().args(["test", "--release", "--no-run", "-p", package, "--test", test]))?;
        take(&program, &out.join(test))?;
    }
    for (package, example) in EXAMPLES {
        let program = built(cargo().args(["build", "--release", "-p", package, "--example", example]))?;
        take(&program, &out.join(example))?;
    }
    copy(&root().join(BESIDE), &out.join("beside.py"))?;
    let program = built(cargo().args(["build", "--release", "-p", "weft-cli"]))?;
    take(&program, &out.join("weft"))?;
    if !arguments.no_wheel {
        let tools = Environment::make("target/wheel/tools")?;
        tools.pip_install(&["maturin>=1.9,<2"])?;
        let mut maturin = tools.python();
        maturin.args([
            "-m",
            "maturin",
            "build",
            "--release",
            "--locked",
            "--strip",
            "--compatibility",
            "linux",
            "--out",
        ]);
        run_command(maturin.arg(&out).current_dir(root()))?;
        for script in ["tensors.py", "torch_cuda.py", "torch_rows.py"] {
            copy(&root().join("crates/python/tests/gpu").join(script), &out.join(script))?;
        }
    }
    let script = out.join("run");
    let text = SCRIPT.replace("@tests@", &TESTS.map(|(_, test)| test).join(" "));
    let written =
        fs::write(&script, text).and_then(|()| fs::set_permissions(&script, fs::Permissions::from_mode(0o755)));
    written.map_err(|source| Error::File {
        path: script.clone(),
        source,
    })?;
    let packed = pack(&out)?;
    let bytes = fs::metadata(&packed).map_or(0, |packed| packed.len());
    println!(
        "{}.tar.xz: {:.1} MB; carry it to a machine with a GPU, unpack it there, and: ./run",
        arguments.out.display(),
        bytes as f64 / 1e6
    );
    if bytes > BYTES_MAX {
        println!("that is more than {} MB", BYTES_MAX >> 20);
        return Ok(ExitCode::FAILURE);
    }
    match Need::Gpu.missing() {
        None => run_command(&mut Command::new(script)).map(|()| ExitCode::SUCCESS),
        Some(why) => {
            println!("nothing was run here: {why}");
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// A folder as one file beside it, which is told.
pub fn pack(out: &Path) -> Result<PathBuf, Error> {
    let packed = out.with_extension("tar.xz");
    let mut tar = Command::new("tar");
    run_command(tar.arg("-cJf").arg(&packed).arg("-C").arg(out).arg("."))?;
    Ok(packed)
}

/// Builds, and says where the program is.
pub fn built(command: &mut Command) -> Result<PathBuf, Error> {
    command.args(["--message-format", "json-render-diagnostics"]);
    let line = format!("{command:?}");
    let failed = move |code| Error::Failed {
        line: line.clone(),
        code,
    };
    let said = command.stderr(std::process::Stdio::inherit()).output();
    let said = said.map_err(|_| failed(None))?;
    let text = String::from_utf8_lossy(&said.stdout);
    let messages = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut programs = messages.filter_map(|message| Some(PathBuf::from(message.get("executable")?.as_str()?)));
    match programs.next_back().filter(|_| said.status.success()) {
        Some(program) => Ok(program),
        None => Err(failed(said.status.code())),
    }
}

/// A program without its symbols.
pub fn take(program: &Path, to: &Path) -> Result<(), Error> {
    run_command(Command::new("strip").arg("-o").arg(to).arg(program))
}

pub fn copy(from: &Path, to: &Path) -> Result<(), Error> {
    fs::copy(from, to).map(|_| ()).map_err(|source| Error::File {
        path: from.to_owned(),
        source,
    })
}
