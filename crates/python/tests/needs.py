"""What tests need beyond a plain machine: the same as the crate `weft-testing` does for those in Rust.

Nothing is left out in silence. What is missing is written down in the file that `WEFT_LEFT_OUT` names, and where `WEFT_REQUIRE` names what is
missing, as in `WEFT_REQUIRE=torch`, the test fails.
"""

import importlib.util
import os
import pathlib
import sys

import pytest

MISSING = {
    "torch": "torch is not installed: cargo xtask test --torch",
    "jax": "JAX is not installed: cargo xtask door-test jax",
    "yaml": "PyYAML is not installed: pip install pyyaml",
    "vllm": "vLLM is not installed: cargo xtask vllm-test",
    "sglang": "SGLang is not installed: cargo xtask door-test hicache",
}


def needs(package: str) -> None:
    """Goes on where the package is installed. At the top of a module it stands for all its tests."""
    if importlib.util.find_spec(package) is None:
        caller = sys._getframe(1)
        leave_out(package, caller.f_code.co_filename, MISSING[package])
        pytest.skip(f"{KNOWN}{MISSING[package]}", allow_module_level=caller.f_code.co_name == "<module>")


def leave_out(need: str, place: str, why: str) -> None:
    if need in [name.strip() for name in os.environ.get("WEFT_REQUIRE", "").split(",")]:
        pytest.fail(f"{need} is required, and missing: {why}", pytrace=False)
    if path := os.environ.get("WEFT_LEFT_OUT"):
        root = pathlib.Path(__file__).parents[3]
        # One write, so that tests of several processes do not come into each other's lines.
        with open(path, "ab", buffering=0) as file:
            file.write(f"{need}\t{os.path.relpath(place, root)}\t{why}\n".encode())


# How the reasons begin that have been written down already.
KNOWN = "left out: "


def on_skipped(place: str, reason: str) -> None:
    """Writes down what was skipped by other means."""
    if KNOWN not in reason:
        leave_out("other", place, reason)
