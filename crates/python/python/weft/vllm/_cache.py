"""What a worker holds, described so that another worker can name any byte of it."""

from __future__ import annotations

from typing import Any

import torch
from vllm import __version__
from vllm.platforms import current_platform

import weft
from weft.hand_off import Layer
from weft.routed import VERSION


def meaning(config: Any, cache: torch.Tensor) -> dict[str, str]:
    """What must be equal at both ends for the bytes to mean the same."""
    model = config.model_config
    words = {
        "version": VERSION,
        "vllm": __version__,
        "model": model.model,
        "dtype": model.dtype,
        "cache_dtype": cache.dtype,
        "head_bytes": cache.shape[3] * cache.element_size(),
        "kv_heads": model.get_total_num_kv_heads(),
        "layers": model.get_total_num_hidden_layers(),
        "packing": f"cpu, {cache.shape[2]} tokens together" if current_platform.is_cpu() else "tokens",
    }
    return {name: str(value) for name, value in words.items()}


def layer(config: Any, name: str, cache: torch.Tensor, memory: int) -> Layer:
    """Where the blocks of a layer lie in a memory of the worker."""
    blocks, heads, tokens, elements = cache.shape
    size = cache.element_size()
    block, head, token, element = (size * stride for stride in cache.stride())
    if element != size:
        raise ValueError("weft.vllm moves caches in which the elements of a token touch")
    # The kernels for CPUs pack the tokens of a block, so that a block of a head is the least that can be moved.
    granule = tokens if current_platform.is_cpu() else 1
    unit = granule * elements * size
    # Ranks share the heads out, or where there are more ranks than heads, several have the same.
    model, ranks = config.model_config, config.parallel_config.tensor_parallel_size
    rank, total = config.parallel_config.rank % ranks, model.get_total_num_kv_heads()
    first = 0 if model.use_mla or heads >= total else rank * heads if ranks <= total else rank * total // ranks
    pages = weft.Pages(
        blocks=blocks, tokens=tokens // granule, heads=(first, first + heads), parts=1, unit_bytes=unit,
        base=cache.data_ptr() - cache.untyped_storage().data_ptr(),
        part_stride=0, block_stride=block, token_stride=token if granule == 1 else unit, head_stride=head,
    )  # fmt: skip
    return Layer(name, pages, memory, granule)


def share(agent: weft.Agent, config: Any, caches: dict[str, torch.Tensor]) -> dict[int, weft.Memory]:
    """The memories that caches lie in, by the address of their storage.

    Those in ordinary memory are moved to where others on this host can map them, which is much faster than having the kernel copy. They hold nothing yet, and vLLM
    sees the same tensors.
    """
    computed_on = config.compilation_config.static_forward_context
    memories: dict[int, weft.Memory] = {}
    for address in {cache.untyped_storage().data_ptr(): None for cache in caches.values()}:
        together = {name: cache for name, cache in caches.items() if cache.untyped_storage().data_ptr() == address}
        first = next(iter(together.values()))
        # A layer that computes on another tensor of the same storage would be left behind.
        if any(getattr(computed_on.get(name), "kv_cache", None) is not cache for name, cache in together.items()):
            memories[address] = agent.register(torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage()))
            continue
        memory = agent.allocate(first.untyped_storage().nbytes())
        # Now, and not while the first prompts are computed or fetched, the kernel finds pages for it.
        storage = torch.frombuffer(memoryview(memory).cast("B"), dtype=torch.uint8).zero_().untyped_storage()
        with torch.inference_mode():
            for cache in together.values():
                cache.set_(storage, cache.storage_offset(), cache.size(), cache.stride())
        memories[storage.data_ptr()] = memory
    return memories
