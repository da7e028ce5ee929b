"""Catalog: what the checkpoint in a folder holds, whichever kind it is of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rvdcomm.checkpoint import dcp, journal, manifest
from rvdcomm.checkpoint.safetensors_file import Header, read_header
from rvdcomm.checkpoint.stored import Block, Catalog, StoredTensor, check_file_name, read_values
from rvdcomm.errors import CheckpointError, LayoutError
from rvdcomm.json_file import entry
from rvdcomm.layout import Box
from rvdcomm.text import MAX_INTEGER, quoted

INDEX_NAME = "model.safetensors.index.json"
WHOLE_NAME = "model.safetensors"
MAX_INDEX_BYTES = 256 << 20

SHARDING_KEY = "DCP_SHARDING_INFO"
"""Where ``HuggingFaceStorageWriter`` notes in a file's header at which offsets its shards lie."""


def open_checkpoint(root: str | Path) -> Catalog:
    """What the folder ``root`` holds: sharded (with our manifest), DCP or Hugging Face-style.

    Only names, shapes and places are read.

    Raises:
        CheckpointError: there is no checkpoint, an unfinished one, or a damaged one.
        OSError: a file cannot be read.
    """
    root = Path(root)
    if not root.is_dir():
        raise CheckpointError(f"{root} is no folder with a checkpoint.")
    if journal.is_unfinished(root):
        raise CheckpointError(
            f"{root} is the destination of a reshard that has not finished; run that again first."
        )
    if (root / manifest.FILE_NAME).exists():
        tensors = manifest.stored_tensors(root, manifest.Manifest.load(root))
        return Catalog(root, "sharded", tensors)
    if (root / dcp.FILE_NAME).exists():
        return dcp.read_dcp(root)
    return _safetensors_folder(root)


def _safetensors_folder(root: Path) -> Catalog:
    index = _index(root)
    names = sorted(set(index.values())) if index else _file_names(root)
    headers = {name: _header(root, name) for name in names}
    if any(SHARDING_KEY in header.metadata for header in headers.values()):
        return _dcp_safetensors(root, headers)
    homes = index or _homes(root, headers)
    tensors = {name: _whole_tensor(root, name, file, headers[file]) for name, file in homes.items()}
    return Catalog(root, "whole", tensors)


def _index(root: Path) -> dict[str, str]:
    """The file of every tensor, as the index says it; empty where there is none."""
    path = root / INDEX_NAME
    if not path.exists():
        return {}
    try:
        files = entry(read_values(path, MAX_INDEX_BYTES), "weight_map", dict)
    except LayoutError as error:
        raise CheckpointError(f"{path} is no index: {error}.") from None
    return {name: check_file_name(file, str(path)) for name, file in files.items()}


def _file_names(root: Path) -> list[str]:
    if (root / WHOLE_NAME).exists():
        return [WHOLE_NAME]
    names = sorted(path.name for path in root.glob("*.safetensors"))
    if not names:
        raise CheckpointError(
            f"{root} holds no checkpoint: neither {manifest.FILE_NAME} nor {dcp.FILE_NAME} nor any "
            ".safetensors file."
        )
    return names


def _header(root: Path, name: str) -> Header:
    try:
        return read_header(root / name)
    except FileNotFoundError:
        raise CheckpointError(
            f"{root / INDEX_NAME} names {name}, which is not there; copy it, too."
        ) from None


def _homes(root: Path, headers: Mapping[str, Header]) -> dict[str, str]:
    homes: dict[str, str] = {}
    for file, header in headers.items():
        for name in header.entries:
            if name in homes:
                raise CheckpointError(
                    f"{root}: tensor {quoted(name)} is in {homes[name]} and in {file}, and no "
                    f"{INDEX_NAME} says which one counts; remove one of the files."
                )
            homes[name] = file
    return homes


def _whole_tensor(root: Path, name: str, file: str, header: Header) -> StoredTensor:
    found = header.entries.get(name)
    if found is None:
        raise CheckpointError(
            f"{root / INDEX_NAME} says that {quoted(name)} is in {file}, which does not hold it."
        )
    block = Block(file, found.start, found.num_bytes, Box.of_shape(found.shape))
    return StoredTensor(name, found.dtype, found.shape, (block,))


# --- shards of DCP in safetensors files ---------------------------------------------------------


def _dcp_safetensors(root: Path, headers: Mapping[str, Header]) -> Catalog:
    blocks: dict[str, list[Block]] = {}
    dtypes: dict[str, str] = {}
    for file, header in headers.items():
        offsets = _offsets(root / file, header)
        for name, found in header.entries.items():
            lo = offsets[name]
            if dtypes.setdefault(name, found.dtype) != found.dtype:
                raise CheckpointError(
                    f"{root}: shards of {quoted(name)} are {dtypes[name]} and {found.dtype}."
                )
            box = Box(lo, tuple(a + n for a, n in zip(lo, found.shape, strict=True)))
            blocks.setdefault(name, []).append(Block(file, found.start, found.num_bytes, box))
    tensors = {}
    for name, found_blocks in blocks.items():
        num_dims = {len(block.box.lo) for block in found_blocks}
        if len(num_dims) != 1:
            raise CheckpointError(f"{root}: shards of {quoted(name)} have {num_dims} dims.")
        # As torch reads it: the tensor ends where its last shard does.
        shape = tuple(map(max, zip(*(block.box.hi for block in found_blocks), strict=True)))
        tensors[name] = StoredTensor(name, dtypes[name], shape, tuple(found_blocks))
    return Catalog(root, "dcp-safetensors", tensors)


def _offsets(path: Path, header: Header) -> dict[str, tuple[int, ...]]:
    """Where the shards of a file begin in their tensors."""
    try:
        said = json.loads(header.metadata[SHARDING_KEY])
        out = {name: tuple(entry(said[name], "saved_offsets", list)) for name in header.entries}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} does not say in {SHARDING_KEY} where its shards lie: {quoted(str(error))}."
        ) from None
    for name, lo in out.items():
        is_offset = all(type(n) is int and 0 <= n <= MAX_INTEGER // 2 for n in lo)
        if not is_offset or len(lo) != len(header.entries[name].shape):
            raise CheckpointError(f"{path}: the shard of {quoted(name)} is at {quoted(lo)}.")
    return out
