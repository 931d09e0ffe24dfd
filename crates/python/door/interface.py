"""What the source of a Python program offers, by names and signatures: read and never imported, so that a program is looked at without its gigabytes, without a GPU,
and from an unpacked wheel or a checkout as well as from where it is installed.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path

# What is said of something that is not there.
NOWHERE = "not there"
# How far an import is followed from module to module, and a class to what it is derived from.
STEPS_MAX = 12


@dataclass
class Source:
    """The directory that packages lie in, as `site-packages`, a checkout or an unpacked wheel."""

    root: Path
    _trees: dict[str, ast.Module | None] = field(default_factory=dict)

    @classmethod
    def installed(cls, package: str) -> Source | None:
        """Where a package is installed, without importing it."""
        found = importlib.util.find_spec(package)
        if found is None or not found.submodule_search_locations:
            return None
        return cls(Path(next(iter(found.submodule_search_locations))).parent)

    def tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            path = self.root.joinpath(*module.split("."))
            candidates = [path.with_suffix(".py"), path / "__init__.py"]
            text = next((one.read_text() for one in candidates if one.is_file()), None)
            self._trees[module] = None if text is None else ast.parse(text)
        return self._trees[module]

    def find(self, module: str, name: str, steps: int = STEPS_MAX) -> tuple[str, ast.AST] | None:
        """Where a name of a module is defined, be it elsewhere."""
        tree = self.tree(module)
        if tree is None or steps == 0:
            return None
        for node in _statements(tree.body):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                # The last of several counts: those before it only tell a type checker about calls.
                later = [one for one in _statements(tree.body) if isinstance(one, type(node)) and one.name == name]
                return module, later[-1]
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and name in _assigned(node):
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(self._absolute(module, node), alias.name, steps - 1)
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = (self.root.joinpath(*module.split(".")) / "__init__.py").is_file()
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def members(self, name: str) -> dict[str, str] | None:
        """What a class has, by name, with what it inherits from classes whose source is here. Of the constructor also what it sets."""
        module, _, attribute = name.partition(":")
        found = self.find(module, attribute)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return None
        return self._members(*found, STEPS_MAX)

    def _members(self, module: str, node: ast.ClassDef, steps: int) -> dict[str, str]:
        said: dict[str, str] = {}
        for base in reversed(node.bases):
            found = self.find(module, base.id) if isinstance(base, ast.Name) and steps else None
            if found and isinstance(found[1], ast.ClassDef):
                said |= self._members(found[0], found[1], steps - 1)
        is_enum = any(ast.unparse(base).split(".")[-1] in ("Enum", "IntEnum", "StrEnum", "str") for base in node.bases)
        for member in _statements(node.body):
            if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef)):
                said[member.name] = _said(member)
                if member.name == "__init__":
                    said |= {f"self.{name}": "set by the constructor" for name in _set_on(member)}
            elif isinstance(member, ast.AnnAssign):
                said |= {name: "a field" for name in _assigned(member)}
            elif isinstance(member, ast.Assign):
                said |= {name: ast.unparse(member.value) if is_enum else "a property" for name in _assigned(member)}
        return said

    def said(self, name: str) -> str:
        """The signature of a function, or the value of a constant."""
        module, _, attribute = name.partition(":")
        found = self.find(module, attribute)
        if found is None:
            return NOWHERE
        node = found[1]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return _said(node)
        value = getattr(node, "value", None)
        return "a class" if isinstance(node, ast.ClassDef) else ast.unparse(value) if value is not None else "declared"

    def called_on(self, module: str, holder: str) -> list[str] | None:
        """The methods that a module calls on something it holds, as `self.agent`."""
        tree = self.tree(module)
        if tree is None:
            return None
        calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
        return sorted({one.attr for one in calls if isinstance(one, ast.Attribute) and ast.unparse(one.value) == holder})


def differences(recorded: dict[str, object], found: dict[str, object]) -> list[str]:
    """A line for each thing that is not as it was. The version alone is no difference."""
    lines = []
    for name, was in recorded.items():
        now = found.get(name, NOWHERE)
        if name == "version" or was == now:
            continue
        if not isinstance(was, dict) or not isinstance(now, dict):
            lines.append(f"{name} was {'a class' if isinstance(was, dict) else was}, now it is {'a class' if isinstance(now, dict) else now}")
            continue
        for member in sorted({**was, **now}):
            if member not in now:
                lines.append(f"{name}.{member} is gone; it was {was[member]}")
            elif member not in was:
                lines.append(f"{name}.{member} is new: {now[member]}")
            elif was[member] != now[member]:
                lines.append(f"{name}.{member} was {was[member]}, is {now[member]}")
    return lines


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """What is defined, also where it depends on something."""
    found: list[ast.stmt] = []
    for node in body:
        found.append(node)
        for part in ("body", "orelse", "finalbody", "handlers"):
            if isinstance(node, (ast.If, ast.Try)):
                inner = getattr(node, part, [])
                for one in inner:
                    found += _statements(one.body if isinstance(one, ast.ExceptHandler) else [one])
    return found


def _assigned(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [one.id for one in targets if isinstance(one, ast.Name)]


def _set_on(constructor: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    named: set[str] = set()
    for node in ast.walk(constructor):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        for one in targets:
            if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "self":
                named.add(one.attr)
    return named


def _said(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    marks = {ast.unparse(mark).split("(")[0].split(".")[-1] for mark in function.decorator_list}
    if marks & {"property", "cached_property"}:
        return "a property"
    words = [word for mark, word in (("abstractmethod", "abstract "), ("classmethod", "of the class "), ("staticmethod", "of no object ")) if mark in marks]
    awaited = "awaited " if isinstance(function, ast.AsyncFunctionDef) else ""
    returned = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    # Whether a name is quoted says nothing.
    return "".join(words) + awaited + f"({ast.unparse(function.args)}){returned}".replace("'", "").replace('"', "")
