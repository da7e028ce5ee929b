"""Shards: each rank of a training job writes and reads its own shards, without a process group."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from rvdcomm.api import fault_of, fault_of_mode, resolved
from rvdcomm.checkpoint import dcp, journal
from rvdcomm.checkpoint.catalog import open_checkpoint
from rvdcomm.checkpoint.files import Folder, PartFile, make_folder, sync_folder, write_file
from rvdcomm.checkpoint.forms import rank_header
from rvdcomm.checkpoint.manifest import (
    FILE_NAME,
    KEY_PREFIX,
    Manifest,
    Mark,
    Shard,
    ShardedTensor,
)
from rvdcomm.checkpoint.reader import Reader, bytes_of
from rvdcomm.checkpoint.safetensors_file import read_header
from rvdcomm.errors import CheckpointError, LayoutError, ShapeMismatchError
from rvdcomm.json_file import entry, parse_json
from rvdcomm.layout import ITEM_BYTES, Layout, dtype_name, parse_ranges, ranges_text
from rvdcomm.text import quoted

SAVED_KEY = KEY_PREFIX + "saved"
_NO_SHA256 = "0" * 64


@dataclass(frozen=True)
class Saved:
    """The record in the header of a rank's file, which ``commit_shards`` reads.

    Attributes:
        save_id: as passed to ``save_shards``.
        layouts_sha256: checksum of the layouts of all tensors, on all ranks.
        ranks: the ranks of these layouts, as text.
        shards: layout and sha256 of each of the rank's tensors, by name.
    """

    save_id: str
    layouts_sha256: str
    ranks: str
    shards: Mapping[str, tuple[str, str]]


def save_shards(
    dst_dir: str | Path,
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    rank: int,
    *,
    save_id: str = "",
) -> None:
    """Write this rank's shards. When every rank has done so, one of them calls ``commit_shards``.

    Nothing can be read before the commit. Without ``save_id`` a rank can save only once into a
    folder, since it would be unknown whether other ranks' shards belong to its first or second
    save.

    Args:
        dst_dir: a folder that all ranks share; made if missing.
        tensors: by name, the shard of every tensor whose layout holds the rank,
            ``[*layouts[name].cell(rank).box.shape]``. On any device; not modified.
        layouts: the layout of every tensor, the same on all ranks.
        rank: this process's number in the layouts.
        save_id: a text that all ranks of this save pass and that no other save has, such as a
            random number that one rank broadcasts. With it, the shards of a save that was never
            committed are replaced; ``commit_shards`` refuses ranks with different texts.

    Raises:
        ShapeMismatchError: a tensor is not the shard that its layout gives this rank.
        LayoutError: there is no layout, or a tensor has no values to write, or keeps them
            elsewhere; the message says what to pass.
        CheckpointError: the folder holds another checkpoint, or this rank's shards already.
    """
    root = make_folder(dst_dir)
    _check_open(root, rank, save_id)
    _check(tensors, layouts, rank)
    ordered = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    dtypes = {name: dtype_name(tensors[name].dtype) for name in ordered}
    mark = Mark(uuid.uuid4().hex, rank)

    def header(checksums: Mapping[str, str]) -> bytes:
        saved = Saved(
            save_id,
            _sha256({name: str(layout) for name, layout in layouts.items()}),
            ranges_text(sorted({r for layout in layouts.values() for r in layout.ranks})),
            {name: (str(layouts[name]), checksums[name]) for name in ordered},
        )
        kinds = {name: (dtypes[name], layouts[name]) for name in ordered}
        return rank_header(kinds, rank, mark, {SAVED_KEY: json.dumps(asdict(saved))})

    # The checksums are known only after the data is written, so placeholders of the same length
    # are written first.
    checksums = dict.fromkeys(ordered, _NO_SHA256)
    file = PartFile(root, _file_name(rank))
    try:
        file.append(header(checksums))
        for name in ordered:
            data = bytes_of(resolved(tensors[name].detach()).cpu().contiguous())
            file.append(data)
            checksums[name] = hashlib.sha256(data).hexdigest()
        file.overwrite_start(header(checksums))
        file.commit()
    finally:
        file.discard()
    sync_folder(root)


def _check_open(root: Path, rank: int | None = None, save_id: str = "") -> Folder:
    """Refuse a folder with another checkpoint, or with shards of the rank with this ``save_id``."""
    folder = Folder(root)
    names = folder.names()
    for name in (FILE_NAME, journal.FILE_NAME, dcp.FILE_NAME):
        if name in names:
            raise CheckpointError(
                f"{root} holds a complete checkpoint or another one ({name}); use a new folder."
            )
    if rank is None or _file_name(rank) not in names:
        return folder
    before = _saved(folder, rank)[1].save_id
    if before == save_id:
        raise CheckpointError(
            f"{root} holds shards that rank {rank} saved before with save_id={save_id!r} and that "
            "were never committed; use a new folder, or a save_id that all ranks of this save "
            "pass and that no other save has."
        )
    return folder


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _check(tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout], rank: int) -> None:
    if not layouts:
        raise LayoutError(
            f"save_shards: rank {rank} passes no layouts; there is no tensor to save."
        )
    expected = {name for name, layout in layouts.items() if rank in layout}
    if set(tensors) != expected:
        odd = sorted(set(tensors) ^ expected)
        raise ShapeMismatchError(
            f"save_shards: rank {rank} passes {len(tensors)} tensors and {len(expected)} layouts "
            f"hold it; they differ in {odd[:5]}."
        )
    for name, tensor in tensors.items():
        fault = fault_of_mode() or fault_of(tensor)
        if fault is not None:
            raise LayoutError(f"save_shards: rank {rank}: tensor {name!r} {fault}")
        shape = layouts[name].cell(rank).box.shape
        if tuple(tensor.shape) != shape:
            raise ShapeMismatchError(
                f"save_shards: rank {rank} passes {name!r} {list(tensor.shape)}, its shard under "
                f"{layouts[name]} is {list(shape)}."
            )


def commit_shards(dst_dir: str | Path, ranks: Iterable[int]) -> Manifest:
    """Make one checkpoint of the shards that ``ranks`` saved; only then can it be read.

    Args:
        dst_dir: the folder that the ranks passed to ``save_shards``.
        ranks: all ranks of the layouts. Files of other ranks are not part of the checkpoint.

    Raises:
        CheckpointError: the folder holds a complete checkpoint, a rank's shards are missing or
            belong to another save, or ranks disagree about a tensor.
    """
    root = Path(dst_dir)
    folder = _check_open(root)
    found: dict[str, dict[int, Shard]] = {}
    kinds: dict[str, tuple[str, str]] = {}
    saves: dict[str, str] = {}
    first: tuple[int, Saved] | None = None
    for rank in (ranks := sorted(set(ranks))):
        mark, saved, dtypes = _saved(folder, rank)
        for name, (layout, sha256) in saved.shards.items():
            kind = (dtypes[name], layout)
            if kinds.setdefault(name, kind) != kind:
                raise CheckpointError(
                    f"{root}: rank {rank} saved {name!r} as {' '.join(kind)}, a rank before it as "
                    f"{' '.join(kinds[name])}."
                )
            found.setdefault(name, {})[rank] = Shard(_file_name(rank), sha256)
            saves[_file_name(rank)] = mark.save
        first = first or (rank, saved)
        _check_same_save(root, first, (rank, saved))
    if first is None:
        raise CheckpointError(f"{root}: commit_shards needs the ranks that saved, got none.")
    if missing := sorted(set(parse_ranges(first[1].ranks)) - set(ranks)):
        raise CheckpointError(
            f"{root}: the layouts hold ranks {first[1].ranks}, and commit_shards was not given "
            f"{ranges_text(missing)}."
        )
    manifest = Manifest(
        {
            name: ShardedTensor(dtype, Layout.parse(layout), found[name])
            for name, (dtype, layout) in kinds.items()
        },
        saves,
    )
    write_file(root, FILE_NAME, manifest.to_text().encode())
    return manifest


def _check_same_save(root: Path, a: tuple[int, Saved], b: tuple[int, Saved]) -> None:
    for what, of_a, of_b in (
        ("save_id", a[1].save_id, b[1].save_id),
        ("the sha256 of all layouts", a[1].layouts_sha256, b[1].layouts_sha256),
    ):
        if of_a != of_b:
            raise CheckpointError(
                f"{root}: ranks {a[0]} and {b[0]} saved two different checkpoints: {what} is "
                f"{quoted(of_a)} and {quoted(of_b)}; save again on all ranks."
            )


def _saved(folder: Folder, rank: int) -> tuple[Mark, Saved, dict[str, str]]:
    """The mark of a rank's file, what was saved in it, and the dtype of each tensor."""
    name = _file_name(rank)
    if name not in folder.names():
        raise CheckpointError(
            f"{folder.root}: rank {rank} has saved no shards; call save_shards on it, wait for all "
            "ranks, then commit_shards on one."
        )
    header = read_header(folder, name)
    mark = Mark.of(folder, name, header)
    try:
        values = parse_json(header.metadata.get(SAVED_KEY, "").encode())
        shards = {n: tuple(v) for n, v in entry(values, "shards", dict).items()}
        is_known = mark is not None and mark.rank == rank and set(shards) == set(header.entries)
        if mark is None or not is_known or not all(map(_is_texts, shards.values())):
            raise LayoutError(f"its mark is {mark} and its shards are {quoted(list(shards))}")
        save_id, layouts, ranks = (
            entry(values, key, str) for key in ("save_id", "layouts_sha256", "ranks")
        )
        parse_ranges(ranks)  # An error for a text that no save wrote.
        dtypes = {n: e.dtype for n, e in header.entries.items()}
        return mark, Saved(save_id, layouts, ranks, shards), dtypes
    except (LayoutError, TypeError) as error:
        raise CheckpointError(
            f"{folder.root / name} is no file of save_shards of rank {rank}: {error}."
        ) from None


def _is_texts(values: tuple[object, ...]) -> bool:
    return len(values) == 2 and all(isinstance(value, str) for value in values)


def load_shards(
    src_dir: str | Path,
    layouts: Mapping[str, Layout],
    rank: int,
    *,
    follow_symlinks: bool = False,
) -> dict[str, Tensor]:
    """Read this rank's shards from a checkpoint of any kind that was saved in any layouts.

    Only the bytes of the boxes are read. Shards that are read as a whole are checked against their
    checksums.

    Args:
        src_dir: a folder in a form that ``open_checkpoint`` knows.
        layouts: the layouts of the tensors to read, by name.
        rank: this process's number in the layouts; tensors of layouts without it are left out.
        follow_symlinks: also follow links to files outside of the folder.

    Returns:
        By name, tensors ``[*layouts[name].cell(rank).box.shape]`` on the CPU. If a layout has
        several value parts, part 0 holds the values and the others are zeros.

    Raises:
        CheckpointError: the checkpoint was never committed, is damaged or lacks a tensor.
        LayoutError: a layout has another shape than the tensor.
    """
    source = open_checkpoint(src_dir, follow_symlinks=follow_symlinks)
    reader = Reader(source.folder)
    out = {}
    for name, layout in layouts.items():
        tensor = source.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{src_dir} holds no tensor {name!r}.")
        if tensor.shape != layout.shape:
            raise LayoutError(f"tensor {name!r} has shape {tensor.shape}, its layout is {layout}.")
        if rank not in layout:
            continue
        cell = layout.cell(rank)
        shard = torch.zeros(cell.box.shape, dtype=getattr(torch, tensor.dtype))
        if cell.part == 0 and not cell.box.is_empty:
            scratch = memoryview(bytearray(cell.box.num_elements * ITEM_BYTES[tensor.dtype]))
            reader.gather(tensor, cell.box, shard, scratch)
            reader.check(tensor)
        out[name] = shard
    return out


def _file_name(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"
