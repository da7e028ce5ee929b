"""DCP, ``torch.distributed.checkpoint``: reads and writes its description of a checkpoint.

``.metadata`` is a pickle of torch's own dataclasses. It is read as data (``inert``), never
unpickled. ``archive`` locates the elements in the archives that it points to.

Source: torch/distributed/checkpoint/metadata.py and filesystem.py, torch 2.11 to 2.13; the names
of the classes are part of every file ever written, so they do not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rvdcomm.checkpoint.folder import Folder, check_file_name
from rvdcomm.checkpoint.inert import MAX_BYTES, Global, Pairs, PickledCall, inert
from rvdcomm.checkpoint.stored import Block, Catalog, Extent, StoredTensor
from rvdcomm.errors import CheckpointError, LayoutError
from rvdcomm.layout import Box, dtype_name
from rvdcomm.text import quoted

FILE_NAME = ".metadata"

_TYPES = "torch.distributed.checkpoint.metadata."
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"


def read_dcp(folder: Folder) -> Catalog:
    """The catalog of the checkpoint that ``dcp.save`` wrote to a folder.

    Raises:
        CheckpointError: the description is damaged, or has content that ``dcp.save`` never writes.
    """
    try:
        said = inert(folder.read(FILE_NAME, MAX_BYTES))
        return _catalog(folder, _fields(said, _TYPES + "Metadata"))
    except (CheckpointError, LayoutError) as error:
        raise CheckpointError(
            f"{folder.root / FILE_NAME} describes no checkpoint that can be read: "
            f"{str(error).rstrip('.')}."
        ) from None


def _catalog(folder: Folder, fields: dict[str, Any]) -> Catalog:
    places = dict(_places(fields.get("storage_data")))
    tensors: dict[str, StoredTensor] = {}
    others: list[str] = []
    for name, entry in _pairs(fields.get("state_dict_metadata"), "state_dict_metadata"):
        if not isinstance(name, str):
            raise CheckpointError(f"it names the tensor {quoted(name)}")
        if isinstance(entry, PickledCall) and entry.function == Global(
            _TYPES + "BytesStorageMetadata"
        ):
            others.append(name)
        else:
            tensors[name] = _tensor(name, entry, places)
    return Catalog(folder, "dcp", tensors, tuple(sorted(others)))


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


def _tensor(name: str, entry: Any, places: dict[Any, Any]) -> StoredTensor:
    fields = _fields(entry, _TYPES + "TensorStorageMetadata")
    properties = fields.get("properties")
    state = properties.state if isinstance(properties, PickledCall) else None
    if not isinstance(state, tuple) or not state or not isinstance(state[0], Global):
        raise CheckpointError(f"tensor {quoted(name)} has no dtype")
    chunks = fields.get("chunks")
    if not isinstance(chunks, list):
        raise CheckpointError(f"tensor {quoted(name)} has no chunks")
    blocks = tuple(_block(name, chunk, places) for chunk in chunks)
    try:
        dtype = dtype_name(state[0].name)
    except LayoutError as error:
        raise CheckpointError(f"tensor {quoted(name)}: {error}") from None
    return StoredTensor(name, dtype, _size(fields.get("size")), blocks)


def _block(name: str, chunk: Any, places: dict[Any, Any]) -> Block:
    fields = _fields(chunk, _TYPES + "ChunkStorageMetadata")
    lo, shape = _size(fields.get("offsets")), _size(fields.get("sizes"))
    if (name, lo) not in places or len(lo) != len(shape):
        raise CheckpointError(f"the chunk of {quoted(name)} at {quoted(lo)} is in no file")
    file, start, length = places[name, lo]
    box = Box(lo, tuple(a + b for a, b in zip(lo, shape, strict=True)))
    return Block.whole(Extent(file, start, length, shape, is_archive=True), box)


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
