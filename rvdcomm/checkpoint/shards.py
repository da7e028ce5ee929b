"""Shards: a training job's own, written and read by every rank alone; nothing is gathered."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rvdcomm.api.tensors import fault_of, fault_of_mode, resolved
from rvdcomm.checkpoint.catalog import open_checkpoint
from rvdcomm.checkpoint.files import PartFile, sync_folder, write_file
from rvdcomm.checkpoint.forms import rank_header
from rvdcomm.checkpoint.manifest import FILE_NAME, MAX_BYTES, Manifest, Shard, ShardedTensor
from rvdcomm.checkpoint.reader import Reader, bytes_of
from rvdcomm.checkpoint.stored import read_values
from rvdcomm.errors import CheckpointError, LayoutError, ShapeMismatchError
from rvdcomm.json_file import entry
from rvdcomm.layout import ITEM_BYTES, Layout, dtype_name


def save_shards(
    dst_dir: str | Path,
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    rank: int,
) -> None:
    """Write this rank's shards. When every rank has done so, one of them calls ``commit_shards``.

    Args:
        dst_dir: a folder that all ranks share; made if missing.
        tensors: by name, ``[*layouts[name].cell(rank).box.shape]`` each; of layouts that hold the
            rank, all of them. On any device; not modified.
        layouts: of every tensor, the same on all ranks.
        rank: this process's number in the layouts.

    Raises:
        ShapeMismatchError: a tensor is not the shard that its layout gives this rank.
        LayoutError: a tensor has no values to write, or keeps them elsewhere; says what to pass.
        CheckpointError: the folder holds a complete checkpoint.
    """
    root = Path(dst_dir)
    root.mkdir(parents=True, exist_ok=True)
    if (root / FILE_NAME).exists():
        raise CheckpointError(f"{root} holds a complete checkpoint; use a new folder.")
    _check(tensors, layouts, rank)
    ordered = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    dtypes = {name: dtype_name(tensors[name].dtype) for name in ordered}
    header = rank_header({name: (dtypes[name], layouts[name]) for name in ordered}, rank)
    file = PartFile(root, _file_name(rank))
    said = {}
    try:
        file.append(header)
        for name in ordered:
            data = bytes_of(resolved(tensors[name].detach()).cpu().contiguous())
            file.append(data)
            said[name] = [dtypes[name], str(layouts[name]), hashlib.sha256(data).hexdigest()]
        file.commit()
    finally:
        file.discard()
    sync_folder(root)
    write_file(root, _part_name(rank), json.dumps({"tensors": said}).encode())


def _check(tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout], rank: int) -> None:
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
    """Make one checkpoint of what ``ranks`` saved; only then can it be read.

    Raises:
        CheckpointError: a rank's shards are missing, or ranks disagree about a tensor.
    """
    root = Path(dst_dir)
    found: dict[str, dict[int, Shard]] = {}
    kinds: dict[str, tuple[str, str]] = {}
    ranks = sorted(ranks)
    for rank in ranks:
        for name, (dtype, layout, sha256) in _said(root, rank).items():
            if kinds.setdefault(name, (dtype, layout)) != (dtype, layout):
                raise CheckpointError(
                    f"{root}: rank {rank} saved {name!r} as {dtype} {layout}, a rank before it as "
                    f"{' '.join(kinds[name])}."
                )
            found.setdefault(name, {})[rank] = Shard(_file_name(rank), sha256)
    manifest = Manifest(
        {
            name: ShardedTensor(dtype, Layout.parse(layout), found[name])
            for name, (dtype, layout) in kinds.items()
        }
    )
    write_file(root, FILE_NAME, manifest.to_text().encode())
    for rank in ranks:
        (root / _part_name(rank)).unlink()
    return manifest


def _said(root: Path, rank: int) -> dict[str, list[str]]:
    path = root / _part_name(rank)
    try:
        values = entry(read_values(path, MAX_BYTES), "tensors", dict)
        if not all(isinstance(v, list) and len(v) == 3 for v in values.values()):
            raise LayoutError("its tensors are not [dtype, layout, sha256]")
        return values
    except FileNotFoundError:
        raise CheckpointError(
            f"{root}: rank {rank} has saved no shards; call save_shards on it, wait for all ranks, "
            "then commit_shards on one."
        ) from None
    except LayoutError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from None


def load_shards(src_dir: str | Path, layouts: Mapping[str, Layout], rank: int) -> dict[str, Tensor]:
    """Read this rank's shards from a checkpoint of any kind, whatever layouts it was saved in.

    Only the bytes of the boxes are read. Shards that are read as a whole are checked against their
    checksums.

    Args:
        src_dir: a folder in a form that ``open_checkpoint`` knows.
        layouts: of the tensors that are wanted.
        rank: this process's number in the layouts; tensors of layouts without it are left out.

    Returns:
        By name, tensors ``[*layouts[name].cell(rank).box.shape]`` on the CPU. Of value parts,
        part 0 is the tensor and the others are zeros.

    Raises:
        CheckpointError: the checkpoint is damaged or lacks a tensor.
        LayoutError: a layout has another shape than the tensor.
    """
    source = open_checkpoint(src_dir)
    reader = Reader(source.root)
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


def _part_name(rank: int) -> str:
    return f"rank-{rank:05}.json"
