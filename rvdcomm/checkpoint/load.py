"""Load: each rank of a job reads its own shards of a checkpoint, without a process group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rvdcomm.api import ManyMemory, fault_of_out
from rvdcomm.checkpoint.catalog import open_checkpoint
from rvdcomm.checkpoint.faults import as_checkpoint_error
from rvdcomm.checkpoint.reader import Reader
from rvdcomm.checkpoint.stored import Catalog, StoredTensor
from rvdcomm.checkpoint.target import CONVERTED
from rvdcomm.checkpoint.windows import windows
from rvdcomm.errors import CheckpointError, LayoutError, ShapeMismatchError
from rvdcomm.layout import Box, Layout, dtype_name
from rvdcomm.text import quoted

WINDOW_BYTES = 64 << 20
"""Most bytes of the buffers in which values are joined or converted."""

_MAX_NAMES = 20

View = Callable[[Mapping[str, StoredTensor]], Mapping[str, StoredTensor]]
"""From the tensors of a checkpoint to those that are read."""


def load_shards(
    src_dir: str | Path,
    layouts: Mapping[str, Layout],
    rank: int,
    *,
    strict: bool = True,
    dtype: torch.dtype | str | None = None,
    out: Mapping[str, Tensor] | None = None,
    index: str | None = None,
    verify: bool = True,
    follow_symlinks: bool = False,
    view: View | None = None,
) -> dict[str, Tensor]:
    """Read this rank's shards from a checkpoint of any kind that was saved in any layouts.

    Only the boxes are read, and what else is in the blocks of 1 MiB that they touch: the checksum
    of every such block is compared.

    Args:
        src_dir: a folder in a form that ``open_checkpoint`` knows.
        layouts: the layouts of the tensors to read, by name.
        rank: this process's number in the layouts; tensors of layouts without it are left out.
        strict: if false, tensors that the checkpoint lacks are left out, too, and a file may hold
            tensors that the checkpoint's index does not name.
        dtype: convert tensors of ``CONVERTED`` dtypes to this one.
        out: by name, tensors into which shards are read, on any device; their dtypes count in place
            of ``dtype``. A layout's tensor that is not in ``out`` is made. They may not overlap,
            except that tied names (equal layouts and equal values) may have one tensor.
        index: the index or file to read, if the folder holds several (``open_checkpoint``).
        verify: if false, no checksums are compared, and nothing but the boxes is read.
        follow_symlinks: also follow links to files outside of the folder.
        view: what the tensors of the checkpoint become before they are read: given all of them by
            name, it returns those that ``layouts`` may name. Steps (``Stack(...).apply``) and
            ``cropped`` move no data.

    Returns:
        By name, tensors ``[*layouts[name].cell(rank).box.shape]``: those of ``out``, others on the
        CPU. If a layout has several value parts, part 0 holds the values and the others are zeros.

    Raises:
        CheckpointError: the checkpoint was never committed, is damaged, lacks tensors, or cannot be
            read. Tensors of ``out`` may hold anything if it is found damaged while it is read, and
            are unchanged otherwise.
        LayoutError: a layout has another shape than the tensor, a dtype cannot be converted, or a
            tensor of ``out`` cannot be written or overlaps another one.
        ShapeMismatchError: a tensor of ``out`` has another shape than the shard.
    """
    source = open_checkpoint(
        src_dir, follow_symlinks=follow_symlinks, index=index, tensors_only=not strict
    )
    if view is not None:
        source = replace(source, tensors=dict(view(source.tensors)))
    found = _requested(source, layouts, strict)
    _check_writable(out or {}, layouts)
    made = {
        name: _room(tensor, layouts[name], rank, dtype, (out or {}).get(name))
        for name, tensor in found.items()
        if rank in layouts[name]
    }
    leader = _tied({name: made[name] for name in out or {} if name in made}, layouts)
    reader = Reader(source.folder, verify=verify)
    with torch.no_grad(), as_checkpoint_error(f"reading {src_dir}", src_dir, "read it again"):
        for name in sorted(made, key=leader.__contains__):  # Each after its leader.
            shard, cell = made[name].detach(), layouts[name].cell(rank)
            room = torch.empty_like(shard) if name in leader else shard
            if cell.part:
                room.zero_()
            else:
                _read(reader, found[name], cell.box, room)
            if room is not shard and not _is_same(room, shard):
                raise CheckpointError(
                    f"{src_dir} has different values of {leader[name]!r} and {name!r}, and both "
                    "have one tensor in out; give each its own."
                )
    return made


def _check_writable(out: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> None:
    if odd := sorted(set(out) - set(layouts)):
        raise LayoutError(f"load_shards: out has {quoted(odd)}, for which there is no layout.")
    for name, given in out.items():
        if (fault := fault_of_out(given)) is not None:
            raise LayoutError(f"load_shards: out {name!r} {fault}")


def _tied(out: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> dict[str, str]:
    """For each name whose tensor is also that of a name before it: that name.

    Raises:
        LayoutError: tensors overlap in another way.
    """
    memory = ManyMemory({}, out, {})
    if pair := memory.overlap(lambda a, b: layouts[a] == layouts[b]):
        raise LayoutError(
            f"load_shards: out {pair[0]!r} shares memory with out {pair[1]!r}, so one would "
            "overwrite the other; give tensors that lie apart."
        )
    return {name: names[0] for names in memory.outs_in_one for name in names[1:]}


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same bits."""
    one, other = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(one, other)


