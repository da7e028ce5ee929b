"""Damaged and hostile files raise a package error, soon and in little memory; no code runs."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import tempfile
import tracemalloc
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rvdcomm as rv
from rvdcomm.checkpoint import open_checkpoint, reshard
from rvdcomm.checkpoint.inert import Global, Persistent, PickledCall, inert
from rvdcomm.checkpoint.safetensors_file import header_bytes
from tests.checkpoint.models import make, model

ERRORS = (rv.CheckpointError, rv.LayoutError)


def header(value: Any) -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return len(text).to_bytes(8, "little") + text


def tensor(shape: Any, offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


FILES = {
    "empty": (b"", "its header would take 0 bytes, the file has 0 bytes"),
    "with a header of 2^60 bytes": (
        (1 << 60).to_bytes(8, "little") + b"{}",
        "its header would take 1152921504606846976 bytes, the file has 10 bytes",
    ),
    "that is cut off in the data": (
        header({"w": tensor([2], [0, 8])}) + b"1234",
        "its tensors end at byte 77, the file at byte 73",
    ),
    "with bytes too many": (
        header({"w": tensor([2], [0, 8])}) + b"123456789",
        "its tensors end at byte 77, the file at byte 78",
    ),
    "with deep nesting": (header(b"[" * 200_000), "its header is nested too deeply"),
    "that is no JSON": (header(b"{'w'}"), "its header is no JSON"),
    "that is no UTF-8": (header(b'{"\xff": 1}'), "its header is no JSON"),
    "with half of a character": (header({"\ud800": tensor([1], [0, 4])}) + b"1234", "is no JSON"),
    "whose header is a list": (header([1]), "where an object is expected"),
    "with offsets outside of the file": (
        header({"w": tensor([2], [8_000, 8_008])}) + b"12345678",
        "tensor 'w' starts at byte 8075 of the file where byte 75 is next",
    ),
    "with offsets that overlap": (
        header({"v": tensor([2], [0, 8]), "w": tensor([2], [4, 12])}) + b"1" * 12,
        "tensor 'w' starts at byte",
    ),
    "with offsets that fit no shape": (
        header({"w": tensor([3], [0, 8])}) + b"1" * 8,
        r"tensor 'w' F32 \[3\] takes 12 bytes, its data_offsets \[0, 8\] hold 8",
    ),
    "of a size that is huge": (
        header({"w": tensor([1 << 40, 1 << 40], [0, 8])}),
        "whose product is a 64-bit number of bytes",
    ),
    "of a size of thousands of digits": (
        header(b'{"w": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 8]}}'),
        "its header is no JSON",
    ),
    "of a negative size": (header({"w": tensor([-2, -1], [0, 8])}), "sizes of at least 0"),
    "of a size that is true": (header({"w": tensor([True], [0, 4])}) + b"1234", "no integers"),
    "of many dims": (header({"w": tensor([1] * 20_000, [0, 4])}) + b"1234", "up to 63 sizes"),
    "that names a tensor twice": (
        header(b'{"w": {}, "w": {}}'),
        "its header names something twice",
    ),
    "whose entry lacks something": (header({"w": {"dtype": "F32"}}), "needs 'dtype', 'shape' and"),
    "whose notes are no texts": (header({"__metadata__": {"a": 1}}), "must map texts to texts"),
}  # fmt: skip


def assert_cheap_error(do: Callable[[], Any], message: str, max_bytes: int = 64 << 20) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ERRORS, match=message) as caught:
            do()
        assert tracemalloc.get_traced_memory()[1] < max_bytes
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 1000


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", FILES)
def test_damaged_safetensors_file_is_rejected(name: str, tmp_path: Path) -> None:
    data, message = FILES[name]
    (tmp_path / "model.safetensors").write_bytes(data)
    assert_cheap_error(
        lambda: open_checkpoint(tmp_path),
        rf"model.safetensors is no whole safetensors file: .*{message}",
    )


@pytest.mark.parametrize("dtype", ["F31", "F4", [[]]])
def test_unknown_dtype_is_not_reported_as_damage(dtype: Any, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(header({"w": tensor([2], [0, 8], dtype)}))
    message = (
        rf"model.safetensors: tensor 'w' has the unknown dtype {re.escape(repr(dtype))}; known"
    )
    assert_cheap_error(lambda: open_checkpoint(tmp_path), message)


@pytest.mark.timeout(20)
def test_file_with_20000_tensors_is_read_in_bounded_time(tmp_path: Path) -> None:
    tensors = {f"w{i}": ("float32", (0,)) for i in range(20_000)}
    (tmp_path / "model.safetensors").write_bytes(header_bytes(tensors, {}))
    assert len(open_checkpoint(tmp_path).tensors) == 20_000


def listed(*names: str) -> dict[str, Any]:
    """An index that names one file for these tensors."""
    return {"weight_map": dict.fromkeys(names, "model.safetensors")}


@pytest.mark.parametrize(
    "index, message",
    [
        ([], "expected an object with 'weight_map'"),
        ({"weight_map": {"w": 3}}, "names the file 3; expected a plain name"),
        ({"weight_map": {"w": "../../etc/passwd"}}, "names the file '../../etc/passwd'"),
        ({"weight_map": {"w": "/etc/passwd"}}, "names the file '/etc/passwd'"),
        ({"weight_map": {"w": ".."}}, r"names the file '\.\.'"),
        ({"weight_map": {"w": "gone.safetensors"}}, r"gone.safetensors is missing; copy it"),
        ({"weight_map": {}}, "names no tensor|without any tensor"),
        (listed("x", *model()), "'x' is in model.s.* not"),
        (listed(*set(model()) - {"ids"}), "leaves out tensor 'ids', which model.s.* holds"),
    ],
)
def test_invalid_index_is_rejected(index: Any, message: str, tmp_path: Path) -> None:
    make("whole", tmp_path)
    (tmp_path / "whole/model.safetensors.index.json").write_text(json.dumps(index))
    assert_cheap_error(lambda: open_checkpoint(tmp_path / "whole"), message)


def changed(root: Path, change: Callable[[Any], Any]) -> Path:
    """A sharded checkpoint whose manifest was changed."""
    src = make("sharded", root)
    path = src / "rvdcomm-manifest.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    return src


def ids(**changes: Any) -> Callable[[Any], Any]:
    return lambda manifest: manifest["tensors"]["ids"].update(changes)


def shard(*values: Any) -> Callable[[Any], Any]:
    """A change of what the manifest says of a shard."""
    return lambda manifest: manifest["tensors"]["ids"]["shards"].__setitem__(0, values)


def file(name: Any) -> Callable[[Any], Any]:
    return lambda manifest: manifest["files"].__setitem__(0, name)


PATHS = ["../secret", "/etc/passwd", "..", ".", "", "a/b", "a\0b", 3]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda m: m.update(format="zip"), "it is 'zip' version 3; this reads rvdcomm-checkpoint"),
        (lambda m: m.update(version=1), "version 1; this .* rvdcomm-checkpoint versions 2 and 3"),
        (lambda m: m.pop("tensors"), "'tensors' is missing"),
        (lambda m: m.update(tensors={}, files=[], saves=[]), "names no tensor|without any tensor"),
        (lambda m: m["tensors"].pop("ids"), "leaves out tensor 'ids', which rank-0000"),
        (lambda m: m["tensors"].update(x=m["tensors"]["ids"]), "'x', rank 0: .* does not hold it"),
        *((file(path), "names the file .*; expected a plain name") for path in PATHS),
        (ids(dtype="int63"), "dtype 'int63' is unknown"),
        (ids(dtype="int32"), "one of the files is of another"),
        (ids(shards=[]), "'ids' has 0 shards and the layout"),
        (ids(layout="R(1)V(1)D(6) shape(12)"), "one of the files is of another checkpoint"),
        (ids(layout="R(999999999)V(1)D(6) shape(11)"), r"R\(999999999\)"),
        (ids(layout="R(1)V(1)D(6) shape(11) ranks(0:99999999)"), "ranks"),
        (shard(0), r"expected \[file number, checksum\]"),
        (shard(99, "0" * 64), "file number"),
        (shard(0, "crc32c/0:"), "'ids': it has the checksum 'crc32c/0:'; known are a sha256 and"),
        (shard(0, "crc32c/8:" + "0" * 8), "1 checksums of blocks of 8 bytes are no checksums of"),
    ],
)
@pytest.mark.timeout(20)
def test_invalid_manifest_is_rejected(
    change: Callable[[Any], Any], message: str, tmp_path: Path
) -> None:
    src = changed(tmp_path, change)
    assert_cheap_error(lambda: open_checkpoint(src), message)


# --- pickles ------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


def nested(depth: int) -> bytes:
    """Tuples of two tuples, nested: to hash or print them takes time exponential in ``depth``."""
    body = b")\x94" + b"".join(b"h%c" % i + b"h%c" % i + b"\x86\x94" for i in range(depth))
    return b"\x80\x04" + body


PICKLES = {
    "that calls a function": (pickle.dumps(Evil()), "it has Global.name=.*system.* where"),
    "that is empty": (b"", "it is no pickle"),
    "that is cut off": (pickle.dumps(list(range(100)))[:-1], "it is no pickle"),
    "of a number": (pickle.dumps(7), "it has 'int' where .*Metadata is expected"),
    "that pops too much": (b"\x80\x040.", "it is no pickle"),
    "that uses what it never kept": (b"\x80\x04h\x07.", "it is no pickle"),
    "of an old protocol": (b"cos\nsystem\n(S'touch evil'\ntR.", "it is no pickle"),
    "of a text of 2^60 bytes": (b"\x80\x04\x8d" + (1 << 60).to_bytes(8, "little"), "no pickle"),
    "of a bomb": (nested(200) + b".", "it has 'tuple' where"),
    "with a bomb as a key": (nested(200) + b"}hdK\x01s.", "it has 'Pairs' where"),
    "of a class that is not torch's": (
        b"\x80\x04\x8c\x02os\x8c\x06system\x93)\x81}b.",
        "it has Global.name='os.system'. where",
    ),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", PICKLES)
def test_hostile_metadata_pickle_is_rejected(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data, message = PICKLES[name]
    (tmp_path / ".metadata").write_bytes(data)
    assert_cheap_error(lambda: open_checkpoint(tmp_path), message)
    assert os.listdir(tmp_path) == [".metadata"]


def test_reshard_of_dcp_checkpoints_unpickles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src = make("dcp-transposed", tmp_path)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler", "_loads", "_load", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    reshard(src, tmp_path / "dst", to="dcp")
    reshard(tmp_path / "dst", tmp_path / "again")


class Record:
    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_inert_reads_the_values_of_a_pickle(protocol: int) -> None:
    value = {"a": [1, -(2**70), 2.5, "ä" * 300, b"bytes", None, True], (1, (2, 3, 4)): Record(7)}
    found = inert(pickle.dumps(value, protocol))
    (key, values), (pair, record) = found.items
    assert (key, pair) == ("a", (1, (2, 3, 4)))
    assert values[:4] == value["a"][:4]
    assert values[5:] == [None, True]
    assert isinstance(record, PickledCall)
    assert record.state.texts() == {"value": 7}


def test_inert_keeps_calls_and_references_as_records() -> None:
    stream = io.BytesIO()
    torch.save(torch.ones(2, 3), stream)
    with zipfile.ZipFile(stream) as archive:
        said = inert(archive.read("archive/data.pkl"))
    assert said.function == Global("torch._utils._rebuild_tensor_v2")
    assert isinstance(said.args[0], Persistent)
    assert said.args[1:4] == (0, (2, 3), (3, 1))


# --- random changes of bytes --------------------------------------------------------------------


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of checkpoints, of which tests change some bytes."""
    root = tmp_path_factory.mktemp("samples")
    tensors = {name: model()[name] for name in ("ids", "layers.0.q.weight", "scale")}
    dcp, sharded = make("dcp", root, tensors), make("sharded", root, tensors)
    return {
        "dcp/.metadata": (dcp / ".metadata").read_bytes(),
        "dcp/__0_0.distcp": (dcp / "__0_0.distcp").read_bytes(),
        "sharded/rvdcomm-manifest.json": (sharded / "rvdcomm-manifest.json").read_bytes(),
        "sharded/rank-00000.safetensors": (sharded / "rank-00000.safetensors").read_bytes(),
        "root": str(root).encode(),
    }


@pytest.mark.parametrize(
    "name",
    [
        "dcp/.metadata",
        "dcp/__0_0.distcp",
        "sharded/rvdcomm-manifest.json",
        "sharded/rank-00000.safetensors",
    ],
)
@settings(max_examples=60)
@given(data=st.data())
def test_reshard_of_changed_bytes_succeeds_or_raises_a_package_error(
    name: str, samples: dict[str, bytes], data: st.DataObject
) -> None:
    original = samples[name]
    changed = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(original) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.one_of(st.just(len(original)), st.integers(0, len(original))))
    with tempfile.TemporaryDirectory() as folder:
        src = Path(folder) / "src"
        shutil.copytree(Path(os.fsdecode(samples["root"])) / name.split("/")[0], src)
        (src / name.split("/")[1]).write_bytes(changed[:end])
        with suppress(*ERRORS):
            reshard(src, Path(folder) / "dst")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "name", ["model.safetensors", ".metadata", "rvdcomm-manifest.json", "rvdcomm-journal.jsonl"]
)
def test_named_pipe_in_place_of_a_file_is_rejected(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    assert_cheap_error(lambda: open_checkpoint(tmp_path), "is no regular file")
