"""Modules of checkpoint/ import only exported names, and name only files that exist."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

pytestmark = pytest.mark.every
ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "rvdcomm/checkpoint").glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.name))
def test_checkpoint_modules_import_only_exported_names(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("rvdcomm"):
            parts = str(node.module).split(".")
            if parts[1:2] == ["checkpoint"]:
                continue
            assert len(parts) <= 2, node.module
            module = import_module(str(node.module))
            names = {alias.name for alias in node.names}
            assert names <= set(getattr(module, "__all__", vars(module)))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.name))
def test_files_that_docstrings_name_exist(file: Path) -> None:
    named = re.findall(r"(?:tests|docs|bench|rvdcomm)/[a-z_0-9/.-]+[.](?:py|md)", file.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []
