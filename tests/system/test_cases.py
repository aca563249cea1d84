"""Cases from the field: each is covered by a test that carries its id, or is open here with the reason.

A test carries an id in its name (test_cli_01_...), its docstring ("Case CONC-03") or its decorators (a parameter).
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
KINDS = (
    "local-socket", "cli", "stop", "streaming-utf8", "injection", "sampling", "context", "concurrency", "discovery",
    "host", "api", "tokenizer", "chat-template", "gguf", "shapes",
)  # fmt: skip
OPEN: dict[str, str] = {}


@cache
def _tests() -> dict[str, str]:
    """Test node -> its name, docstring and decorators, of each test file but this."""
    found = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        if path == Path(__file__).resolve():
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                where = f"{path.relative_to(TESTS.parent)}::{node.name}"
                decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
                found[where] = f"{node.name} {ast.get_docstring(node) or ''} {decorators}"
    return found


def covering(case: str) -> list[str]:
    """The tests that carry a case's id."""
    pattern = re.compile(rf"(?<![A-Za-z0-9]){case.replace('-', '[-_]')}(?![0-9])", re.IGNORECASE)
    return [where for where, text in _tests().items() if pattern.search(text)]


def test_every_case_is_covered_or_open_with_a_reason(field_cases) -> None:
    ids = [name for name, case in field_cases.items() if case["kind"] in KINDS]
    assert len(ids) > 20
    neither = [name for name in ids if not covering(name) and name not in OPEN]
    assert not neither, f"no test carries the id, and it is not listed as open: {neither}"
    assert set(OPEN) <= set(ids), "OPEN lists what is no case"


def test_open_cases_have_a_reason_and_no_test() -> None:
    assert all(len(reason.split()) >= 5 for reason in OPEN.values())
    covered = {case: covering(case) for case in OPEN if covering(case)}
    assert not covered, f"covered by now, take them out of OPEN: {covered}"


if __name__ == "__main__":
    import json
    import os

    cases = json.loads(Path(os.environ["MESHLLM_SHARED"], "cases", "cases.json").read_text())
    for case in cases:
        if case["kind"] in KINDS:
            print(case["id"], OPEN.get(case["id"], "") or covering(case["id"]) or "NOTHING")
