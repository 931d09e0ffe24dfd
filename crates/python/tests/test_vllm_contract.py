"""The interface that weft.vllm was written for, beside the one that is installed. Without vLLM there is nothing to compare (what was written down is looked at by `test_doors.py`)."""

import sys
from pathlib import Path

from needs import needs

needs("vllm")
sys.path.insert(0, str(Path(__file__).parent.parent / "vllm_tests"))


def test_the_interface_is_the_one_that_we_were_written_for():
    import contract

    verdict, moved = contract.check()
    assert not moved, "\n".join([verdict, *moved])
