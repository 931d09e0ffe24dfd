"""Hides AMX from torch, oneDNN and vLLM, for virtual machines that announce it and lose its registers: put this directory on PYTHONPATH."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


class _WithoutAmx(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def and_hide(module: ModuleType) -> None:
            execute(module)
            module._is_amx_tile_supported = lambda: False  # type: ignore[attr-defined]

        spec.loader.exec_module = and_hide  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _WithoutAmx())
