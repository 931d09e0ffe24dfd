//! Programs in C and C++ that are compiled against the header and run against the library, as they are and under what finds mistakes of memory.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};

use tempfile::TempDir;
use weft_testing::{Need, has};

const ROOM: &str = env!("CARGO_MANIFEST_DIR");
const STRICTLY: [&str; 4] = ["-Wall", "-Wextra", "-Werror", "-g"];

/// Whoever has built everything, and this library with it, says so.
const ALL_BUILT: &str = "C_LIBRARY_IS_BUILT";

/// The directory with the library. Cargo builds what others link for a test, and a library for C is not among that.
fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let test = std::env::current_exe().unwrap();
        let directory = test.ancestors().nth(2).unwrap().to_owned();
        if std::env::var_os(ALL_BUILT).is_some() {
            assert!(directory.join("libweft.so").exists() && directory.join("libweft.a").exists());
            return directory;
        }
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "-p", "weft-c", "--target-dir"]);
        cargo.arg(directory.parent().unwrap()).current_dir(ROOM);
        if directory.ends_with("release") {
            cargo.arg("--release");
        }
        // What cargo told this test of its package is not for packages that look at these variables when they are built, and build again if they differ.
        let of_package =
            |name: &str| name == "OUT_DIR" || name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(of_package)) {
            cargo.env_remove(name);
        }
        succeed(&mut cargo);
        assert!(directory.join("libweft.so").exists() && directory.join("libweft.a").exists());
        directory
    })
}

/// A directory with programs.
struct Programs {
    directory: TempDir,
}

/// How a program gets at the library.
#[derive(Clone, Copy, PartialEq)]
enum Linked {
    Shared,
    Static,
}

impl Programs {
    fn new() -> Programs {
        let directory = tempfile::tempdir().unwrap();
        Programs { directory }
    }

    /// Compiles a source of the room, or of the examples.
    fn compile(&self, source: &str, flags: &[&str]) -> PathBuf {
        self.link(source, flags, Linked::Shared)
    }

    fn link(&self, source: &str, flags: &[&str], linked: Linked) -> PathBuf {
        let source = Path::new(ROOM).join(source);
        let (compiler, standard) = match source.extension().is_some_and(|extension| extension == "cpp") {
            true => ("c++", "-std=c++17"),
            false => ("cc", "-std=gnu11"),
        };
        let program = self.directory.path().join(source.file_stem().unwrap());
        let mut command = Command::new(compiler);
        command.arg(standard).args(STRICTLY).args(flags);
        command.arg("-I").arg(Path::new(ROOM).join("include"));
        command.arg("-o").arg(&program).arg(&source);
        match linked {
            Linked::Shared => {
                command.arg("-L").arg(built()).args(["-lweft", "-lpthread"]);
                command.arg(format!("-Wl,-rpath,{}", built().display()));
            }
            Linked::Static => {
                command.arg(built().join("libweft.a"));
                let pc = std::fs::read_to_string(Path::new(ROOM).join("weft.pc.in")).unwrap();
                let private = pc.lines().find_map(|line| line.strip_prefix("Libs.private:"));
                command.args(private.expect("what a static library needs").split_whitespace());
            }
        }
        succeed(&mut command);
        program
    }

    /// A new directory, for a rendezvous.
    fn place(&self) -> TempDir {
        tempfile::tempdir_in(self.directory.path()).unwrap()
    }
}

/// Runs a command, which must succeed, and gives what it said.
fn succeed(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let (said, complained) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{command:?}: {status}\n{said}\n{complained}");
    said.into_owned()
}

/// Runs a test program, whose last word is `done`.
fn done(command: &mut Command) -> String {
    let said = succeed(command);
    assert!(said.ends_with("done\n"), "{command:?} ended early: {said}");
    said
}

#[test]
fn exported_are_the_functions_of_the_header_and_nothing_else() {
    let listed = succeed(
        Command::new("nm")
            .args(["-D", "--defined-only"])
            .arg(built().join("libweft.so")),
    );
    let exported: BTreeSet<&str> = listed
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .collect();
    let header = std::fs::read_to_string(Path::new(ROOM).join("include/weft.h")).unwrap();
    let declared = header
        .lines()
        .filter(|line| line.starts_with(|first: char| first.is_ascii_lowercase()));
    let declared = declared.filter_map(|line| line.split_once('(')?.0.rsplit([' ', '*']).next());
    assert_eq!(exported, declared.collect());
    let named = succeed(Command::new("readelf").arg("-d").arg(built().join("libweft.so")));
    assert!(named.contains("soname: [libweft.so]"), "{named}");
}

