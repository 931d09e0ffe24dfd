"""weft.trtllm beside the names and signatures of TensorRT-LLM's interface, as they were written down: no TensorRT-LLM is here, and what stands in its place computes nothing."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from needs import needs

needs("torch")

import torch  # noqa: E402

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from test_doors import RECORDS, write  # noqa: E402

INTERFACE = "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"
TOKENS, BLOCKS = 4, 32


@pytest.fixture
def trtllm(tmp_path, monkeypatch):
    """The module, over an interface made from what was written down."""
    root = tmp_path / "interface"
    write(RECORDS["trtllm"], root)
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "tensorrt_llm" or name == "weft.trtllm"}
    monkeypatch.syspath_prepend(str(root))
    import weft.trtllm

    yield weft.trtllm
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm" or name == "weft.trtllm"]:
        del sys.modules[name]
    sys.modules.update(kept)


class Stream:
    def synchronize(self):
        pass


# What the engine does not tell, and blocks depend on.
TOLD = {"revision": "1", "quantisation": "none", "scales": "none"}


class Engine:
    """Calls both halves in the order in which TensorRT-LLM does, and computes blocks by a rule that knows the token and its place."""

    def __init__(self, module, **store):
        scheduler, worker = module.connector(staging_blocks=8, space=TOLD, **store)
        options = SimpleNamespace(model="tiny", kv_cache_config=SimpleNamespace(tokens_per_block=TOKENS, dtype="auto"))
        self.scheduler, self.worker = scheduler(options), worker(options)
        self.cache = torch.zeros(BLOCKS, 2, TOKENS, 8, dtype=torch.float16)
        self.worker.register_kv_caches(self.cache)
        self.free, self.number = list(range(BLOCKS)), 0

    def close(self):
        self.worker._shared.store.close()
        self.worker._shared.agent.close()

    def prompt(self, tokens, **more):
        """How many tokens did not have to be computed, and what the cache then holds of the prompt."""
        self.number += 1
        request = SimpleNamespace(request_id=self.number, get_tokens=lambda beam: tokens, **more)
        matched, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
        assert not is_async and matched % TOKENS == 0 and matched < len(tokens)
        blocks = [self.free.pop() for _ in range(-(-len(tokens) // TOKENS))]
        self.scheduler.update_state_after_alloc(request, blocks)
        # What is loaded is not in the position that the first step is told of.
        step = SimpleNamespace(
            request_id=self.number, new_tokens=list(tokens), new_block_ids=blocks, computed_position=0, num_scheduled_tokens=len(tokens) - matched,
            block_hashes=[], priorities=None, cache_salt=more.get("cache_salt"), new_block_ids_by_layer_group=[],
        )  # fmt: skip
        self.worker._metadata = self.scheduler.build_connector_meta(SimpleNamespace(new_requests=[step], cached_requests=[], attention_dp_rank=None))
        self.worker.get_connector_meta = lambda: self.worker._metadata
        self.worker.start_load_kv(Stream())
        for at in range(matched, len(tokens)):
            self.cache[blocks[at // TOKENS], :, at % TOKENS] = sum(tokens[: at + 1]) % 997
        self.worker.wait_for_save(Stream())
        assert self.worker.get_finished([], []) == ([], [])
        held = torch.stack([self.cache[blocks[at // TOKENS], :, at % TOKENS] for at in range(len(tokens))]).clone()
        assert self.scheduler.request_finished(request, blocks) is False
        self.free += blocks
        self.cache[blocks] = -1
        assert len(self.worker._shared.free) == 8
        return matched, held


@pytest.fixture
def store(tmp_path):
    return {"memory": 1 << 20, "directory": tmp_path / "kv", "capacity": 64 << 20, "extent": 32 << 20}


PROMPT = [(7 * at) % 301 + 1 for at in range(22)]


def test_every_method_takes_what_the_interface_says(trtllm):
    scheduler, worker = trtllm.connector(memory=1 << 20)
    for ours, name in ((scheduler, "KvCacheConnectorScheduler"), (worker, "KvCacheConnectorWorker")):
        assert not ours.__abstractmethods__
        said = json.loads((HERE.parent / "door" / "contracts" / "trtllm.json").read_text())[f"{INTERFACE}:{name}"]
        for method, signature in said.items():
            if signature.startswith("abstract "):
                wanted = [part.split(":")[0].strip() for part in signature[len("abstract (") :].split(")")[0].split(", ") if ":" in part or part == "self"]
                code = getattr(ours, method).__code__
                assert list(code.co_varnames[: code.co_argcount]) == wanted, method


def test_what_was_computed_once_is_found_and_is_the_same_also_after_a_restart(trtllm, store):
    engine = Engine(trtllm, **store)
    assert engine.prompt(PROMPT)[0] == 0
    computed = engine.prompt(PROMPT)[1]
    engine.close()
    engine = Engine(trtllm, **store)
    matched, held = engine.prompt(PROMPT)
    # Five blocks are full, and the last token but one ends the fifth.
    assert matched == 20 and torch.equal(held, computed)
    # The beginning of another one.
    matched, held = engine.prompt(PROMPT[:9] + [500] * 8)
    assert matched == 8 and torch.equal(held[:8], computed[:8])
    engine.close()


def test_what_else_the_cache_depends_on_is_told_apart(trtllm, store):
    engine = Engine(trtllm, **store)
    # What an adapter has computed is nobody's but its own.
    assert engine.prompt(PROMPT, lora_task_id=3)[0] == 0
    assert engine.prompt(PROMPT)[0] == 0
    assert engine.prompt(PROMPT, cache_salt="somebody else")[0] == 0
    assert engine.prompt(PROMPT, cache_salt="somebody else")[0] == 20
    assert engine.prompt(PROMPT, lora_task_id=3)[0] == 0
    assert engine.prompt(PROMPT)[0] == 20
    engine.close()


def test_more_than_the_staging_memory_holds_is_computed(trtllm, store):
    engine = Engine(trtllm, **store)
    long = list(range(1, 81))
    engine.prompt(long)
    matched, held = engine.prompt(long)
    assert matched == 32
    assert torch.equal(held[:, 0, 0], torch.tensor([sum(long[: at + 1]) % 997 for at in range(80)], dtype=torch.float16))
    engine.close()


def test_several_ranks_are_refused(trtllm):
    scheduler, _ = trtllm.connector(memory=1 << 20)
    with pytest.raises(ValueError, match="one rank, and tensor_parallel_size is 2"):
        scheduler(SimpleNamespace(tensor_parallel_size=2))


@pytest.mark.parametrize("missing", TOLD)
def test_what_blocks_depend_on_has_to_be_told(trtllm, missing):
    scheduler, _ = trtllm.connector(space={name: told for name, told in TOLD.items() if name != missing})
    with pytest.raises(ValueError, match=missing):
        scheduler(SimpleNamespace(model="tiny", kv_cache_config=SimpleNamespace(tokens_per_block=TOKENS, dtype="auto")))
