"""weft.sglang_transfer beside the names that it takes for granted of SGLang, as they were written down: no SGLang is here."""

import functools
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_doors import RECORDS, write  # noqa: E402

OURS = ("sglang", "nixl")


@pytest.fixture
def interface(tmp_path, monkeypatch):
    """What `import sglang` and `import nixl` give is of this test alone."""
    write(RECORDS["sglang"], tmp_path)
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in OURS}
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("SGLANG_DISAGGREGATION_NIXL_BACKEND", raising=False)
    yield tmp_path
    os.environ.pop("SGLANG_DISAGGREGATION_NIXL_BACKEND", None)
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]
    sys.modules.update(kept)


def apply(hook, kind):
    """As SGLang does with a hook around an inherited method."""
    original = kind._missing_
    kind._missing_ = functools.wraps(original)(lambda *arguments: hook(original, *arguments))


def registered(monkeypatch):
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = {}
    monkeypatch.setattr(HookRegistry, "register", classmethod(lambda cls, target, hook, hook_type: hooks.update({target: (hook, hook_type)})))
    from weft import sglang_transfer

    sglang_transfer.register()
    ((target, (hook, hook_type)),) = hooks.items()
    assert target == "sglang.srt.disaggregation.utils.TransferBackend._missing_" and hook_type is HookType.AROUND
    return hook


def test_the_name_is_nixls_back_end_with_weft_in_its_place(interface, monkeypatch):
    hook = registered(monkeypatch)
    from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES
    from sglang.srt.disaggregation.utils import TransferBackend

    assert DISAGG_TRANSFER_BACKEND_CHOICES.count("weft") == 1
    with pytest.raises(ValueError):
        TransferBackend("weft")
    apply(hook, TransferBackend)
    # Nothing is put in NIXL's place until somebody asks for Weft.
    assert "nixl" not in sys.modules and TransferBackend("nixl") is TransferBackend.NIXL and "nixl" not in sys.modules
    with pytest.raises(ValueError):
        TransferBackend("mooncakes")
    assert TransferBackend("weft") is TransferBackend.NIXL
    import nixl._api

    import weft.nixl

    assert nixl._api.nixl_agent is weft.nixl.nixl_agent and os.environ["SGLANG_DISAGGREGATION_NIXL_BACKEND"] == "WEFT"
    assert "weft" not in [member.value for member in TransferBackend]
    # A second process's worth of registration in one does no harm.
    registered(monkeypatch)
    assert DISAGG_TRANSFER_BACKEND_CHOICES.count("weft") == 1


def test_what_a_user_has_said_of_the_back_end_stays(interface, monkeypatch):
    hook = registered(monkeypatch)
    from sglang.srt.disaggregation.utils import TransferBackend

    monkeypatch.setenv("SGLANG_DISAGGREGATION_NIXL_BACKEND", "UCX")
    apply(hook, TransferBackend)
    assert TransferBackend("weft") is TransferBackend.NIXL and os.environ["SGLANG_DISAGGREGATION_NIXL_BACKEND"] == "UCX"


def test_another_interface_is_refused_when_it_is_loaded(interface, monkeypatch):
    utils = next(interface.rglob("disaggregation/utils/__init__.py"))
    utils.write_text(utils.read_text().replace("NIXL = ", "NIXLS = "))
    with pytest.raises(ImportError, match="another interface for transfer backends"):
        registered(monkeypatch)
