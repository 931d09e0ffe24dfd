"""vLLM's own connector tests, unmodified, against our connector: `upstream.py VLLM_SOURCE [ARGUMENTS OF PYTEST…]`.

VLLM_SOURCE is a checkout, or the unpacked sdist, of the version that is installed; its tests need pytest and tblib. Nothing of it is changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
UNIT = "tests/v1/kv_connector/unit"

# The files in which tests that do not look into NIXL itself make a NixlConnector.
FILES = [
    "test_remote_prefill_lifecycle.py",
    "test_remote_decode_lifecycle.py",
    "test_invalid_blocks_correctness.py",
    "test_kv_load_failure_recovery.py",
    "test_error_propagation.py",
    "test_cache_pollution_prevention.py",
]

# Among them, these ask for vLLM's hybrid cache manager by name, which it does not use with a connector like ours.
LEFT_OUT = ["test_p_side_chunked_prefill_mamba", "test_async_load_reserves_blocks_for_promotion_margin", "test_async_load_does_not_double_reserve_mamba_spec_blocks"]  # fmt: skip

# The model that these tests name is on a hub. They need its shape, and nothing else.
OPT = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072,
    "num_attention_heads": 12, "max_position_embeddings": 2048, "word_embed_proj_dim": 768, "do_layer_norm_before": True, "dtype": "float16",
    "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip


def main() -> int:
    source, more = Path(sys.argv[1]).resolve(), sys.argv[2:]
    chosen = [argument for argument in more if argument.endswith(".py") or "::" in argument]
    files = [] if chosen else [f"{UNIT}/{name}" for name in FILES]
    files += [f"--deselect={UNIT}/{FILES[0]}::{name}" for name in LEFT_OUT]
    with tempfile.TemporaryDirectory() as scratch:
        cached = Path(scratch) / "hub/models--facebook--opt-125m"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs/main").write_text("0" * 40)
        snapshot = cached / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(OPT))
        path = [str(HERE), str(HERE / "no_amx"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "HF_HOME": scratch, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(path)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "upstream_plugin", *files, *more]
        return subprocess.run(command, cwd=source, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
