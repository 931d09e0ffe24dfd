//! The plug-in, driven by a program in C++ as NIXL drives it. What is laid out by hand here is what that compiler lays out.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use weft_testing::{Need, has};

const ROOM: &str = env!("CARGO_MANIFEST_DIR");

/// The plug-in, which cargo has built beside the library that this test could link.
fn plugin() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let directory = test.ancestors().nth(1).unwrap();
    let plugin = directory.join("libweft_nixl.so");
    assert!(plugin.exists(), "{} is not there", plugin.display());
    plugin
}

fn compile(directory: &Path, flags: &[&str]) -> PathBuf {
    let program = directory.join("program");
    let mut compiler = Command::new("c++");
    compiler
        .args(["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror"])
        .args(flags);
    compiler
        .arg("-o")
        .arg(&program)
        .arg(Path::new(ROOM).join("tests/program.cpp"))
        .arg("-ldl");
    let Output { status, stderr, .. } = compiler.output().unwrap();
    assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    program
}

/// With a secret of its own, which two processes share.
fn run(program: &Path, directory: &Path) -> Output {
    let secret = directory.join("secret");
    Command::new(program)
        .arg(plugin())
        .env("WEFT_SECRET_FILE", secret)
        .output()
        .unwrap()
}

fn prepare(directory: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let secret = directory.join("secret");
    std::fs::write(&secret, "only for this test, and long enough to be one").unwrap();
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
}

#[test]
fn a_program_in_cpp_finds_everything_as_nixl_would() {
    if !has(Need::Cpp) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    prepare(directory.path());
    let ended = run(&compile(directory.path(), &[]), directory.path());
    let complaints = String::from_utf8_lossy(&ended.stderr);
    assert!(
        ended.status.success() && ended.stdout.ends_with(b"done\n"),
        "{}\n{complaints}",
        ended.status
    );
    // Errors are told, with what was wrong.
    for told in [
        "preparing a transfer: 64 bytes at",
        "are not within the 1048576 registered at",
        "nothing is known of agent \"nobody\"",
        "this is no registration of a Weft back end of this version",
        "did you mean",
        "UCX, which is Weft here: passing over the parameter num_threads=2",
    ] {
        assert!(complaints.contains(told), "{told:?} is not in:\n{complaints}");
    }
}

#[test]
fn a_program_for_another_interface_fails() {
    if !has(Need::Cpp) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    prepare(directory.path());
    let ended = run(&compile(directory.path(), &["-DINSERTED"]), directory.path());
    assert!(!ended.status.success(), "{ended:?}");
}

#[test]
fn strings_vectors_and_maps_are_sound_under_the_address_sanitizer() {
    if !has(Need::Cpp) || !has(Need::AddressSanitizer) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    prepare(directory.path());
    let program = compile(directory.path(), &["-fsanitize=address", "-fno-omit-frame-pointer"]);
    let ended = run(&program, directory.path());
    let complaints = String::from_utf8_lossy(&ended.stderr);
    assert!(
        ended.status.success() && !complaints.contains("AddressSanitizer"),
        "{}\n{complaints}",
        ended.status
    );
}