#[test]
fn the_example_in_c_tells_what_it_should() {
    let programs = Programs::new();
    let example = "../../examples/c/transfer.c";
    for linked in [Linked::Shared, Linked::Static] {
        let said = succeed(&mut Command::new(programs.link(example, &[], linked)));
        assert_eq!(
            said,
            "read 49152 bytes over shared_memory: blocks 42, 17 and 7\nthe owner is told \"there you are\", and block 0 holds 99\n\
             after the owner's death: WEFT_ERROR_PEER_LOST\n"
        );
    }
}

#[test]
fn the_example_in_cpp_tells_what_it_should() {
    if !has(Need::Cpp) {
        return;
    }
    let programs = Programs::new();
    let said = succeed(&mut Command::new(
        programs.compile("../../examples/c/transfer.cpp", &[]),
    ));
    assert_eq!(
        said,
        "read 4194304 bytes over shared_memory; the last number is 1048575\n\
         the owner is told \"doubled\" by reader, and the middle is 1048576\n\
         a word was 12884901890, and then 12884901891\nafterwards: WEFT_ERROR_REFUSED\n"
    );
}

#[test]
fn arguments_that_cannot_be_right_never_crash() {
    let programs = Programs::new();
    done(&mut Command::new(programs.compile("tests/c/arguments.c", &[])));
}

#[test]
fn two_processes_move_bytes_sleep_cancel_and_learn_of_a_death() {
    let programs = Programs::new();
    done(&mut Command::new(programs.compile("tests/c/transfers.c", &[])));
}

#[test]
fn every_status_can_be_met() {
    let programs = Programs::new();
    let program = programs.compile("tests/c/errors.c", &[]);
    let said = done(Command::new(program).arg(programs.place().path()));
    let met: BTreeSet<&str> = said
        .split_whitespace()
        .filter(|word| word.starts_with("WEFT_ERROR_"))
        .collect();
    let header = std::fs::read_to_string(Path::new(ROOM).join("include/weft.h")).unwrap();
    let numbered = header
        .lines()
        .filter_map(|line| line.trim().split_once(" = -").map(|(name, _)| name));
    let mut numbered: BTreeSet<&str> = numbered.filter(|name| name.starts_with("WEFT_ERROR_")).collect();
    // A test of the room's own brings one about.
    assert!(numbered.remove("WEFT_ERROR_PANIC"));
    assert_eq!(met, numbered);
}

#[test]
fn a_forked_child_is_told_and_does_no_harm() {
    let programs = Programs::new();
    done(&mut Command::new(programs.compile("tests/c/fork.c", &[])));
}

#[test]
fn memory_of_a_gpu_goes_both_ways() {
    if !has(Need::Gpu) {
        return;
    }
    let programs = Programs::new();
    done(&mut Command::new(programs.compile("tests/c/gpu.c", &["-ldl"])));
}

/// So many ranks of a program, started as a launcher would. On one host jobs are told apart by their launcher, and this process is one.
fn launch(ranks: u32, rank: impl Fn() -> Command) {
    static ONE_JOB: Mutex<()> = Mutex::new(());
    let _alone = ONE_JOB.lock().unwrap_or_else(PoisonError::into_inner);
    let start = |number: u32| -> Child {
        let mut command = rank();
        let variables = [("RANK", number), ("WORLD_SIZE", ranks), ("LOCAL_WORLD_SIZE", ranks)];
        command.envs(variables.map(|(name, value)| (name, value.to_string())));
        command.env_remove("MASTER_ADDR").env_remove("MASTER_PORT");
        command.stdout(Stdio::piped()).spawn().unwrap()
    };
    let started: Vec<Child> = (0..ranks).map(start).collect();
    for child in started {
        let ended = child.wait_with_output().unwrap();
        assert!(ended.status.success() && ended.stdout.ends_with(b"done\n"), "{ended:?}");
    }
}

#[test]
fn three_ranks_do_every_collective() {
    let programs = Programs::new();
    let program = programs.compile("tests/c/collectives.c", &[]);
    launch(3, || Command::new(&program));
}

