"""Documents that name tests."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent


def named_tests(text: str) -> list[tuple[str, str]]:
    """Every `path.py::name` of a document."""
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)


@cache
def tests_in(path: str) -> frozenset[str]:
    """Test functions of a file, read and not imported."""
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def missing_tests(text: str) -> list[str]:
    """What a document names and nobody wrote."""
    named = named_tests(text)
    assert named
    return [f"{path}::{name}" for path, name in named if not (ROOT / path).is_file() or name not in tests_in(path)]
