"""Laws of the package as a whole: what it exports, its version, and what it imports."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

import rvdcomm as rv
from rvdcomm.run import torch_version


def test_the_version_is_that_of_the_distribution() -> None:
    assert rv.__version__ == importlib.metadata.version("rvdcomm")


def test_public_names_exist() -> None:
    assert [name for name in rv.__all__ if getattr(rv, name).__name__ != name] == []


def test_pending_is_the_class_of_the_api() -> None:
    assert rv.Pending.__module__ == "rvdcomm.api.pending"


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, rvdcomm; rvdcomm.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0


def test_torch_dependency_has_the_versions_of_the_warning() -> None:
    oldest, untried = (
        f"{major}.{minor}" for major, minor in (torch_version.OLDEST, torch_version.FIRST_UNTRIED)
    )
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert f"torch>={oldest},<{untried}" in project["project"]["dependencies"]


@pytest.mark.parametrize("version", ["2.10.1", "2.14.0", "2.15.0.dev20261101+cu130", "3.0.0"])
def test_untried_torch_version_gives_a_warning(version: str) -> None:
    with pytest.warns(UserWarning, match=re.escape(f"not tried with torch {version}, of which")):
        torch_version.warn_of_untried(version)


def test_the_first_use_of_torch_warns_once() -> None:
    code = "import torch; torch.__version__ = '2.15.0'; import rvdcomm; rvdcomm.redistribute"
    done = subprocess.run([sys.executable, "-c", code], timeout=100, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("not tried with torch 2.15.0")) == (0, 1)


def test_source_distribution_has_all_sources_of_the_extension(tmp_path: Path) -> None:
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
