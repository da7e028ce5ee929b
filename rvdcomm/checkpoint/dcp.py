"""DCP, ``torch.distributed.checkpoint``: reads and writes its description of a checkpoint.

``.metadata`` is a pickle of torch's own dataclasses. It is read as data (``inert``), never
unpickled. ``archive`` locates the elements in the archives that it points to.

Source: torch/distributed/checkpoint/metadata.py and filesystem.py, torch 2.11 to 2.13; the names
of the classes are part of every file ever written, so they do not change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rvdcomm.checkpoint.archive import digest
from rvdcomm.checkpoint.folder import Folder, check_file_name
from rvdcomm.checkpoint.inert import MAX_BYTES, Global, Pairs, PickledCall, inert
from rvdcomm.checkpoint.safetensors_file import Header, read_header
from rvdcomm.checkpoint.stored import Catalog, Extent, StoredBlock, StoredTensor
from rvdcomm.errors import CheckpointError, LayoutError
from rvdcomm.layout import Box, dtype_name
from rvdcomm.text import quoted

FILE_NAME = ".metadata"
_OF_RANK = re.compile(r"__(\d+)\.metadata")
"""Descriptions that ranks wrote with ``use_collectives=False``, each of its own files."""

_DATA_OF_RANK = re.compile(r"__(\d+)_\d+\.distcp")

_TYPES = "torch.distributed.checkpoint.metadata."
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"


def is_dcp(names: Iterable[str]) -> bool:
    """Whether a folder with these files holds a checkpoint of ``dcp.save``."""
    return any(name == FILE_NAME or _OF_RANK.fullmatch(name) for name in names)


def read_dcp(folder: Folder, names: Iterable[str]) -> Catalog:
    """The catalog of the checkpoint that ``dcp.save`` wrote to a folder.

    With ``use_collectives=False``, every rank describes its own files.

    Raises:
        CheckpointError: a description is damaged or missing, or has content that ``dcp.save`` never
            writes, or ranks saved different values under one name.
    """
    names = list(names)
    files = [FILE_NAME] if FILE_NAME in names else _files_of_ranks(folder, names)
    others: set[str] = set()
    described: dict[str, list[_Described]] = {}
    for file in files:
        try:
            said = inert(folder.read(file, MAX_BYTES))
            for name, tensor in _entries(folder, _fields(said, _TYPES + "Metadata")):
                if tensor is None:
                    others.add(name)
                else:
                    described.setdefault(name, []).append(tensor)
        except (CheckpointError, LayoutError) as error:
            raise CheckpointError(
                f"{folder.root / file} describes no checkpoint that can be read: "
                f"{str(error).rstrip('.')}."
            ) from None
    tensors = {name: _joined(folder, name, parts) for name, parts in described.items()}
    return Catalog(folder, "dcp", tensors, tuple(sorted(others)))


def _files_of_ranks(folder: Folder, names: list[str]) -> list[str]:
    """The descriptions of all ranks; an error if one is missing.

    Nothing says how many ranks there were, but a rank that has written tensors was one. It writes
    its description last.
    """
    found = {int(m[1]): m[0] for name in names if (m := _OF_RANK.fullmatch(name))}
    with_data = {int(m[1]): m[0] for name in names if (m := _DATA_OF_RANK.fullmatch(name))}
    for rank in sorted({*range(len(found)), *with_data} - set(found)):
        there = with_data.get(rank, found[max(found)])
        raise CheckpointError(
            f"{folder.root}: {there} is there and __{rank}{FILE_NAME} is missing; copy all files "
            "of the checkpoint. A rank writes that one last, so its save may have stopped before."
        )
    return [name for _, name in sorted(found.items())]


@dataclass(frozen=True, slots=True)
class _Described:
    """A tensor as one rank, or all together, described it."""

    dtype: str
    shape: tuple[int, ...]
    blocks: tuple[StoredBlock, ...]


def _joined(folder: Folder, name: str, parts: list[_Described]) -> StoredTensor:
    """The tensor of which each part describes what one rank saved."""
    kinds = [(part.dtype, part.shape) for part in parts]
    if odd := [kind for kind in kinds if kind != kinds[0]]:
        raise CheckpointError(
            f"{folder.root}: ranks saved {quoted(name)} as {kinds[0][0]} {list(kinds[0][1])} and "
            f"as {odd[0][0]} {list(odd[0][1])}; save with use_collectives, or under other names."
        )
    dtype, shape = kinds[0]
    blocks = [block for part in parts for block in part.blocks]
    if len(parts) > 1:
        _check_replicas(folder, name, dtype, blocks)
    return StoredTensor(name, dtype, shape, tuple(blocks))


def _check_replicas(folder: Folder, name: str, dtype: str, blocks: list[StoredBlock]) -> None:
    """Refuse values that several ranks saved under one name and that differ, such as counters."""
    first: dict[Box, tuple[StoredBlock, object]] = {}
    for block in blocks:
        if block.extent is None or block.box.is_empty:
            continue
        found = digest(folder, block.extent, dtype)
        before, expected = first.setdefault(block.box, (block, found))
        if found != expected and before.extent is not None:
            raise CheckpointError(
                f"{folder.root}: {before.extent.file} and {block.extent.file} have different "
                f"values of {quoted(name)} {block.box}, so each rank saved its own; save it under "
                "a name of each rank, or with use_collectives."
            )


def _entries(folder: Folder, fields: dict[str, Any]) -> Iterator[tuple[str, _Described | None]]:
    """The tensors of a description by name; None for an entry that is no tensor."""
    places = dict(_places(fields.get("storage_data")))
    headers = _Headers(folder)
    for name, entry in _pairs(fields.get("state_dict_metadata"), "state_dict_metadata"):
        if not isinstance(name, str):
            raise CheckpointError(f"it names the tensor {quoted(name)}")
        if isinstance(entry, PickledCall) and entry.function == Global(
            _TYPES + "BytesStorageMetadata"
        ):
            yield name, None
        else:
            yield name, _tensor(name, entry, places, headers)


class _Headers:
    """The headers of files that ``dcp.save`` wrote with ``SerializationFormat.SAFETENSORS``.

    Such a file has pickles of what is no tensor, and then a whole safetensors file. All its tensors
    are said to be at the place where that begins.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.of_file: dict[str, tuple[int, Header] | None] = {}

    def extent(self, name: str, dtype: str, box: Box, place: tuple[str, int, int]) -> Extent:
        """Where the elements of a chunk lie, given what the description says."""
        file, start, length = place
        if file not in self.of_file:
            with self.folder.open(file) as opened:
                opened.seek(start)
                is_archive = opened.read(4) == b"PK\3\4"
            whole = None if is_archive else (start, read_header(self.folder, file, start))
            self.of_file[file] = whole
        found = self.of_file[file]
        if found is None:
            return Extent(file, start, length, box.shape, is_archive=True)
        entry = found[1].entries.get(name)
        if found[0] != start or entry is None or (entry.dtype, entry.shape) != (dtype, box.shape):
            raise CheckpointError(
                f"the chunk of {quoted(name)} at {quoted(box.lo)} is not in {file}: with "
                "SerializationFormat.SAFETENSORS, a rank saves only one chunk of a tensor"
            )
        return Extent(file, entry.start, entry.num_bytes, entry.shape)


