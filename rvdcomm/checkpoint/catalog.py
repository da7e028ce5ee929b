"""Catalog: lists the tensors of the checkpoint in a folder, in any of the known forms."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from rvdcomm.checkpoint import dcp, journal, manifest
from rvdcomm.checkpoint.faults import as_checkpoint_error
from rvdcomm.checkpoint.folder import Folder, check_file_name
from rvdcomm.checkpoint.safetensors_file import Header, TensorEntry, read_header
from rvdcomm.checkpoint.stored import Block, Catalog, Extent, StoredTensor
from rvdcomm.errors import CheckpointError, LayoutError
from rvdcomm.json_file import entry
from rvdcomm.layout import Box
from rvdcomm.text import MAX_INTEGER, quoted

INDEX_NAME = "model.safetensors.index.json"
WHOLE_NAME = "model.safetensors"
MAX_INDEX_BYTES = 256 << 20

SHARDING_KEY = "DCP_SHARDING_INFO"
"""Key in a file's header under which ``HuggingFaceStorageWriter`` notes the offsets of shards."""

_FILE_KEYS = (SHARDING_KEY, "DCP_VERSION", manifest.KEY_PREFIX)
"""Beginnings of the keys in ``__metadata__`` that describe a file, not the model."""

_NUMBERED = re.compile(r"(.*?)-?(\d{5})-of-(\d{5})\.safetensors")


def open_checkpoint(root: str | Path, *, follow_symlinks: bool = False) -> Catalog:
    """List the checkpoint in a folder: sharded (with our manifest), DCP or Hugging Face-style.

    Only names, shapes and positions of tensors are read, not their elements.

    Args:
        root: the folder.
        follow_symlinks: also follow links to files outside of the folder (``Folder``).

    Raises:
        CheckpointError: there is no checkpoint, or it was never committed, mixes two saves, is
            damaged, has no tensors, has a link out of the folder, or a file cannot be read.
    """
    with as_checkpoint_error(f"reading {root}", root, "read it again"):
        folder = Folder(root, follow_symlinks=follow_symlinks)
        catalog = _catalog(folder, folder.names())
    if not catalog.tensors:
        raise CheckpointError(f"{root} holds a {catalog.kind} checkpoint without any tensor.")
    return catalog


def _catalog(folder: Folder, names: list[str]) -> Catalog:
    if journal.FILE_NAME in names and not journal.is_finished(folder):
        raise CheckpointError(
            f"{folder.root} is the destination of a reshard that has not finished; run that again "
            "first."
        )
    if manifest.FILE_NAME in names:
        tensors, headers = manifest.stored_tensors(folder, manifest.Manifest.load(folder))
        return Catalog(folder, "sharded", tensors, metadata=_metadata(headers))
    if dcp.FILE_NAME in names:
        return dcp.read_dcp(folder)
    files = [name for name in names if name.endswith(".safetensors")]
    if INDEX_NAME in names:
        return _indexed(folder)
    if not files:
        raise CheckpointError(
            f"{folder.root} holds no checkpoint: neither {manifest.FILE_NAME} nor {dcp.FILE_NAME} "
            "nor any .safetensors file. One of these is written last, so a save may have stopped "
            "before its end."
        )
    return _unindexed(folder, [WHOLE_NAME] if WHOLE_NAME in files else files)


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


def _indexed(folder: Folder) -> Catalog:
    """A Hugging Face-style checkpoint whose index says which file has which tensor."""
    path = folder.root / INDEX_NAME
    try:
        homes = entry(folder.read_json(INDEX_NAME, MAX_INDEX_BYTES), "weight_map", dict)
    except (CheckpointError, LayoutError) as error:
        raise CheckpointError(f"{path} is no index: {str(error).rstrip('.')}.") from None
    files = sorted({check_file_name(file, str(path)) for file in homes.values()})
    headers = {file: read_header(folder, file) for file in files}
    manifest.check_committed(folder, headers, of_one_save=True)
    for file, header in headers.items():
        if odd := [name for name in header.entries if name not in homes]:
            raise CheckpointError(
                f"{path} leaves out tensor {quoted(odd[0])}, which {file} holds; add it to the "
                "index, or remove it from the file."
            )
    return _whole(folder, homes, headers)


def _unindexed(folder: Folder, files: list[str]) -> Catalog:
    """Files of whole tensors, or shards of DCP; the headers tell which they are."""
    headers = {file: read_header(folder, file) for file in files}
    manifest.check_committed(folder, headers)
    if any(SHARDING_KEY in header.metadata for header in headers.values()):
        _check_numbers(folder, files, needs_index=False)
        return _dcp_safetensors(folder, headers)
    _check_numbers(folder, files, needs_index=True)
    return _whole(folder, _homes(folder.root, headers), headers)


def _check_numbers(folder: Folder, files: Iterable[str], *, needs_index: bool) -> None:
    """Refuse files such as ``model-00001-of-00003`` whose other files or index are missing."""
    numbered = {file: match for file in files if (match := _NUMBERED.fullmatch(file))}
    for file, match in numbered.items():
        prefix, total = match[1], int(match[3])
        found = {int(m[2]) for m in numbered.values() if (m[1], m[3]) == (prefix, match[3])}
        if len(found) < total or (needs_index and total > 1):
            missing = f"{INDEX_NAME} is missing" if needs_index else f"{len(found)} are there"
            raise CheckpointError(
                f"{folder.root}: {file} is one of {total} files, and {missing}; copy all files "
                "of the checkpoint."
            )


def _whole(folder: Folder, homes: Mapping[str, str], headers: Mapping[str, Header]) -> Catalog:
    tensors = {n: _whole_tensor(folder.root, n, file, headers[file]) for n, file in homes.items()}
    return Catalog(folder, "whole", tensors, metadata=_metadata(headers))


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
    block = Block.whole(_extent(file, found), Box.of_shape(found.shape))
    return StoredTensor(name, found.dtype, found.shape, (block,))


def _extent(file: str, found: TensorEntry) -> Extent:
    return Extent(file, found.start, found.num_bytes, found.shape)


# --- shards of DCP in safetensors files ---------------------------------------------------------


def _dcp_safetensors(folder: Folder, headers: Mapping[str, Header]) -> Catalog:
    root = folder.root
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
            blocks.setdefault(name, []).append(Block.whole(_extent(file, found), box))
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
