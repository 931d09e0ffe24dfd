"""What is written down of the programs that Weft has doors into, held against programs made from what is written down: as they are, nothing differs; altered, each alteration is named.

None of them is installed here. Where one is, `cargo xtask door-test` compares it.
"""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "door"), str(HERE.parent / "vllm_tests")]

import contract as vllm_contract  # noqa: E402
import contracts  # noqa: E402
from interface import NOWHERE, Source, differences  # noqa: E402

RECORDS = {path.stem: json.loads(path.read_text()) for path in sorted(contracts.RECORDS.glob("*.json"))}
OF_VLLM = {path.stem: json.loads(path.read_text()) for path in sorted(vllm_contract.RECORDS.glob("*.json"))}


def write(record, root):
    """A program that offers just what is written down."""
    modules: dict[str, list[str]] = {}
    for name, said in record.items():
        if name == "version" or said == NOWHERE:
            continue
        if ": " in name:
            module, _, holder = name.partition(": ")
            # What it calls on an agent, in a function that is never called itself.
            modules.setdefault(module, []).append(f"def calls_{len(modules)}(self, agent):\n" + "".join(f"    {holder}.{call}()\n" for call in said))
            continue
        module, _, attribute = name.partition(":")
        modules.setdefault(module, []).append(written_class(attribute, said) if isinstance(said, dict) else written(attribute, said))
    for module, parts in modules.items():
        path = root.joinpath(*module.split("."))
        path.mkdir(parents=True, exist_ok=True)
        # What has values comes first: signatures name them.
        parts.sort(key=lambda part: "(Enum)" not in part)
        (path / "__init__.py").write_text("from __future__ import annotations\nfrom abc import *\nfrom typing import *\nfrom enum import Enum\n\n" + "\n".join(parts))
    return Source(root)


def written(name, said, indent=""):
    """A function, a field or a value by what was said of it."""
    found = re.fullmatch(r"(abstract )?(of the class |of no object )?(awaited )?(\(.*)", said, re.DOTALL)
    if found is None:
        return {"a field": f"{indent}{name}: Any\n", "a property": f"{indent}{name} = None\n"}.get(said, f"{indent}{name} = {said}\n")
    abstract, of, awaited, signature = found.groups()
    marks = [mark for mark, is_so in (("abstractmethod", abstract), ("classmethod", of == "of the class "), ("staticmethod", of == "of no object ")) if is_so]
    return "".join(f"{indent}@{mark}\n" for mark in reversed(marks)) + f"{indent}{'async ' if awaited else ''}def {name}{signature}:\n{indent}    pass\n"


def written_class(name, members):
    is_enum = members and all(re.match(r"['\d]|(enum\.)?auto\(", said) for said in members.values())
    lines = [f"class {name}({'Enum' if is_enum else 'ABC'}):\n"]
    set_by_constructor = [member for member in members if member.startswith("self.")]
    for member, said in members.items():
        if member not in set_by_constructor:
            text = written(member, said, "    ")
            if member == "__init__" and set_by_constructor:
                text += "".join(f"        {one} = None\n" for one in set_by_constructor)
            lines.append(text)
    if set_by_constructor and "__init__" not in members:
        lines.append("    def __init__(self):\n" + "".join(f"        {one} = None\n" for one in set_by_constructor))
    return "".join(lines) if len(lines) > 1 else lines[0] + "    pass\n"


def alter(root, old, new):
    """One alteration in one file."""
    for path in sorted(root.rglob("__init__.py")):
        text = path.read_text()
        if old in text:
            path.write_text(text.replace(old, new, 1))
            ast.parse(path.read_text())
            return
    raise AssertionError(f"nothing says {old!r}")


def test_every_door_is_written_down():
    assert set(RECORDS) == set(contracts.DOORS)
    assert sorted(OF_VLLM, key=lambda minor: int(minor.split(".")[1])) == ["0.30", "0.31", "0.32"]


@pytest.mark.parametrize("door", RECORDS)
def test_a_program_as_it_was_written_down_fits(door, tmp_path):
    verdict, moved = contracts.check(door, write(RECORDS[door], tmp_path), "as written")
    assert moved == [] and "0 differ" in verdict


