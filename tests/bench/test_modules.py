"""Modules that benchmarks start with ``python -m`` exist."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STARTED = re.compile(r'"-m", (f?)"(bench[^"]*)"')
FILES = sorted((ROOT / "bench").rglob("*.py"))


def test_modules_started_by_name_exist() -> None:
    started = [(path, *found) for path in FILES for found in STARTED.findall(path.read_text())]
    assert [found for found in started if found[1]] == [], "a name that is written out can be found"
    # "bench.my_case" occurs only in the example of a docstring.
    names = [(path, name) for path, _, name in started if name != "bench.my_case"]
    assert [found for found in names if find_spec(found[1]) is None] == []
    assert names
