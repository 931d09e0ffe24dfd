"""A plug-in of SGLang's for machines without a GPU: the decode side of a disaggregated engine registers host memory with CUDA, which is not there."""


def load() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name in ("_cuda_host_register", "_cuda_host_unregister"):
        HookRegistry.register(f"sglang.srt.mem_cache.pool_host.common.{name}", lambda *arguments, **more: None, HookType.REPLACE)
