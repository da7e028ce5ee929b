"""Hugging Face-style folders: finds the files of one checkpoint among all safetensors files.

A folder may hold several checkpoints: ``model.safetensors`` beside its variant
``model.fp16.safetensors``, or ``consolidated.safetensors.index.json`` with other names of the same
weights. ``open_checkpoint(index=...)`` says which one is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rvdcomm.checkpoint import manifest
from rvdcomm.checkpoint.folder import Folder, check_file_name
from rvdcomm.checkpoint.safetensors_file import Header, TensorEntry, read_header
from rvdcomm.checkpoint.stored import Extent, StoredBlock, StoredTensor
from rvdcomm.errors import CheckpointError, LayoutError
from rvdcomm.json_file import entry
from rvdcomm.layout import Box
from rvdcomm.text import quoted

INDEX_NAME = "model.safetensors.index.json"
WHOLE_NAME = "model.safetensors"
MAX_INDEX_BYTES = 256 << 20

INDEX = re.compile(r"(.+)\.safetensors\.index(?:\.(.+))?\.json")
"""Names of indices: the name of the weights, and the variant, if any."""

_NUMBERED = re.compile(r"(.*?)-?(\d{5})-of-(\d{5})((?:\.[^.]+)?)\.safetensors")
_SHARD = re.compile(r"shard-\d+-")


def is_weights(name: str) -> bool:
    """Whether a file of this name has tensors, or says where they are."""
    return name.endswith(".safetensors") or INDEX.fullmatch(name) is not None


def chosen(folder: Folder, names: Sequence[str], index: str | None) -> str | list[str]:
    """The index, or else the files, of the checkpoint that is to be read.

    Args:
        folder: the folder.
        names: the names of its files.
        index: the index or file that the caller names; None chooses ``model.*`` or the only one.

    Raises:
        CheckpointError: the folder has no such index, or several checkpoints.
    """
    files = [name for name in names if name.endswith(".safetensors")]
    indices = [name for name in names if INDEX.fullmatch(name)]
    if index is not None:
        if index not in (*files, *indices):
            raise CheckpointError(
                f"{folder.root} has no index or safetensors file {quoted(index)}; it has "
                f"{quoted([*indices, *files])}."
            )
        return [index] if index in files else index
    if INDEX_NAME in indices:
        return INDEX_NAME
    if WHOLE_NAME in files:
        return [WHOLE_NAME]
    plain = [name for name in indices if _variant(name) is None]
    single = [f for f in files if not _NUMBERED.fullmatch(f) and not _is_variant(f, names)]
    for found in (plain, None if single else indices):
        if found and len(found) > 1:
            raise CheckpointError(
                f"{folder.root} holds several checkpoints, {quoted(found)}; say which one is to be "
                "read: --index NAME (index=NAME)."
            )
        if found:
            return found[0]
    return [file for file in files if not _is_variant(file, names)]


def _variant(index: str) -> str | None:
    match = INDEX.fullmatch(index)
    return match[2] if match else None


def _is_variant(file: str, names: Iterable[str]) -> bool:
    """Whether a file is a variant, such as fp16, of other weights in the folder."""
    numbered = _NUMBERED.fullmatch(file)
    stem = numbered[1] + numbered[4] if numbered else file.removesuffix(".safetensors")
    base = f"{stem.rpartition('.')[0]}.safetensors"
    return base in names or f"{base}.index.json" in names


def read_indexed(
    folder: Folder, index: str, tensors_only: bool
) -> tuple[dict[str, StoredTensor], dict[str, Header], tuple[str, ...]]:
    """Tensors, headers, and names left out, of a checkpoint whose index says where tensors are."""
    path = folder.root / index
    try:
        homes = entry(folder.read_json(index, MAX_INDEX_BYTES), "weight_map", dict)
    except (CheckpointError, LayoutError) as error:
        raise CheckpointError(f"{path} is no index: {str(error).rstrip('.')}.") from None
    files = sorted({check_file_name(file, str(path)) for file in homes.values()})
    headers = {file: read_header(folder, file) for file in files}
    manifest.check_committed(folder, headers, of_one_save=True)
    left_out = []
    for file, header in headers.items():
        odd = [name for name in header.entries if homes.get(name) != file]
        if odd and not tensors_only:
            raise CheckpointError(
                f"{path} leaves out tensor {quoted(odd[0])}, which {file} holds; add it to the "
                "index, remove it from the file, or say --tensors-only (tensors_only=True) to "
                "leave it out."
            )
        left_out += [name for name in odd if name not in homes]
    tensors = {n: _whole_tensor(path, n, file, headers[file]) for n, file in homes.items()}
    return tensors, headers, tuple(sorted(set(left_out)))


def read_files(folder: Folder, headers: Mapping[str, Header]) -> dict[str, StoredTensor]:
    """The tensors of files that are whole without an index."""
    check_numbers(folder, headers, needs_index=True)
    homes: dict[str, str] = {}
    for file, header in headers.items():
        for name in header.entries:
            if name in homes:
                raise CheckpointError(
                    f"{folder.root}: tensor {quoted(name)} is in {homes[name]} and in {file}, and "
                    f"no {INDEX_NAME} says which one counts; remove one of the files, or say "
                    "--index NAME (index=NAME) to read one of them."
                )
            homes[name] = file
    path = folder.root
    return {n: _whole_tensor(path, n, file, headers[file]) for n, file in homes.items()}


def check_numbers(folder: Folder, files: Iterable[str], *, needs_index: bool) -> None:
    """Refuse files such as ``model-00001-of-00003`` whose other files or index are missing.

    The files of a ``HuggingFaceStorageWriter`` begin with the number of a rank, ``shard-00002-``,
    and a rank writes only the files in which it has tensors. The files of all ranks together have
    all numbers.
    """
    found: dict[tuple[str, ...], set[int]] = {}
    for file in files:
        if match := _NUMBERED.fullmatch(file):
            key = (_SHARD.sub("", match[1]), match[4], match[3])
            found.setdefault(key, set()).add(int(match[2]))
    for file in files:
        if not (match := _NUMBERED.fullmatch(file)):
            continue
        numbers, total = found[_SHARD.sub("", match[1]), match[4], match[3]], int(match[3])
        if len(numbers) < total or (needs_index and total > 1):
            missing = f"{INDEX_NAME} is missing" if needs_index else f"{len(numbers)} are there"
            raise CheckpointError(
                f"{folder.root}: {file} is one of {total} files, and {missing}; copy all files "
                "of the checkpoint."
            )


def _whole_tensor(index: Path, name: str, file: str, header: Header) -> StoredTensor:
    found = header.entries.get(name)
    if found is None:
        raise CheckpointError(
            f"{index} says that {quoted(name)} is in {file}, which does not hold it."
        )
    block = StoredBlock.whole(extent_of(file, found), Box.of_shape(found.shape))
    return StoredTensor(name, found.dtype, found.shape, (block,))


def extent_of(file: str, found: TensorEntry) -> Extent:
    """Where a tensor of a safetensors file lies."""
    return Extent(file, found.start, found.num_bytes, found.shape)
