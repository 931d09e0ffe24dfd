"""What `help` shows: the stub and the compiled part name the same arguments, and nothing is without a word."""

import ast
import inspect
from pathlib import Path

import pytest

import weft

STUB = ast.parse(Path(weft.__file__).with_name("_weft.pyi").read_text())
CLASSES = [node for node in STUB.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def declared(function: ast.FunctionDef) -> list[tuple[str, str, bool]]:
    """Name, kind and whether there is a default, of every argument but the object itself."""
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [False] * (len(plain) - len(arguments.defaults)) + [True] * len(arguments.defaults)
    found = [(argument.arg, "plain", default) for argument, default in zip(plain, defaults, strict=True)]
    found += [
        (argument.arg, "keyword", default is not None)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        found.append((arguments.kwarg.arg, "keywords", False))
    return [one for one in found if one[0] not in ("self", "cls")]


def shown(call: object) -> list[tuple[str, str, bool]]:
    kinds = {
        inspect.Parameter.POSITIONAL_OR_KEYWORD: "plain",
        inspect.Parameter.KEYWORD_ONLY: "keyword",
        inspect.Parameter.VAR_KEYWORD: "keywords",
    }
    parameters = inspect.signature(call).parameters.values()
    found = [(one.name, kinds.get(one.kind, str(one.kind)), one.default is not one.empty) for one in parameters]
    return [one for one in found if one[0] != "self"]


@pytest.mark.parametrize("node", CLASSES, ids=lambda node: node.name)
def test_help_shows_the_arguments_of_the_stub(node):
    kind = getattr(weft, node.name)
    assert kind.__doc__ and ast.get_docstring(node), node.name
    for member in node.body:
        if not isinstance(member, ast.FunctionDef) or member.name.startswith("_") and member.name != "__new__":
            continue
        is_property = any(isinstance(mark, ast.Name) and mark.id == "property" for mark in member.decorator_list)
        if member.name == "__new__":
            assert shown(kind) == declared(member), node.name
            continue
        attribute = getattr(kind, member.name)
        assert attribute.__doc__, f"{node.name}.{member.name} has no word"
        if not is_property:
            assert shown(attribute) == declared(member), f"{node.name}.{member.name}"


def test_every_public_name_of_the_compiled_part_is_in_the_stub():
    for node in CLASSES:
        kind = getattr(weft, node.name)
        public = {name for name in vars(kind) if not name.startswith("_")}
        told = {member.name for member in node.body if isinstance(member, ast.FunctionDef)}
        assert public <= told, node.name


def test_help_of_read():
    text = str(inspect.signature(weft.Peer.read))
    for name in ("local", "remote", "spans=None", "local_spans=None", "deadline=None", "checksum=None", "notify=None"):
        assert name in text
    assert "bytes" in weft.Peer.read.__doc__
