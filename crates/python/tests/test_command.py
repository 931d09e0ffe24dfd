"""The `weft` command that the package brings: the same as the Rust program, inside Python."""

import os
import pathlib
import signal
import subprocess
import sys
import sysconfig

import pytest

import weft

INSTALLED = [str(pathlib.Path(sysconfig.get_path("scripts")) / "weft")]
AS_MODULE = [sys.executable, "-m", "weft"]
LONG = 60


@pytest.fixture
def home(tmp_path):
    """The secret of the user lies under this directory, which is also where the command runs: not where its sources are."""
    return {"cwd": tmp_path, "env": os.environ | {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}}


def run(words, home):
    return subprocess.run(words, capture_output=True, text=True, timeout=LONG, **home)


@pytest.mark.parametrize("weft_command", [INSTALLED, AS_MODULE], ids=["installed", "module"])
def test_it_says_its_version_and_what_is_wrong(weft_command, home):
    told = run([*weft_command, "--version"], home)
    assert (told.returncode, told.stdout) == (0, f"weft {weft.__version__}\n")
    wrong = run([*weft_command, "no-such-verb"], home)
    assert wrong.returncode == 2 and "no-such-verb" in wrong.stderr and "Traceback" not in wrong.stderr
    nobody = run([*weft_command, "copy", "weft://127.0.0.1:1/a", "a"], home)
    assert nobody.returncode not in (0, 2) and "Traceback" not in nobody.stderr


def test_verbs_that_start_more_processes_do_so(home):
    # A directory of the name of the package, where the command runs, is not taken for the package.
    (home["cwd"] / "weft").mkdir()
    (home["cwd"] / "weft" / "__init__.py").write_text("raise SystemExit('the wrong package')")
    bench = [*INSTALLED, "bench", "collective", "--ranks", "2", "--op", "all-reduce", "--sizes", "1KiB", "--json"]
    told = run(bench, home)
    assert told.returncode == 0, told.stderr
    assert '"op":"allreduce"' in told.stdout


def test_ctrl_c_ends_it_at_once(home):
    (home["cwd"] / "file").write_text("something")
    serve = subprocess.Popen(
        [*INSTALLED, "serve", "--listen", "127.0.0.1:0", "file"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # As from a terminal, where nothing has told the shell to ignore it.
        restore_signals=True,
        **home,
    )
    try:
        assert serve.stdout.readline(), "it says where it serves"
        serve.send_signal(signal.SIGINT)
        assert serve.wait(timeout=LONG) in (-signal.SIGINT, 0, 130)
        assert "Traceback" not in serve.stdout.read()
    finally:
        serve.kill()
        serve.wait()


@pytest.mark.parametrize("weft_command", [INSTALLED, AS_MODULE], ids=["installed", "module"])
def test_a_reader_that_has_seen_enough_is_no_fault(weft_command, home):
    unread, pipe = os.pipe()
    os.close(unread)
    with open(pipe, "wb") as pipe:
        words = [*weft_command, "explain", "all-reduce", "--ranks", "16"]
        told = subprocess.run(words, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=LONG, **home)
    assert (told.returncode, told.stderr) == (141, "")
