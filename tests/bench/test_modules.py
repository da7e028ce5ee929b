"""Modules that benchmarks start with ``python -m`` exist."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.every
ROOT = Path(__file__).resolve().parents[2]
STARTED = re.compile(r'"-m", (f?)"(bench[^"]*)"')
FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "bench").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=str)
def test_modules_started_by_name_exist(path: Path) -> None:
    text = (ROOT / path).read_text()
    # "bench.my_case" occurs only in the example of a docstring.
    started = [found for found in STARTED.findall(text) if found[1] != "bench.my_case"]
    assert all(not is_made for is_made, _ in started), "a name that is written out can be found"
    assert [name for _, name in started if find_spec(name) is None] == []
