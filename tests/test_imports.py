"""What tests import, and which tests sources name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = sorted((ROOT / "tests").rglob("*.py"))

PACKAGES = ("rvdcomm", "superscaler_core")

OWN = {
    "tests/dist": {"rvdcomm.run", "rvdcomm.api", "rvdcomm.interop"},
    "tests/vllm": {"rvdcomm.interop"},
    "tests/cuda": {"rvdcomm.run"},
    "tests/test_package.py": {"rvdcomm.run"},
    "tests/superscaler_core/front_end": {
        *("superscaler_core.front_end", "superscaler_core.rules", "superscaler_core.ops")
    },
}
"""Tests that are not named as the folder whose laws they hold, or hold those of several."""


def own(test: Path) -> set[str]:
    """The folders whose inner modules a test may import."""
    parts = test.relative_to(ROOT).parts
    is_core = parts[1] == "superscaler_core"
    folder = "/".join(parts[: 3 if is_core else 2])
    named = f"superscaler_core.{parts[2]}" if is_core else f"rvdcomm.{parts[1]}"
    return OWN.get(folder, {named})


def is_module(name: str) -> bool:
    """Whether a dotted name is a module inside a folder of a package, and no folder itself."""
    inside = name.split(".")
    path = ROOT / Path(*inside)
    return len(inside) > 2 and inside[0] in PACKAGES and path.with_suffix(".py").exists()


def inner_imports(test: Path) -> Iterator[str]:
    """The modules inside folders that a test imports, or names of.

    A function that is named as its module may be imported from it. Published systems have no
    public names but their rows.
    """
    for node in ast.walk(ast.parse(test.read_text())):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [alias.name for alias in node.names]
            if any(name != node.module.rpartition(".")[2] for name in names):
                found = [node.module]
            if node.module.split(".")[0] in PACKAGES:
                exported = getattr(import_module(node.module), "__all__", ())
                found += [f"{node.module}.{name}" for name in names if name not in exported]
        yield from (name for name in found if is_module(name) and ".published." not in name)


def test_tests_import_modules_inside_a_folder_only_for_the_laws_of_that_folder() -> None:
    foreign = [
        f"{test.relative_to(ROOT)}: {module}"
        for test in TESTS
        for module in inner_imports(test)
        if ".".join(module.split(".")[:2]) not in own(test)
    ]
    assert foreign == []


def test_sources_name_files_of_tests_that_exist() -> None:
    sources = [f for name in ("rvdcomm", "superscaler_core") for f in (ROOT / name).rglob("*.py")]
    named = {(f, test) for f in sources for test in re.findall(r"tests/[\w/]+\.py", f.read_text())}
    missing = [f"{f.relative_to(ROOT)}: {test}" for f, test in named if not (ROOT / test).exists()]
    assert len(named) > 100
    assert sorted(missing) == []
