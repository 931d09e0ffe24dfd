"""Options of weft.vllm, without an engine."""

from types import SimpleNamespace

import pytest

from weft.vllm._options import Options, refuse_devices, refuse_shared_tokens


def test_names_by_which_routers_find_an_engine():
    options = Options.parse({"mode": "push", "etcd": "http://e:2379", "prefix": "job", "url": "http://a:8100/", "role": "prefill"})
    assert options.agent_name("engine", 0, 2) == "vllm/4/push/prefill/0/2/http://a:8100"
    assert options.agent_settings() == {"listen": "127.0.0.1:0", "rendezvous": "etcd:http://e:2379", "rendezvous_job": "job"}
    assert Options.parse({}).agent_name("engine", 0, 2) == "vllm-engine-0"
    for wrong in ({"etcd": "http://e:2379"}, {"url": "http://a:1", "role": "both"}, {"mode": "shove"}, {"deadline": 0}, {"modes": "push"}, {"checksum": "wire"}):
        with pytest.raises(ValueError):
            Options.parse(wrong)
    with pytest.raises(ValueError, match="too long"):
        Options.parse({"url": "http://" + 80 * "a", "role": "plain"}).agent_name("engine", 0, 1)


def test_caches_on_a_device_are_refused():
    def cache(device):
        # As torch has it.
        return SimpleNamespace(device=torch_device(device))

    refuse_devices({"layer.0": cache("cpu"), "layer.1": cache("cpu")})
    with pytest.raises(ValueError, match="host memory, and layer.1 is on cuda:0"):
        refuse_devices({"layer.0": cache("cpu"), "layer.1": cache("cuda:0")})


def test_tokens_that_ranks_share_out_are_refused():
    refuse_shared_tokens(SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1))
    # Older engines have none of it.
    refuse_shared_tokens(SimpleNamespace())
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        with pytest.raises(ValueError, match=f"{name} is 2"):
            refuse_shared_tokens(SimpleNamespace(**{name: 2}))


class torch_device:
    def __init__(self, text):
        self.type, self.text = text.split(":")[0], text

    def __str__(self):
        return self.text
