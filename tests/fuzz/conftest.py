"""Exclude ``guided.py``, which needs atheris; the tests do not depend on it."""

from __future__ import annotations

collect_ignore = ["guided.py"]