#[test]
fn the_address_sanitizer_finds_nothing() {
    if !has(Need::AddressSanitizer) {
        return;
    }
    let (programs, sanitized) = (Programs::new(), ["-fsanitize=address", "-fno-omit-frame-pointer"]);
    succeed(&mut Command::new(
        programs.compile("../../examples/c/transfer.c", &sanitized),
    ));
    // Not that of forks: a child that goes on after a fork of several threads may find locks of the sanitizer's own taken for ever. Valgrind runs it.
    for test in ["arguments", "transfers"] {
        done(&mut Command::new(
            programs.compile(&format!("tests/c/{test}.c"), &sanitized),
        ));
    }
    let errors = programs.compile("tests/c/errors.c", &sanitized);
    done(Command::new(errors).arg(programs.place().path()));
    let collectives = programs.compile("tests/c/collectives.c", &sanitized);
    launch(2, || Command::new(&collectives));
    // What holds for all of it is worth nothing if the sanitizer does not look.
    let mistaken = programs.compile("tests/c/mistaken.c", &sanitized);
    let found = Command::new(mistaken).output().unwrap();
    assert!(
        !found.status.success() && String::from_utf8_lossy(&found.stderr).contains("AddressSanitizer"),
        "{found:?}"
    );
}

#[test]
fn valgrind_finds_nothing() {
    if !has(Need::Valgrind) {
        return;
    }
    let programs = Programs::new();
    let valgrind = |program: PathBuf, leaks: bool| {
        let mut command = Command::new("valgrind");
        command.args(["--quiet", "--error-exitcode=99"]);
        command.arg(format!("--suppressions={ROOM}/tests/c/valgrind.supp"));
        if leaks {
            command.args([
                "--leak-check=full",
                "--show-leak-kinds=definite",
                "--errors-for-leak-kinds=definite",
            ]);
        }
        command.arg(program);
        command
    };
    succeed(&mut valgrind(
        programs.compile("../../examples/c/transfer.c", &[]),
        true,
    ));
    done(&mut valgrind(programs.compile("tests/c/arguments.c", &[]), true));
    // A child gives nothing back of what its parent has, and on purpose.
    done(&mut valgrind(programs.compile("tests/c/fork.c", &[]), false));
    let found = valgrind(programs.compile("tests/c/mistaken.c", &[]), true)
        .output()
        .unwrap();
    assert_eq!(found.status.code(), Some(99), "{found:?}");
}

/// Installs the library somewhere.
fn install() -> TempDir {
    let prefix = tempfile::tempdir().unwrap();
    let mut install = Command::new(Path::new(ROOM).join("install.sh"));
    succeed(install.arg(prefix.path()).arg(built()));
    prefix
}

#[test]
fn pkg_config_finds_what_was_installed() {
    if !has(Need::PkgConfig) {
        return;
    }
    let prefix = install();
    let ask = |what: &[&str]| {
        let mut asked = Command::new("pkg-config");
        asked
            .args(what)
            .arg("weft")
            .env("PKG_CONFIG_PATH", prefix.path().join("lib/pkgconfig"));
        succeed(&mut asked)
    };
    assert_eq!(ask(&["--modversion"]).trim(), env!("CARGO_PKG_VERSION"));
    let flags = ask(&["--cflags", "--libs"]);
    let program = prefix.path().join("program");
    let mut compile = Command::new("cc");
    compile
        .arg(Path::new(ROOM).join("tests/c/arguments.c"))
        .args(flags.split_whitespace());
    succeed(compile.arg("-o").arg(&program));
    done(Command::new(&program).env("LD_LIBRARY_PATH", prefix.path().join("lib")));
}

#[test]
fn cmake_finds_what_was_installed() {
    if !has(Need::Cmake) {
        return;
    }
    let prefix = install();
    let project = tempfile::tempdir().unwrap();
    let source = Path::new(ROOM).join("tests/c/arguments.c");
    let lists = format!(
        "cmake_minimum_required(VERSION 3.13)\nproject(uses_weft C)\nfind_package(weft {} REQUIRED)\n\
         foreach(way weft static)\n  add_executable(with_${{way}} {})\n  target_link_libraries(with_${{way}} weft::${{way}})\nendforeach()\n",
        env!("CARGO_PKG_VERSION"),
        source.display()
    );
    std::fs::write(project.path().join("CMakeLists.txt"), lists).unwrap();
    let mut configure = Command::new("cmake");
    configure.args(["-S", ".", "-B", "out"]).current_dir(project.path());
    succeed(configure.env("CMAKE_PREFIX_PATH", prefix.path()));
    succeed(
        Command::new("cmake")
            .args(["--build", "out"])
            .current_dir(project.path()),
    );
    for way in ["weft", "static"] {
        done(&mut Command::new(
            project.path().join("out").join(format!("with_{way}")),
        ));
    }
}
