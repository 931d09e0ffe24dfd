"""torch's own tests of a distributed backend, unmodified, against ours.

    pip install torch numpy expecttest
    python crates/python/tests/torch_upstream.py [--ranks 2] [NAME ...]

They come with torch (`torch.testing._internal.distributed.distributed_test`). All that is done to them here is to name the backend: which one
to use, and that it does what DDP and subgroups need. Tests of what a CPU backend lacks skip themselves. Without names all of them run.
"""

from __future__ import annotations

import os
import sys
import tempfile
import unittest

# torch reads these when its tests are imported, in every process that they start.
os.environ.setdefault("BACKEND", "weft")
os.environ.setdefault("WORLD_SIZE", "2")
if "TEMP_DIR" not in os.environ:
    # One for all of them, which goes with the process that made it.
    scratch = tempfile.TemporaryDirectory(prefix="torch-upstream-")
    os.environ["TEMP_DIR"] = scratch.name

import torch.testing._internal.common_distributed as common

for feature in ("ddp", "subgroup"):
    common.DistTestCases.backend_feature[feature].add("weft")

import weft.torch  # noqa: E402, F401
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend  # noqa: E402


class Upstream(TestDistBackend, DistributedTest._DistTestBase):
    """Every test in processes of its own."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


def main() -> int:
    names = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    loader = unittest.defaultTestLoader
    names = names or list(loader.getTestCaseNames(Upstream))
    suite = unittest.TestSuite(Upstream(name) for name in names)
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    failed = len(result.failures) + len(result.errors)
    print(f"{result.testsRun - failed - len(result.skipped)} passed, {failed} failed, {len(result.skipped)} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    if "--ranks" in sys.argv:
        at = sys.argv.index("--ranks")
        os.environ["WORLD_SIZE"] = sys.argv[at + 1]
        del sys.argv[at : at + 2]
    sys.exit(main())
