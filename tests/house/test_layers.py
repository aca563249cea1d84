"""Who may import whom: the table "Layers" in ARCHITECTURE.md is the rule, read from there, so it cannot drift.

A cell holds names in backticks. `mesh.framing` allows that module alone, `mesh` the whole package; a package may always
import itself. "never" names modules from outside that a folder keeps away from: what makes it pure.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "meshllm"
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def _read_table() -> dict[str, tuple[set[str], set[str]]]:
    """Name of a package or top-level module -> (may import, never)."""
    text = (REPOSITORY / "ARCHITECTURE.md").read_text("utf-8")
    rows = re.findall(r"^\| ((?:`[\w.]+`(?:, )?)+) \| (.*?) \|(.*?)\|$", text, re.MULTILINE)
    table = {}
    for names, may, never in rows:
        for name in re.findall(r"`([\w.]+)`", names):
            table[name] = (set(re.findall(r"`([\w.]+)`", may)), set(re.findall(r"`([\w.]+)`", never)))
    return table


TABLE = _read_table()


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import, those inside functions and type checking included."""
    for node in ast.walk(ast.parse((PACKAGE / path).read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def _key(path: Path) -> str | None:
    """The row of the table for a module: the most special one that fits; None for __init__ of the whole package."""
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    if name in ("__init__", "__main__"):
        return None
    while name not in TABLE and "." in name:
        name = name.rpartition(".")[0]
    return name


def _within(name: str, allowed: set[str]) -> bool:
    return any(name == part or name.startswith(part + ".") for part in allowed)


def test_table_knows_every_package() -> None:
    missing = {key for path in MODULES if (key := _key(path)) is not None and key not in TABLE}
    assert not missing, f"ARCHITECTURE.md's table of layers does not know {sorted(missing)}"


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_module_imports_only_what_its_layer_may(path: Path) -> None:
    key = _key(path)
    if key is None:
        return
    may = TABLE[key][0] | {key.split(".")[0]}
    if key in ("errors", "status", "limits", "addresses"):
        may = set()
    wrong = [
        f"{path}:{line}: {name}"
        for line, name in _imports(path)
        if name.startswith("meshllm.")
        and name != "meshllm.__version__"
        and not _within(name.removeprefix("meshllm."), may)
        and not (name.startswith("meshllm._native") and path.parent == Path("kernels"))
    ]
    assert not wrong, "not allowed by ARCHITECTURE.md's table: " + ", ".join(wrong)


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_pure_folders_reach_for_nothing_outside(path: Path) -> None:
    key = _key(path)
    if key is None:
        return
    never = TABLE[key][1]
    wrong = [f"{path}:{line}: {name}" for line, name in _imports(path) if _within(name, never)]
    assert not wrong, "a pure folder imports " + ", ".join(wrong)


def test_table_speaks_of_what_is_there() -> None:
    names = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in MODULES}
    unknown = {name for may, _ in TABLE.values() for name in may if name not in names}
    assert not unknown, f"ARCHITECTURE.md's table names {sorted(unknown)}, which are not modules"


def test_only_the_bindings_see_the_native_module() -> None:
    wrong = [
        f"{path}:{line}"
        for path in MODULES
        for line, name in _imports(path)
        if name.startswith("meshllm._native") and path.parent != Path("kernels")
    ]
    assert not wrong, f"only kernels/ may import meshllm._native: {wrong}"
