"""``guided.py`` needs atheris, which is no dependency of the tests."""

from __future__ import annotations

collect_ignore = ["guided.py"]
