from __future__ import annotations

import os
from pathlib import Path

import pytest

from rvdcomm.file_name import beside

NAMES = ["a", "step 9", "x" * 255, "x" * 254 + "y", "ä" * 127, "\udcff" * 200, "x" * 200, "a~b"]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
@pytest.mark.parametrize("suffix", [".shards", f".{'0' * 32}.rvdcomm-partial"])
def test_temporary_name_fits_where_the_name_does(name: str, suffix: str, tmp_path: Path) -> None:
    found = beside(name, suffix)
    assert len(os.fsencode(found)) <= 120
    assert found.endswith(suffix)
    (tmp_path / name).touch()
    (tmp_path / found).touch()


def test_temporary_names_of_different_names_differ() -> None:
    names = [*NAMES, *(beside(name, "")[1:] for name in NAMES)]
    assert len({beside(name, ".x") for name in names}) == len(set(names))
