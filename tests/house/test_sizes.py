"""Sizes by the tail: files under 250 lines, function bodies under 70, few over 25. What is over may only shrink.

sizes.json lists what stands over the bound, with its length: a ratchet. A file that grows past its entry fails, so
does an entry that is no longer needed or could be lower by a tenth. `python tests/house/test_sizes.py` writes it anew.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
RATCHET = Path(__file__).with_name("sizes.json")
FILE_LINES = 250  # ask why over this
FILE_LINES_MOST = 400
BODY_LINES = 25
BODY_LINES_MOST = 70
LONG_BODIES = 0.10  # at most this part of all functions is over BODY_LINES


def _files() -> Iterator[Path]:
    for pattern in ("meshllm/**/*.py", "scripts/*.py", "benchmarks/*.py", "native/**/*.[ch]"):
        yield from sorted(REPOSITORY.glob(pattern))


def _lines(path: Path) -> int:
    return path.read_text("utf-8").count("\n")


def _bodies() -> Iterator[tuple[str, int]]:
    """(place, lines of the body without its docstring) of each Python function."""
    for path in sorted(REPOSITORY.glob("meshllm/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                if body:
                    end = body[-1].end_lineno or 0
                    yield f"{path.relative_to(REPOSITORY)}:{node.lineno} {node.name}", end - body[0].lineno + 1


def _too_long() -> dict[str, int]:
    return {str(path.relative_to(REPOSITORY)): n for path in _files() if (n := _lines(path)) > FILE_LINES}


def test_files_stay_short() -> None:
    ratchet = json.loads(RATCHET.read_text())
    grown = {name: n for name, n in _too_long().items() if n > ratchet.get(name, FILE_LINES)}
    assert not grown, f"longer than {FILE_LINES} lines or than sizes.json allows; divide them: {grown}"


def test_no_file_is_very_long_without_being_listed() -> None:
    ratchet = json.loads(RATCHET.read_text())
    assert set(ratchet) <= {str(path.relative_to(REPOSITORY)) for path in _files()}, "sizes.json lists what is gone"
    loose = {name: n for name, n in _too_long().items() if name in ratchet and n < 0.9 * ratchet[name]}
    short = {name for name in ratchet if name not in _too_long()}
    assert not loose, f"shrunk: lower sizes.json to {loose}"
    assert not short, f"no longer too long: take {short} out of sizes.json"


def test_python_files_are_never_very_long() -> None:
    wrong = {name: n for name, n in _too_long().items() if name.endswith(".py") and n > FILE_LINES_MOST}
    assert not wrong, f"over {FILE_LINES_MOST} lines: {wrong}"


def test_function_bodies_stay_short() -> None:
    bodies = list(_bodies())
    longest = [(place, n) for place, n in bodies if n > BODY_LINES_MOST]
    assert not longest, f"over {BODY_LINES_MOST} lines: {longest}"
    long = [place for place, n in bodies if n > BODY_LINES]
    assert len(long) <= LONG_BODIES * len(bodies), f"{len(long)} of {len(bodies)} over {BODY_LINES} lines: {long}"


if __name__ == "__main__":
    RATCHET.write_text(json.dumps(_too_long(), indent=2, sort_keys=True) + "\n")
