//! `weft nixl`, with plug-ins that a compiler has made from NIXL's interface in the place of NIXL's own.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use weft_testing::{Need, has};

fn weft(arguments: &[&str], home: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weft"));
    command
        .arg("nixl")
        .args(arguments)
        .env("HOME", home)
        .env_remove("XDG_CACHE_HOME");
    command.output().unwrap()
}

/// Something in the place of NIXL's plug-ins.
fn theirs(directory: &Path, flags: &[&str]) -> PathBuf {
    // As pip lays it out: libraries beside the plug-ins, and others in a directory beside that.
    let plugins = directory.join("site/.nixl.libs/plugins");
    fs::create_dir_all(&plugins).unwrap();
    fs::create_dir_all(directory.join("site/nixl.libs")).unwrap();
    fs::write(directory.join("site/.nixl.libs/libnixl.so"), "").unwrap();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../nixl/tests/other.cpp");
    let mut compiler = Command::new("c++");
    compiler
        .args(["-std=c++20", "-shared", "-fPIC", "-o"])
        .arg(plugins.join("libplugin_UCX.so"));
    assert!(compiler.args(flags).arg(source).status().unwrap().success());
    plugins
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A shared object to be linked; which one is all the same here.
fn library(directory: &Path) -> String {
    let path = directory.join("weft.so");
    fs::write(&path, "a plug-in").unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_directory_is_made_with_weft_beside_the_others_and_what_is_printed_is_for_a_shell() {
    if !has(Need::Cpp) {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let (plugins, library) = (theirs(home.path(), &[]), library(home.path()));
    let plugins = plugins.to_str().unwrap();
    let told = weft(&["--plugins", plugins, "--library", &library], home.path());
    assert!(told.status.success(), "{}", text(&told.stderr));
    let script = format!("{}\nprintf %s \"$NIXL_PLUGIN_DIR\"", text(&told.stdout));
    let set = Command::new("sh").args(["-c", &script]).output().unwrap();
    let made = PathBuf::from(text(&set.stdout));
    assert!(
        made.starts_with(home.path().join(".cache/weft/nixl")),
        "{}",
        made.display()
    );
    assert_eq!(
        fs::read_link(made.join("libplugin_WEFT.so")).unwrap(),
        Path::new(&library)
    );
    assert!(
        fs::read_link(made.join("libplugin_UCX.so"))
            .unwrap()
            .starts_with(plugins)
    );
    // What a plug-in looks for by the way from where it is.
    assert!(made.join("../libnixl.so").exists() && made.join("../../nixl.libs").is_dir());

    // Where others are wired in, Weft stands in their place, in another directory.
    let told = weft(
        &[
            "--plugins",
            plugins,
            "--library",
            &library,
            "--as",
            "ucx",
            "--as",
            "libfabric",
        ],
        home.path(),
    );
    let out = text(&told.stdout);
    let line = out.lines().find(|line| line.starts_with("export ")).unwrap();
    let hidden = PathBuf::from(line.split('\'').nth(1).unwrap());
    assert_ne!(hidden, made);
    for name in ["UCX", "LIBFABRIC", "WEFT"] {
        assert_eq!(
            fs::read_link(hidden.join(format!("libplugin_{name}.so"))).unwrap(),
            Path::new(&library)
        );
    }
    assert!(out.contains("UCX is Weft there"), "{out}");

    // Once more it changes nothing, and what is no more is gone.
    std::os::unix::fs::symlink("/nowhere", made.join("libplugin_OLD.so")).unwrap();
    fs::write(made.join("kept"), "").unwrap();
    let again = weft(&["--plugins", plugins, "--library", &library], home.path());
    assert_eq!(
        text(&again.stdout).lines().nth(1),
        text(script.as_bytes()).lines().nth(1)
    );
    assert!(!made.join("libplugin_OLD.so").is_symlink() && made.join("kept").exists());
}

#[test]
fn a_nixl_with_another_interface_is_refused_and_told() {
    if !has(Need::Cpp) {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let (plugins, library) = (theirs(home.path(), &["-DINSERTED"]), library(home.path()));
    let told = weft(
        &["--plugins", plugins.to_str().unwrap(), "--library", &library],
        home.path(),
    );
    assert_eq!(told.status.code(), Some(1));
    let said = text(&told.stderr);
    assert!(
        said.contains("another interface") && said.contains("pauseXfer") && said.contains("checkXfer"),
        "{said}"
    );
    assert!(told.stdout.is_empty() && !home.path().join(".cache").exists());
}

#[test]
fn where_there_is_no_nixl_or_nothing_to_link_it_is_said() {
    let home = tempfile::tempdir().unwrap();
    let library = library(home.path());
    // A Python that has none.
    let python = home.path().join("python");
    fs::write(
        &python,
        "#!/bin/sh\necho 'WEFT {\"missing\": \"No module named nixl\"}'\n",
    )
    .unwrap();
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
    let python = python.to_str().unwrap();
    let told = weft(&["--python", python, "--library", &library], home.path());
    assert_eq!(told.status.code(), Some(1));
    let said = text(&told.stderr);
    assert!(
        said.contains("NIXL is not installed for") && said.contains("pip install nixl"),
        "{said}"
    );

    let told = weft(&["--python", "/no/such/python", "--library", &library], home.path());
    assert!(
        told.status.code() == Some(2) && text(&told.stderr).contains("cannot be started"),
        "{told:?}"
    );
    let told = weft(&["--library", "/no/such/file"], home.path());
    assert!(
        told.status.code() == Some(2) && text(&told.stderr).contains("is not a file"),
        "{told:?}"
    );
    let empty = home.path().to_str().unwrap();
    let told = weft(&["--plugins", empty, "--library", &library], home.path());
    assert!(
        told.status.code() == Some(1) && text(&told.stderr).contains("no plug-in in"),
        "{told:?}"
    );
}

#[test]
fn what_is_no_link_is_left_alone() {
    if !has(Need::Cpp) {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let (plugins, library) = (theirs(home.path(), &[]), library(home.path()));
    let plugins = plugins.to_str().unwrap();
    let to = home.path().join("to");
    let make = || {
        weft(
            &[
                "--plugins",
                plugins,
                "--library",
                &library,
                "--dir",
                to.to_str().unwrap(),
            ],
            home.path(),
        )
    };
    assert!(make().status.success());
    let file = to.join(".nixl.libs/plugins/libplugin_UCX.so");
    fs::remove_file(&file).unwrap();
    fs::write(&file, "somebody's own").unwrap();
    let told = make();
    assert!(
        told.status.code() == Some(2) && text(&told.stderr).contains("stays as it is"),
        "{told:?}"
    );
    assert_eq!(fs::read(&file).unwrap(), b"somebody's own");
}
