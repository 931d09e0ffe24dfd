//! Reports as a reader has them: opened in a browser, hovered over, clicked, zoomed.
//!
//! Where there is no Chromium the tests that need one say so and pass; `cargo xtask test` installs it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const PROBE: &str = include_str!("report_probe.js");
/// What a page may take, whatever it shows.
const PAGE_BYTES_MAX: u64 = 4 << 20;

fn weft(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weft"));
    command.env("NO_COLOR", "1").args(arguments);
    command.output().expect("the command runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A directory of its own for a test, gone afterwards.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("weft-report-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a scratch directory");
        Scratch(path)
    }
    fn file(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
    fn write(&self, name: &str, text: &str) -> String {
        let path = self.file(name);
        std::fs::write(&path, text).expect("a scratch file");
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Makes a report, and looks at its size.
fn report(scratch: &Scratch, arguments: &[&str]) -> PathBuf {
    let path = scratch.file("report.html");
    let mut all = vec!["sim"];
    all.extend(arguments);
    all.extend(["--report", &path]);
    let output = weft(&all);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(std::fs::metadata(&path).unwrap().len() < PAGE_BYTES_MAX);
    path.into()
}

fn chromium() -> Option<&'static str> {
    weft_testing::has(weft_testing::Need::Chromium)
        .then(weft_testing::chromium)
        .flatten()
}

fn browse(chromium: &str, scratch: &Scratch, more: &[&str], page: &Path) -> Output {
    let profile = format!("--user-data-dir={}", scratch.file("profile"));
    let mut command = Command::new("timeout");
    command.args([
        "180",
        chromium,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
    ]);
    command.args([
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
    ]);
    command.args(["--disable-sync", "--window-size=1280,1600", &profile]);
    command.args(more).arg(format!("file://{}", page.display()));
    command.output().expect("the browser starts")
}

/// Opens a report together with the probe, and gives the page as it then is.
fn probed(chromium: &str, scratch: &Scratch, page: &Path) -> String {
    let whole = std::fs::read_to_string(page).unwrap();
    let probed = scratch.write(
        "probed.html",
        &whole.replacen("</body>", &format!("<script>{PROBE}</script></body>"), 1),
    );
    let output = browse(
        chromium,
        scratch,
        &["--dump-dom", "--virtual-time-budget=3000"],
        Path::new(&probed),
    );
    let page = text(&output.stdout);
    assert!(page.contains("</html>"), "{}", text(&output.stderr));
    page
}

/// What the page says about itself in an attribute of its root.
fn said(page: &str, name: &str) -> String {
    let root = page
        .split_once("<html")
        .map_or("", |(_, rest)| rest.split('>').next().unwrap_or(""));
    let value = root.split_once(&format!("data-{name}=\"")).map(|(_, rest)| rest);
    value.and_then(|rest| rest.split('"').next()).unwrap_or("").to_owned()
}

fn all_is_well(page: &str) {
    assert_eq!(said(page, "error"), "");
    assert_eq!(said(page, "ready"), "true");
    let probe = said(page, "probe");
    assert!(!probe.is_empty() && !probe.contains("FAILED"), "{probe}");
}

#[test]
fn a_report_is_drawn_and_answers_its_reader() {
    let Some(chromium) = chromium() else { return };
    let scratch = Scratch::new("ring");
    let mut rows = String::from("op,bytes,ranks,time_us\n");
    for power in 12..26 {
        rows.push_str(&format!(
            "allreduce,{},32,{}\n",
            1u64 << power,
            150 + (1u64 << power) / 100_000
        ));
    }
    let measured = scratch.write("measured.csv", &rows);
    let page = report(&scratch, &["run", "ring", "--measured", &measured]);
    let drawn = probed(chromium, &scratch, &page);
    all_is_well(&drawn);
    // To the scale-up switch, to the leaf, and from every leaf to every spine; 62 steps of the 8 ranks that stand for all.
    let counts = ["edges", "slices", "pairs"].map(|name| said(&drawn, name));
    assert_eq!(
        counts,
        [(32 + 32 + 8 * 32).to_string(), (62 * 8).to_string(), "14".to_owned()]
    );
    let picture = scratch.file("report.png");
    browse(chromium, &scratch, &[&format!("--screenshot={picture}")], &page);
    let png = std::fs::read(picture).expect("a screenshot");
    assert!(png.starts_with(b"\x89PNG") && png.len() > 20_000, "{} bytes", png.len());
}

#[test]
fn hostile_names_do_nothing_in_a_browser() {
    let Some(chromium) = chromium() else { return };
    let scratch = Scratch::new("hostile");
    let hostile =
        "</script><script>document.documentElement.dataset.error='broken out'</script><img src=x onerror=alert(1)><b>";
    let scenario = format!(
        "name = {hostile:?}\nsummary = {hostile:?}\nfidelities = ['flow']\n[cluster.fabric.torus]\nsides = [4, 4]\n\
         wire = {{ bandwidth = '100 Gb/s', latency = '1 µs' }}\n[workload.collective]\ncollective = 'all-to-all'\nbytes = '1 MiB'\n"
    );
    let file = scratch.write("hostile.toml", &scenario);
    let measured = format!("op,bytes,ranks,time_us,case\nalltoall,1048576,16,900,{hostile}\n");
    let measured = scratch.write("measured.csv", &measured);
    let page = report(&scratch, &["run", &file, "--measured", &measured]);
    let drawn = probed(chromium, &scratch, &page);
    all_is_well(&drawn);
    assert_eq!(said(&drawn, "pairs"), "1");
}

#[test]
fn training_and_serving_are_drawn_too() {
    let Some(chromium) = chromium() else { return };
    let scratch = Scratch::new("training");
    let page = report(&scratch, &["run", "training"]);
    let drawn = probed(chromium, &scratch, &page);
    all_is_well(&drawn);
    assert!(said(&drawn, "slices").parse::<u32>().unwrap() > 1000);
    let small = include_str!("../../../scenarios/serving.toml").replace("count = 20000", "count = 200");
    let file = scratch.write("serving.toml", &small);
    let page = report(&scratch, &["serving", &file]);
    let drawn = probed(chromium, &scratch, &page);
    all_is_well(&drawn);
    assert!(said(&drawn, "edges").parse::<u32>().unwrap() > 60);
}

#[test]
fn predictions_stand_beside_what_others_measured() {
    let scratch = Scratch::new("validate");
    let path = scratch.file("report.html");
    let output = weft(&["validate", "--table", "nccl_tests_public", "--report", &path]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let Some(chromium) = chromium() else { return };
    let drawn = probed(chromium, &scratch, Path::new(&path));
    all_is_well(&drawn);
    assert!(said(&drawn, "pairs").parse::<u32>().unwrap() > 50);
}

#[test]
fn a_hundred_thousand_ranks_open_at_once() {
    let scratch = Scratch::new("large");
    let large = "name = 'large'\nfidelities = ['analytical', 'flow']\n[system]\nname = 'dgx-h100'\nnodes = 16384\ntiers = 3\nradix = 128\n\
                 [workload.collective]\ncollective = 'all-to-all'\nalgorithm = 'direct'\nbytes = '1 GiB'\n";
    let file = scratch.write("large.toml", large);
    let page = report(&scratch, &["run", &file]);
    assert!(std::fs::metadata(&page).unwrap().len() < 1 << 20);
    let Some(chromium) = chromium() else { return };
    all_is_well(&probed(chromium, &scratch, &page));
}

#[test]
fn the_same_scenario_gives_the_same_report() {
    let scratch = Scratch::new("same");
    let measured = scratch.write("measured.csv", "op,bytes,ranks,time_us\nallreduce,1048576,32,400\n");
    let small = include_str!("../../../scenarios/serving.toml").replace("count = 20000", "count = 200");
    let serving = scratch.write("serving.toml", &small);
    for arguments in [
        &["run", "ring", "--measured", &measured][..],
        &["run", "training"],
        &["run", "incast"],
        &["serving", &serving],
    ] {
        let first = std::fs::read(report(&scratch, arguments)).unwrap();
        let second = std::fs::read(report(&scratch, arguments)).unwrap();
        assert!(first == second, "{arguments:?}");
    }
    for form in [&["--json"][..], &["--csv"], &[]] {
        let mut arguments = vec!["sim", "run", "training"];
        arguments.extend(form);
        assert_eq!(weft(&arguments).stdout, weft(&arguments).stdout);
    }
    for form in [&["--json"][..], &[]] {
        let mut arguments = vec!["sim", "serving", &serving];
        arguments.extend(form);
        assert_eq!(weft(&arguments).stdout, weft(&arguments).stdout);
    }
}

#[test]
fn mistakes_in_measurements_are_told_with_line_and_field() {
    let scratch = Scratch::new("mistakes");
    let page = scratch.file("report.html");
    for (rows, complaint) in [
        (
            "op,bytes,ranks,time_us\nallreduce,1024,two,5\n",
            "line 2, at `ranks`: `two` is not a number",
        ),
        (
            "{\"op\":\"allreduce\",\"bytes\":1,\"ranks\":2}\n",
            "line 1, at `us_med`: there is none",
        ),
        ("{\"op\":\n", "line 1, column "),
    ] {
        let file = scratch.write("measured", rows);
        let output = weft(&["sim", "run", "ring", "--report", &page, "--measured", &file]);
        assert_eq!(output.status.code(), Some(2));
        let said = text(&output.stderr);
        assert!(said.contains(complaint), "{said}");
    }
    let alone = weft(&["sim", "run", "ring", "--measured", "x"]);
    assert_eq!(alone.status.code(), Some(2));
}
