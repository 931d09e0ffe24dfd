"""Stands where SGLang imports its kernels from: the wheel of those is for CUDA alone, and does not load without its driver. SGLang's engine for processors, with
torch's attention, calls none of them; whoever calls one after all is told."""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

__version__ = "0.4.10"
__path__: list[str] = []


class _Kernel:
    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> "_Kernel":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self.__name__}.{name}")

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} is a kernel for CUDA, and not here")


def __getattr__(name: str) -> _Kernel:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Kernel(name)


class _Below(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Whatever is imported from below this module."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        below = fullname.startswith(__name__ + ".")
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if below else None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = __getattr__  # type: ignore[method-assign]


sys.meta_path.append(_Below())
