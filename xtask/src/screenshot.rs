//! `cargo xtask screenshot`: a scenario's report as a picture, by Chromium without a window.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use crate::command::{Error, Needed, cargo, install_missing, root, run};

/// What draws reports.
pub const CHROMIUM: Needed = (&["chromium", "--version"], "chromium");

#[derive(clap::Args)]
pub struct Arguments {
    /// The scenario: a file, or the name of a shipped one.
    #[arg(default_value = "ring")]
    scenario: String,
    /// Measurements to put beside the predictions.
    #[arg(long, value_name = "FILE")]
    measured: Option<PathBuf>,
    /// Where the picture goes.
    #[arg(long, value_name = "FILE", default_value = "report.png")]
    out: PathBuf,
    /// How wide and how high it is.
    #[arg(long, value_name = "W,H", default_value = "1280,1900")]
    size: String,
    /// Draw on black.
    #[arg(long)]
    dark: bool,
}

pub fn take(arguments: &Arguments) -> Result<ExitCode, Error> {
    install_missing(&[CHROMIUM])?;
    let scratch = root().join("target/screenshot");
    std::fs::create_dir_all(&scratch).map_err(|source| Error::File {
        path: scratch.clone(),
        source,
    })?;
    let page = scratch.join("report.html");
    let mut weft = cargo();
    weft.args([
        "run",
        "--quiet",
        "-p",
        "weft-cli",
        "--",
        "sim",
        "run",
        &arguments.scenario,
        "--report",
    ])
    .arg(&page);
    if let Some(measured) = &arguments.measured {
        weft.arg("--measured").arg(measured);
    }
    run(&mut weft)?;
    let mut chromium = Command::new("chromium");
    chromium
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
        ])
        .args([
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
        ])
        .args(["--hide-scrollbars", "--virtual-time-budget=3000"])
        .arg(format!("--user-data-dir={}", scratch.join("profile").display()))
        .arg(format!("--window-size={}", arguments.size))
        .arg(format!("--screenshot={}", arguments.out.display()));
    if arguments.dark {
        chromium.arg("--blink-settings=preferredColorScheme=0");
    }
    run(chromium.arg(format!("file://{}", page.display())))?;
    println!("{}", arguments.out.display());
    Ok(ExitCode::SUCCESS)
}
