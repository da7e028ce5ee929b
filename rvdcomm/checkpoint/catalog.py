"""Catalog: lists the tensors of the checkpoint in a folder, in any of the known forms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rvdcomm.checkpoint import dcp, journal, manifest
from rvdcomm.checkpoint.faults import as_checkpoint_error
from rvdcomm.checkpoint.folder import Folder
from rvdcomm.checkpoint.hugging_face import (
    check_numbers,
    chosen,
    extent_of,
    is_weights,
    read_files,
    read_indexed,
)
from rvdcomm.checkpoint.safetensors_file import Header, read_header
from rvdcomm.checkpoint.stored import Catalog, StoredBlock, StoredTensor
from rvdcomm.errors import CheckpointError
from rvdcomm.json_file import entry
from rvdcomm.layout import Box
from rvdcomm.text import MAX_INTEGER, quoted

SHARDING_KEY = "DCP_SHARDING_INFO"
"""Key in a file's header under which ``HuggingFaceStorageWriter`` notes the offsets of shards."""

_FILE_KEYS = (SHARDING_KEY, "DCP_VERSION", manifest.KEY_PREFIX)
"""Beginnings of the keys in ``__metadata__`` that describe a file, not the model."""


def open_checkpoint(
    root: str | Path,
    *,
    index: str | None = None,
    tensors_only: bool = False,
    follow_symlinks: bool = False,
) -> Catalog:
    """List the checkpoint in a folder: sharded (with our manifest), DCP or Hugging Face-style.

    Only names, shapes and positions of tensors are read, not their elements.

    Args:
        root: the folder.
        index: the index or safetensors file to read, if the folder holds several Hugging
            Face-style checkpoints (variants such as fp16, other names of the same weights). By
            default ``model.*`` is read, or the only one that is no variant.
        tensors_only: leave out tensors that the index does not name, instead of raising an error.
        follow_symlinks: also follow links to files outside of the folder (``Folder``).

    Raises:
        CheckpointError: there is no checkpoint, or it was never committed, mixes two saves, is
            damaged, has no tensors, has a link out of the folder, or a file cannot be read.
    """
    with as_checkpoint_error(f"reading {root}", root, "read it again"):
        folder = Folder(root, follow_symlinks=follow_symlinks)
        catalog = _catalog(folder, folder.names(), index, tensors_only)
    if not catalog.tensors:
        raise CheckpointError(f"{root} holds a {catalog.kind} checkpoint without any tensor.")
    return catalog


def _catalog(folder: Folder, names: list[str], index: str | None, tensors_only: bool) -> Catalog:
    if journal.FILE_NAME in names and not journal.is_finished(folder):
        raise CheckpointError(
            f"{folder.root} is the destination of a reshard that has not finished; run that again "
            "first."
        )
    if manifest.FILE_NAME in names:
        tensors, headers = manifest.stored_tensors(folder, manifest.Manifest.load(folder))
        return Catalog(folder, "sharded", tensors, metadata=_metadata(headers))
    if dcp.is_dcp(names):
        return dcp.read_dcp(folder, names)
    if not any(map(is_weights, names)):
        raise CheckpointError(
            f"{folder.root} holds no checkpoint: neither {manifest.FILE_NAME} nor {dcp.FILE_NAME} "
            "nor any .safetensors file. One of these is written last, so a save may have stopped "
            "before its end."
        )
    files = chosen(folder, names, index)
    if isinstance(files, str):
        tensors, headers, left_out = read_indexed(folder, files, tensors_only)
        return Catalog(folder, "whole", tensors, unnamed=left_out, metadata=_metadata(headers))
    headers = {file: read_header(folder, file) for file in files}
    manifest.check_committed(folder, headers)
    if any(SHARDING_KEY in header.metadata for header in headers.values()):
        check_numbers(folder, files, needs_index=False)
        return _dcp_safetensors(folder, headers)
    return Catalog(folder, "whole", read_files(folder, headers), metadata=_metadata(headers))


def _metadata(headers: Mapping[str, Header]) -> dict[str, tuple[str, ...]]:
    """The texts about the model in the headers: by key, the different texts of all files."""
    found: dict[str, tuple[str, ...]] = {}
    for header in headers.values():
        for key, text in header.metadata.items():
            if key.startswith(_FILE_KEYS) or (key, text) == ("format", "pt"):
                continue
            if text not in found.setdefault(key, (text,)):
                found[key] += (text,)
    return found


# --- shards of DCP in safetensors files ---------------------------------------------------------


def _dcp_safetensors(folder: Folder, headers: Mapping[str, Header]) -> Catalog:
    root = folder.root
    blocks: dict[str, list[StoredBlock]] = {}
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
            blocks.setdefault(name, []).append(StoredBlock.whole(extent_of(file, found), box))
    tensors = {}
    for name, found_blocks in blocks.items():
        num_dims = {len(block.box.lo) for block in found_blocks}
        if len(num_dims) != 1:
            raise CheckpointError(f"{root}: shards of {quoted(name)} have {num_dims} dims.")
        # As torch does when it reads: the tensor ends where its last shard ends.
        shape = tuple(map(max, zip(*(block.box.hi for block in found_blocks), strict=True)))
        tensors[name] = StoredTensor(name, dtypes[name], shape, tuple(found_blocks))
    return Catalog(folder, "dcp-safetensors", tensors, metadata=_metadata(headers))


def _offsets(path: Path, header: Header) -> dict[str, tuple[int, ...]]:
    """For each shard of a file, by tensor name, the index in the tensor at which it begins."""
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
