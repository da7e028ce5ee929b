"""Laws of the package as a whole: what it exports, its version, and what it imports."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

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