def _places(values: Any) -> Iterator[tuple[tuple[str, tuple[int, ...]], tuple[str, int, int]]]:
    """For every chunk its key (tensor name, offsets) and its place (file, start, num_bytes)."""
    for key, value in _pairs(values, "storage_data"):
        index, info = _fields(key, _TYPES + "MetadataIndex"), _fields(value, _STORAGE_INFO)
        if index.get("offset") is None:
            continue  # An entry that is no tensor.
        start, length = info.get("offset"), info.get("length")
        if type(start) is not int or type(length) is not int or min(start, length) < 0:
            raise CheckpointError(f"a chunk of {quoted(index.get('fqn'))} is at no place")
        if info.get("transform_descriptors"):
            raise CheckpointError(
                f"{quoted(index.get('fqn'))} was transformed while it was written (compressed, "
                "say); save it without extensions"
            )
        name = index.get("fqn")
        if not isinstance(name, str):
            raise CheckpointError(f"it names the tensor {quoted(name)}")
        file = check_file_name(info.get("relative_path"), "it")
        yield (name, _size(index["offset"])), (file, start, length)


def _tensor(name: str, entry: Any, places: dict[Any, Any], headers: _Headers) -> _Described:
    fields = _fields(entry, _TYPES + "TensorStorageMetadata")
    properties = fields.get("properties")
    state = properties.state if isinstance(properties, PickledCall) else None
    if not isinstance(state, tuple) or not state or not isinstance(state[0], Global):
        raise CheckpointError(f"tensor {quoted(name)} has no dtype")
    chunks = fields.get("chunks")
    if not isinstance(chunks, list):
        raise CheckpointError(f"tensor {quoted(name)} has no chunks")
    try:
        dtype = dtype_name(state[0].name)
    except LayoutError as error:
        raise CheckpointError(f"tensor {quoted(name)}: {error}") from None
    blocks = tuple(_block(name, dtype, chunk, places, headers) for chunk in chunks)
    return _Described(dtype, _size(fields.get("size")), blocks)


