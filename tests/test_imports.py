"""Tests use public names, or those of a folder; a module inside a folder only in its own tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = sorted((ROOT / "tests").rglob("*.py"))

OWN = {
    "tests/dist": {"rvdcomm.run", "rvdcomm.api"},
    "tests/cuda": {"rvdcomm.run"},
}
"""Folders of tests that are not named as the folder whose laws they hold."""


def own(test: Path) -> set[str]:
    """The folders whose inner modules a test may import."""
    parts = test.relative_to(ROOT).parts
    if parts[1] == "superscaler_core":
        return {f"superscaler_core.{parts[2]}"}
    return OWN.get("/".join(parts[:2]), {f"rvdcomm.{parts[1]}"})


def inner_imports(test: Path) -> Iterator[tuple[str, str]]:
    """The modules inside folders that a test imports names of, with these names.

    A function that is named as its module is imported from it: a folder cannot export it, because
    the name means the module there. Published systems have no names but their rows.
    """
    for node in ast.walk(ast.parse(test.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        package, *inside = node.module.split(".")
        is_module = (ROOT / Path(*node.module.split("."))).with_suffix(".py").exists()
        if package in ("rvdcomm", "superscaler_core") and len(inside) > 1 and is_module:
            names = [alias.name for alias in node.names if alias.name != inside[-1]]
            if inside[0] != "published":
                yield from ((node.module, name) for name in names)


def test_tests_import_modules_inside_a_folder_only_for_the_laws_of_that_folder() -> None:
    foreign = [
        f"{test.relative_to(ROOT)}: {module}.{name}"
        for test in TESTS
        for module, name in inner_imports(test)
        if ".".join(module.split(".")[:2]) not in own(test)
    ]
    assert foreign == []
