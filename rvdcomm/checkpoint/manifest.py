"""Manifest: what the files of a sharded checkpoint hold, as a value with a JSON form.

A file of the checkpoint is an ordinary safetensors file with the shards of one rank. What it
cannot say, the manifest does: of which tensor a shard is which cell, and its checksum.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rvdcomm.checkpoint.safetensors_file import Header, read_header
from rvdcomm.checkpoint.stored import Block, StoredTensor, check_file_name, read_values
from rvdcomm.errors import CheckpointError, LayoutError
from rvdcomm.json_file import entry
from rvdcomm.layout import Layout, dtype_name
from rvdcomm.text import quoted

FILE_NAME = "rvdcomm-manifest.json"
FORMAT, VERSION = "rvdcomm-checkpoint", 1
MAX_BYTES = 256 << 20
"""Three million shards: 700 tensors on 4,096 ranks."""

_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's shard of a tensor: the file that has it, and the checksum of its bytes."""

    file: str
    sha256: str


@dataclass(frozen=True)
class ShardedTensor:
    """A tensor's dtype, its layout, and the shard of every rank of the layout."""

    dtype: str
    layout: Layout
    shards: Mapping[int, Shard]


@dataclass(frozen=True)
class Manifest:
    """The tensors of a sharded checkpoint by name.

    Law (tests/checkpoint/test_manifest.py): ``Manifest.from_json(x.to_json()) == x``.
    """

    tensors: Mapping[str, ShardedTensor]

    def __post_init__(self) -> None:
        for name, tensor in self.tensors.items():
            missing = sorted(set(tensor.layout.ranks) ^ set(tensor.shards))
            if missing:
                raise CheckpointError(
                    f"tensor {quoted(name)} {tensor.layout} needs a shard of each of its ranks and "
                    f"of no others; that of rank {missing[0]} is missing or too much."
                )

    def to_json(self) -> dict[str, Any]:
        """JSON values: shards in ascending order of ranks, files by their number in a list."""
        files = sorted({s.file for t in self.tensors.values() for s in t.shards.values()})
        number = {file: i for i, file in enumerate(files)}
        tensors = {
            name: {
                "dtype": tensor.dtype,
                "layout": str(tensor.layout),
                "shards": [[number[s.file], s.sha256] for _, s in sorted(tensor.shards.items())],
            }
            for name, tensor in sorted(self.tensors.items())
        }
        return {"format": FORMAT, "version": VERSION, "files": files, "tensors": tensors}

    def to_text(self) -> str:
        """The text of the file: one line a tensor."""
        values = self.to_json()
        lines = (f"{json.dumps(n)}: {json.dumps(t)}" for n, t in values.pop("tensors").items())
        head = json.dumps(values)[:-1]
        return f'{head}, "tensors": {{\n' + ",\n".join(lines) + "\n}}\n"

    @classmethod
    def from_json(cls, values: Any) -> Manifest:
        """Read the values that ``to_json`` gives.

        Raises:
            CheckpointError, LayoutError: they have another form.
        """
        if entry(values, "format", str) != FORMAT or entry(values, "version", int) != VERSION:
            raise CheckpointError(
                f"it is {quoted(values['format'])} version {quoted(values['version'])}; "
                f"this reads {FORMAT} version {VERSION}"
            )
        files = [check_file_name(file, "it") for file in entry(values, "files", list)]
        tensors = entry(values, "tensors", dict)
        return cls({name: _tensor(name, value, files) for name, value in tensors.items()})

    @classmethod
    def load(cls, root: Path) -> Manifest:
        """Read the manifest of the checkpoint in folder ``root``."""
        path = root / FILE_NAME
        try:
            return cls.from_json(read_values(path, MAX_BYTES))
        except (CheckpointError, LayoutError) as error:
            raise CheckpointError(f"{path} is no manifest: {str(error).rstrip('.')}.") from None


def _tensor(name: str, value: Any, files: list[str]) -> ShardedTensor:
    dtype, text = dtype_name(entry(value, "dtype", str)), entry(value, "layout", str)
    found = [_shard(name, shard, files) for shard in entry(value, "shards", list)]
    layout = Layout.parse(text)
    if len(layout.ranks) != len(found):
        raise CheckpointError(
            f"tensor {quoted(name)} has {len(found)} shards and the layout {quoted(text)}"
        )
    return ShardedTensor(dtype, layout, dict(zip(sorted(layout.ranks), found, strict=True)))


def _shard(name: str, value: Any, files: list[str]) -> Shard:
    if (
        not isinstance(value, list)
        or [type(v) for v in value] != [int, str]
        or not 0 <= value[0] < len(files)
        or not _SHA256.fullmatch(value[1])
    ):
        raise CheckpointError(
            f"tensor {quoted(name)} has the shard {quoted(value)}; expected [file number, sha256]"
        )
    return Shard(files[value[0]], value[1])


def stored_tensors(root: Path, manifest: Manifest) -> dict[str, StoredTensor]:
    """The tensors of a manifest, each shard found in its file."""
    headers: dict[str, Header] = {}
    out = {}
    for name, tensor in manifest.tensors.items():
        blocks = []
        for rank, shard in tensor.shards.items():
            if shard.file not in headers:
                headers[shard.file] = read_header(root / shard.file)
            blocks.append(_block(root, name, tensor, rank, headers[shard.file]))
        shape = tensor.layout.shape
        out[name] = StoredTensor(name, tensor.dtype, shape, tuple(blocks), tensor.layout.rvd.v)
    return out


def _block(root: Path, name: str, tensor: ShardedTensor, rank: int, header: Header) -> Block:
    cell, shard = tensor.layout.cell(rank), tensor.shards[rank]
    found = header.entries.get(name)
    if found is None or (found.dtype, found.shape) != (tensor.dtype, cell.box.shape):
        has = "does not hold it" if found is None else f"holds {found.dtype} {found.shape}"
        raise CheckpointError(
            f"tensor {name!r}, rank {rank}: {root / FILE_NAME} says {tensor.dtype} "
            f"{cell.box.shape}, and {shard.file} {has}; one of the files is of another checkpoint."
        )
    return Block(shard.file, found.start, found.num_bytes, cell.box, cell.part, sha256=shard.sha256)
