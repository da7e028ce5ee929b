"""Laws of the package as a whole: what it exports, its version, and what it imports."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import rvdcomm as rv


def test_the_version_is_that_of_the_distribution() -> None:
    assert rv.__version__ == importlib.metadata.version("rvdcomm")


@pytest.mark.parametrize("name", rv.__all__)
def test_public_names_are_there(name: str) -> None:
    assert getattr(rv, name).__name__ == name


def test_pending_is_what_an_asynchronous_call_returns() -> None:
    assert rv.Pending.__module__ == "rvdcomm.api.pending"


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, rvdcomm; rvdcomm.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0


def test_a_source_distribution_has_all_that_the_extension_is_built_of(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    here = tmp_path / "clone"
    kept = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    for name in ("rvdcomm", "superscaler_core", "csrc"):
        shutil.copytree(root / name, here / name, ignore=kept)
    for path in root.iterdir():
        if path.is_file() and not path.is_symlink():
            shutil.copy(path, here)
    command = [sys.executable, "setup.py", "-q", "sdist"]
    subprocess.run(command, cwd=here, check=True, timeout=100, capture_output=True)
    (archive,) = (here / "dist").iterdir()
    with tarfile.open(archive) as packed:
        found = {name.partition("/")[2] for name in packed.getnames()}
    sources = {str(path.relative_to(here)) for path in (here / "csrc").rglob("*") if path.is_file()}
    assert sources | {"CMakeLists.txt", "setup.py", "pyproject.toml", "README.md"} <= found
