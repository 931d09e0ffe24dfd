//! The peers and Weft, installed into an environment of their own, and what installing them took.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use serde_json::{Value, json};

use super::table::Side;
use crate::command::{self, Error, install, root};
use crate::python::Environment;

pub const NIXL: &str = "nixl==1.5.1";
const MOONCAKE: &str = "mooncake-transfer-engine-non-cuda";

pub struct Peers {
    environment: Environment,
}

impl Peers {
    pub fn install(sides: &[Side]) -> Result<Peers, Error> {
        let environment = Environment::make(".peers")?;
        let peers = Peers { environment };
        // Each side is imported by the environment's Python, which is the only proof that it is there.
        if !peers.has("numpy") {
            peers.environment.pip_install(&["numpy"])?;
        }
        if sides.contains(&Side::Nixl) && !(peers.has("nixl._api") && peers.note(Side::Nixl).exists()) {
            eprintln!("installing {NIXL}, which is several gigabytes");
            peers.timed_install(Side::Nixl, &[NIXL])?;
        }
        if sides.contains(&Side::Mooncake) && !peers.has("mooncake.engine") {
            peers.timed_install(Side::Mooncake, &[MOONCAKE])?;
            if !peers.has("mooncake.engine") {
                install(&["libibverbs1"])?;
            }
        }
        if sides.contains(&Side::Weft) {
            peers.install_weft()?;
        }
        Ok(peers)
    }

    pub fn python(&self) -> PathBuf {
        self.environment.path().join("bin/python")
    }

    /// The figures that were taken while installing; `None` where the driver has to be asked.
    pub fn installed(&self, side: Side, arguments: &[String]) -> Option<Result<f64, Error>> {
        let key = match arguments {
            [what] if what == "installed-size" => "megabytes",
            [what] if what == "install-time" => "seconds",
            _ => return None,
        };
        let path = self.note(side);
        let read = fs::read_to_string(&path).map_err(|source| Error::File {
            path: path.clone(),
            source,
        });
        Some(read.and_then(|text| {
            let figure = serde_json::from_str::<Value>(&text)
                .ok()
                .and_then(|note| note[key].as_f64());
            figure.ok_or(Error::NotUnderstood {
                program: path.display().to_string(),
                said: text,
            })
        }))
    }

    /// Builds the wheel first: what a user waits for is its installation.
    fn install_weft(&self) -> Result<(), Error> {
        let wheels = self.environment.path().join("wheels");
        let _ = fs::remove_dir_all(&wheels);
        let build = [
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--wheel-dir",
        ];
        command::run(
            self.environment
                .python()
                .args(build)
                .arg(&wheels)
                .arg(".")
                .current_dir(root()),
        )?;
        let failed = |source| Error::File {
            path: wheels.clone(),
            source,
        };
        let wheel = fs::read_dir(&wheels).map_err(failed)?.flatten().next();
        let wheel = wheel.ok_or_else(|| failed(std::io::ErrorKind::NotFound.into()))?.path();
        self.timed_install(
            Side::Weft,
            &["--force-reinstall", "--no-deps", &wheel.to_string_lossy()],
        )?;
        Ok(())
    }

    fn timed_install(&self, side: Side, what: &[&str]) -> Result<(), Error> {
        let before = self.bytes()?;
        let start = Instant::now();
        self.environment.pip_install(what)?;
        let seconds = start.elapsed().as_secs_f64();
        let bytes = match side {
            Side::Weft => bytes_under(&self.site_packages()?.join("weft"))?,
            _ => self.bytes()?.saturating_sub(before),
        };
        let path = self.note(side);
        let note = json!({"seconds": seconds, "megabytes": bytes as f64 / 1e6});
        fs::write(&path, note.to_string()).map_err(|source| Error::File { path, source })
    }

    fn note(&self, side: Side) -> PathBuf {
        self.environment.path().join(format!("{side}.json"))
    }

    fn has(&self, module: &str) -> bool {
        command::works(&self.python().to_string_lossy(), &["-c", &format!("import {module}")])
    }

    fn site_packages(&self) -> Result<PathBuf, Error> {
        let ask = "import sysconfig; print(sysconfig.get_path('platlib'))";
        Ok(command::output(self.environment.python().args(["-c", ask]))?
            .trim()
            .into())
    }

    fn bytes(&self) -> Result<u64, Error> {
        bytes_under(self.environment.path())
    }
}

fn bytes_under(path: &Path) -> Result<u64, Error> {
    let said = command::output(Command::new("du").args(["--summarize", "--bytes"]).arg(path))?;
    let bytes = said.split_whitespace().next().and_then(|word| word.parse().ok());
    bytes.ok_or(Error::NotUnderstood {
        program: "du".to_owned(),
        said,
    })
}
