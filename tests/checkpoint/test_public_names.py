"""Modules of checkpoint/ import only exported names, and name only files that exist."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "rvdcomm/checkpoint").glob("*.py"))


def hidden_names(file: Path) -> list[str]:
    """The names that a file imports from modules that do not export them."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("rvdcomm"):
            parts = str(node.module).split(".")
            if parts[1:2] == ["checkpoint"]:
                continue
            module = import_module(str(node.module))
            exported = [] if len(parts) > 2 else getattr(module, "__all__", vars(module))
            names = [alias.name for alias in node.names if alias.name not in exported]
            found += [f"{file.name}: {node.module}.{name}" for name in names]
    return found


def test_checkpoint_modules_import_only_exported_names() -> None:
    assert [name for file in FILES for name in hidden_names(file)] == []


def test_files_that_docstrings_name_exist() -> None:
    pattern = r"(?:tests|docs|bench|rvdcomm)/[a-z_0-9/.-]+[.](?:py|md)"
    named = [(file.name, name) for file in FILES for name in re.findall(pattern, file.read_text())]
    assert [found for found in named if not (ROOT / found[1]).exists()] == []