def _requested(
    source: Catalog, layouts: Mapping[str, Layout], strict: bool
) -> dict[str, StoredTensor]:
    """The tensors that are to be read and that there are."""
    missing = [name for name in layouts if name not in source.tensors]
    if missing and strict:
        what = "tensor" if len(missing) == 1 else f"{len(missing)} tensors"
        more = f" and {len(missing) - _MAX_NAMES} more" if len(missing) > _MAX_NAMES else ""
        names = ", ".join(map(quoted, missing[:_MAX_NAMES]))
        raise CheckpointError(
            f"{source.folder.root} holds no {what} {names}{more}; it has {len(source.tensors)} "
            f"tensors, such as {quoted(min(source.tensors))}. Say strict=False to leave out what "
            "is missing."
        )
    found = {name: source.tensors[name] for name in layouts if name in source.tensors}
    for name, tensor in found.items():
        if tensor.shape != layouts[name].shape:
            raise LayoutError(
                f"tensor {name!r} has shape {tensor.shape}, its layout is {layouts[name]}."
            )
    return found


def _room(
    tensor: StoredTensor,
    layout: Layout,
    rank: int,
    dtype: torch.dtype | str | None,
    given: Tensor | None,
) -> Tensor:
    """The tensor into which a shard is read."""
    shape = layout.cell(rank).box.shape
    wanted = tensor.dtype
    if given is not None:
        wanted = dtype_name(given.dtype)
        if tuple(given.shape) != shape:
            raise ShapeMismatchError(
                f"load_shards: rank {rank} passes out {tensor.name!r} {list(given.shape)}, its "
                f"shard under {layout} is {list(shape)}."
            )
    elif dtype is not None and tensor.dtype in CONVERTED:
        wanted = dtype_name(dtype)
    if wanted != tensor.dtype and not {wanted, tensor.dtype} <= set(CONVERTED):
        raise LayoutError(
            f"tensor {tensor.name!r} is {tensor.dtype} and cannot be read as {wanted}; only "
            f"{', '.join(CONVERTED)} are converted into each other."
        )
    return torch.empty(shape, dtype=getattr(torch, wanted)) if given is None else given


def _read(reader: Reader, tensor: StoredTensor, box: Box, out: Tensor) -> None:
    """Read a box into ``out``, straight or through buffers of up to ``WINDOW_BYTES`` each."""
    dtype = getattr(torch, tensor.dtype)
    is_straight = out.device.type == "cpu" and out.dtype == dtype and out.is_contiguous()
    max_elements = max(1, WINDOW_BYTES // dtype.itemsize)
    touched = [block for block in tensor.chosen if block.box.intersect(box) is not None]
    is_joined = len(touched) > 1 or any(not block.is_in_order for block in touched)
    if is_straight and not is_joined and not box.is_empty:
        max_elements = box.num_elements
    scratch = memoryview(b"")
    for window in windows(box.shape, max_elements):
        if is_joined and not scratch:
            scratch = memoryview(bytearray(window.num_elements * dtype.itemsize))
        target = out[window.slices_within(Box.of_shape(box.shape))]
        room = target if is_straight else torch.empty(window.shape, dtype=dtype)
        reader.gather(tensor, _shifted(window, box.lo), room, scratch)
        if not is_straight:
            target.copy_(room)
    reader.check(tensor)


def _shifted(box: Box, by: tuple[int, ...]) -> Box:
    return Box(
        tuple(a + b for a, b in zip(box.lo, by, strict=True)),
        tuple(a + b for a, b in zip(box.hi, by, strict=True)),
    )
