from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

import rvdcomm as rv
from rvdcomm.checkpoint.folder import Folder
from rvdcomm.checkpoint.safetensors_file import DTYPES, header_bytes, read_header
from rvdcomm.layout import ITEM_BYTES
from tests.checkpoint.models import bits, model


@pytest.mark.parametrize("code", DTYPES)
def test_headers_are_read_as_by_the_safetensors_library(code: str, tmp_path: Path) -> None:
    dtype, shape = DTYPES[code], (3, 5)
    path = tmp_path / "one.safetensors"
    shards = {"w": (dtype, shape), "ä": (dtype, ()), "e": (dtype, (0, 2))}
    data = bytes(16 * ITEM_BYTES[dtype])
    path.write_bytes(header_bytes(shards, {"a": "b"}) + data)
    header = read_header(Folder(tmp_path), path.name)
    assert {n: (e.dtype, e.shape) for n, e in header.entries.items()} == shards
    with safe_open(path, "pt") as file:
        assert file.metadata() == header.metadata == {"a": "b"}
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in shards}
        assert shapes == {name: shape for name, (_, shape) in shards.items()}
        assert set(file.keys()) == set(shards)
        assert file.get_slice("w").get_dtype() == code


def test_files_of_the_safetensors_library_are_read(tmp_path: Path) -> None:
    save_file(model(), tmp_path / "one.safetensors", {"who": "me"})
    header = read_header(Folder(tmp_path), "one.safetensors")
    data = (tmp_path / "one.safetensors").read_bytes()
    expected = {
        name: (str(t.dtype).removeprefix("torch."), tuple(t.shape), bits(t))
        for name, t in model().items()
    }
    found = {
        name: (e.dtype, e.shape, data[e.start : e.start + e.num_bytes])
        for name, e in header.entries.items()
    }
    assert found == expected
    assert header.metadata == {"who": "me"}


def test_name_that_utf8_has_not_is_rejected() -> None:
    with pytest.raises(rv.CheckpointError, match=r"tensor '\\ud800' float32: .* another name"):
        header_bytes({"\ud800": ("float32", (1,))}, {})


def test_dtype_without_a_safetensors_code_is_rejected() -> None:
    with pytest.raises(rv.CheckpointError, match="'w' complex128: safetensors has no such tensor"):
        header_bytes({"w": ("complex128", (2,))}, {})