def _block(
    name: str, dtype: str, chunk: Any, places: dict[Any, Any], headers: _Headers
) -> StoredBlock:
    fields = _fields(chunk, _TYPES + "ChunkStorageMetadata")
    lo, shape = _size(fields.get("offsets")), _size(fields.get("sizes"))
    if (name, lo) not in places or len(lo) != len(shape):
        raise CheckpointError(f"the chunk of {quoted(name)} at {quoted(lo)} is in no file")
    box = Box(lo, tuple(a + b for a, b in zip(lo, shape, strict=True)))
    return StoredBlock.whole(headers.extent(name, dtype, box, places[name, lo]), box)


def _fields(value: Any, name: str) -> dict[str, Any]:
    """The attributes of a pickled object of class ``name``; any other class is an error."""
    if not isinstance(value, PickledCall) or value.function != Global(name):
        found = value.function if isinstance(value, PickledCall) else type(value).__name__
        raise CheckpointError(f"it has {quoted(found)} where {name} is expected")
    return value.state.texts() if isinstance(value.state, Pairs) else {}


def _pairs(value: Any, name: str) -> list[tuple[Any, Any]]:
    if not isinstance(value, Pairs):
        raise CheckpointError(f"its {name!r} is no dictionary")
    return value.items


def _size(value: Any) -> tuple[int, ...]:
    """The sizes of a ``torch.Size``, which a pickle stores as a call with a tuple."""
    if isinstance(value, PickledCall) and value.function == Global("torch.Size"):
        value = value.args[0] if isinstance(value.args, tuple) and value.args else None
    if not isinstance(value, tuple) or not all(type(n) is int and n >= 0 for n in value):
        raise CheckpointError(f"it has {quoted(value)} where sizes are expected")
    return value


# --- writing ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stored box of a tensor: the archive of ``num_bytes`` bytes at byte ``start`` of ``file``.

    ``dtype`` and ``shape`` are those of the whole tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    file: str
    start: int
    num_bytes: int


def metadata_bytes(chunks: Iterable[Chunk]) -> bytes:
    """The content of the ``.metadata`` file that describes these chunks to ``dcp.load``."""
    import pickle

    import torch
    from torch.distributed.checkpoint import metadata as types
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    tensors: dict[str, types.TensorStorageMetadata] = {}
    places = {}
    for chunk in chunks:
        if chunk.name not in tensors:
            properties = types.TensorProperties(dtype=getattr(torch, chunk.dtype))
            tensors[chunk.name] = types.TensorStorageMetadata(
                properties, torch.Size(chunk.shape), []
            )
        known = tensors[chunk.name].chunks
        offset, sizes = torch.Size(chunk.box.lo), torch.Size(chunk.box.shape)
        places[types.MetadataIndex(chunk.name, offset, len(known))] = _StorageInfo(
            chunk.file, chunk.start, chunk.num_bytes
        )
        known.append(types.ChunkStorageMetadata(offset, sizes))
    return pickle.dumps(
        types.Metadata(
            state_dict_metadata=dict(tensors),
            planner_data={name: (name,) for name in tensors},
            storage_data=places,
            storage_meta=types.StorageMeta(),
        ),
        protocol=4,
    )