# For each door: what is altered, and what is said of it.
ALTERED = {
    "sglang": [
        ("NIXL = 'nixl'", "NIXLS = 'nixl'", "TransferBackend.NIXL is gone"),
        ("def get_kv_class(transfer_backend: TransferBackend, ", "def get_kv_class(backend: str, ", "get_kv_class was (transfer_backend"),
        ("self.agent.make_prepped_xfer()", "self.agent.make_striped_xfer()", "make_striped_xfer, which weft.nixl does not have"),
        ("hook_type: HookType=HookType.AFTER, ", "", "HookRegistry.register was"),
    ],
    "dynamo": [
        ("'NixlConnector': NixlConnectorProtocol, ", "", "KV_CONNECTOR_PROTOCOLS was"),
        ("def decode_request_kv_transfer_params(self, prefill_response", "def decode_request_kv_transfer_params(self, answer", "decode_request_kv_transfer_params was"),
    ],
    "lmcache": [
        ("def query_read_status(self, task_id: int)", "def query_read_status(self, task_id: int, wait: bool)", "query_read_status was"),
        ("    def get_num_connected_clients(self)", "    @abstractmethod\n    def peers(self):\n        pass\n\n    def get_num_connected_clients(self)", "peers is new: abstract (self)"),
        ("self.nixl_agent.deserialize_descs()", "self.nixl_agent.read_descs()", "read_descs, which weft.nixl does not have"),
    ],
    "trtllm": [
        ("def get_finished(self, finished_gen_req_ids: List[int], ", "def get_finished(self, ", "KvCacheConnectorWorker.get_finished was"),
        ("    def wait_for_save(self", "    @abstractmethod\n    def save_all(self):\n        pass\n\n    def wait_for_save(self", "save_all is new: abstract (self)"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("door", "old", "new", "told"), [(door, *one) for door, all_of_it in ALTERED.items() for one in all_of_it])
def test_an_altered_program_is_told(door, old, new, told, tmp_path):
    source = write(RECORDS[door], tmp_path)
    assert contracts.check(door, source, "as written")[1] == []
    alter(tmp_path, old, new)
    verdict, moved = contracts.check(door, Source(tmp_path), "altered")
    assert any(told in line for line in moved), (verdict, moved)
    assert len(moved) == int(verdict.rpartition(", ")[2].split()[0])


def test_a_program_that_is_not_there_at_all_is_told(tmp_path):
    for door in RECORDS:
        assert contracts.check(door, Source(tmp_path), "none")[1]


@pytest.mark.parametrize("minor", OF_VLLM)
def test_each_vllm_as_it_was_written_down_fits_and_altered_does_not(minor, tmp_path):
    version = OF_VLLM[minor]["version"]
    assert vllm_contract.compare(write(OF_VLLM[minor], tmp_path), version)[1] == []
    alter(tmp_path, "def get_transfer_results(self, finished_req_ids", "def get_transfer_results(self, finished")
    moved = vllm_contract.compare(Source(tmp_path), version)[1]
    assert [line.partition(" was ")[0].rpartition(".")[2] for line in moved] == ["get_transfer_results"]


def test_a_vllm_of_another_minor_version_is_held_against_the_newest(tmp_path):
    verdict, moved = vllm_contract.compare(write(OF_VLLM["0.32"], tmp_path), "0.41.0")
    assert moved == [] and verdict.startswith("vLLM 0.41.0, written for 0.32.0: ")
    # What came between two versions is told by name.
    moved = vllm_contract.compare(write(OF_VLLM["0.31"], tmp_path / "older"), "0.32.0")[1]
    assert any("cache_hit_source" in line for line in moved)


# Tiers move in vLLM: what is altered, and what is said of it.
TIERS_ALTERED = [
    ("def lookup(self, key: OffloadKey, req_context", "def lookup(self, keys: OffloadKey, req_context", "SecondaryTierManager.lookup was abstract (self, key: "),
    ("    def has_pending_work(self)", "    @abstractmethod\n    def pause(self):\n        pass\n\n    def has_pending_work(self)", "SecondaryTierManager.pause is new: abstract (self)"),
    ("def evict(self, n: int, protected", "def evict(self, protected", "CachePolicy.evict was abstract (self, n: int, protected"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "told"), TIERS_ALTERED)
def test_a_vllm_whose_tiers_moved_is_told(old, new, told, tmp_path):
    write(OF_VLLM["0.32"], tmp_path)
    alter(tmp_path, old, new)
    moved = vllm_contract.compare(Source(tmp_path), "0.32.0")[1]
    assert len(moved) == 1 and told in moved[0], moved


def test_tiers_are_written_down_of_the_versions_that_ours_were_written_for(tmp_path):
    for minor, record in OF_VLLM.items():
        ours = set(vllm_contract.OURS.values()) & set(record)
        assert len(ours) == (3 if minor == "0.32" else 1), minor
        # Writing it down anew changes nothing, and an older one with tiers of its own gets none.
        source = write(OF_VLLM["0.32"] | record, tmp_path / minor)
        assert vllm_contract.to_record(source, record["version"]) == record


def test_what_moves_is_named():
    was = {"version": "1", "a:A": {"stays": "(self)", "goes": "(self)", "moves": "(self, a)"}, "a:f": "(x)"}
    now = {"version": "2", "a:A": {"stays": "(self)", "comes": "abstract (self)", "moves": "(self, b)"}, "a:f": NOWHERE}
    assert differences(was, now) == [
        "a:A.comes is new: abstract (self)",
        "a:A.goes is gone; it was (self)",
        "a:A.moves was (self, a), is (self, b)",
        "a:f was (x), now it is not there",
    ]
    assert differences(was, {**was, "version": "2"}) == []


def test_names_are_followed_through_imports_and_what_is_inherited_counts(tmp_path):
    for name, text in {
        "p/__init__.py": "from .inner import Kind as Shown, act\n",
        "p/inner/__init__.py": "from .deep import Base\ntry:\n    from .deep import act\nexcept ImportError:\n    act = None\nclass Kind(Base):\n    own: int\n",
        "p/inner/deep.py": "class Base:\n    def __init__(self, a):\n        self.a = a\n    async def go(self): ...\ndef act(x: 'int', *, y=1) -> 'str': ...\n",
        "p/loop.py": "from .loop import thing\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    source = Source(tmp_path)
    assert source.members("p:Shown") == {"__init__": "(self, a)", "self.a": "set by the constructor", "go": "awaited (self)", "own": "a field"}
    assert source.said("p:act") == "(x: int, *, y=1) -> str"
    assert source.said("p.loop:thing") == NOWHERE and source.members("p:act") is None and source.called_on("q", "self.agent") is None
