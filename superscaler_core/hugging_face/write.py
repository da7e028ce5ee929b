"""Write: a model as a folder that ``from_pretrained`` reads, each rank some of its files.

A file has whole tensors, so each tensor is brought to the rank that writes its file. Ranks write
at the same time, a window of rows after another: no tensor is whole in memory.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product, zip_longest
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

import rvdcomm as rv
from rvdcomm.checkpoint import bytes_of, header_bytes
from rvdcomm.whole_file import replacing, write_whole
from superscaler_core.errors import PlanError
from superscaler_core.run.moves import Shard, move_many
from superscaler_core.run.tables import Stored, SubTransfer
from superscaler_core.run.transport import Transport
from superscaler_core.training.checkpoint import StoredModel, on_rank

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"

LEAST_BYTES = 1 << 20
"""Least bytes of a file, if there are several. 1 MiB."""

WINDOW_BYTES = 4 << 20
"""Most bytes that a rank gets at once, if a row has no more. 4 MiB."""

_OWN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Names of files that an earlier save may have left."""

ShardOf = Callable[[str, torch.dtype], Shard | None]
"""From a parameter's name to what this rank stores of it, in a dtype."""


@dataclass(frozen=True)
class WeightFile:
    """A file of whole tensors.

    Attributes:
        name: its name in the folder.
        writer: the rank that writes it.
        tensors: the dtype and the shape of each tensor, by name, in order.
    """

    name: str
    writer: int
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]


def write_folder(
    folder: str | Path,
    model: nn.Module,
    stored: StoredModel,
    entries: Mapping[str, Stored],
    shard_of: ShardOf,
    transport: Transport,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 << 30,
) -> None:
    """Write weights, index and configuration; collective over the model's ranks.

    An index that is there is removed first and written last, so that a folder whose save was
    interrupted is not read.

    Args:
        folder: made if missing; weights that ``save_pretrained`` wrote there are replaced.
        model: the model, of which only the configuration is read.
        stored: the model as this rank stores it.
        entries: the parameters of the program, by name.
        shard_of: what this rank stores of them.
        transport: moves boxes.
        dtype: dtype of the fractions in the files; that of the model if None.
        max_shard_bytes: most bytes of tensors in a file.

    Raises:
        CheckpointError: a rank could not write; on all ranks.
        PlanError: the model is not of transformers.
    """
    model = getattr(model, "_orig_mod", model)
    root, what = Path(folder), f"save_pretrained {folder}"
    if not hasattr(model, "save_pretrained") or hasattr(model, "peft_config"):
        raise PlanError(
            f"save_pretrained writes models of transformers, not {type(model).__name__}: use "
            "save(folder), or state_dict(rank0_only=True)."
        )
    tensors = {
        name: (_dtype(entry.dtype, dtype), entry.model_shape) for name, entry in entries.items()
    }
    tensors |= {
        name: (str(buffer.dtype).removeprefix("torch."), tuple(buffer.shape))
        for name, buffer in stored.buffers.items()
    }
    files = files_of(tensors, stored.ranks, max_shard_bytes)
    is_first = stored.rank == stored.ranks[0]
    with stored.agreed(what):
        if is_first:
            root.mkdir(parents=True, exist_ok=True)
            for path in [path for path in root.iterdir() if _OWN.fullmatch(path.name)]:
                path.unlink()
    with stored.agreed(what):
        writer = _Writer(root, stored, entries, shard_of, transport)
        for start in range(0, len(files), len(stored.ranks)):
            writer.write(files[start : start + len(stored.ranks)])
        if writer.fault is not None:
            raise writer.fault
    with stored.agreed(what):
        if is_first:
            if lost := [file.name for file in files if not (root / file.name).exists()]:
                raise rv.CheckpointError(
                    f"the first rank does not see {', '.join(lost[:3])} in {root}, which other "
                    "ranks wrote: give all ranks one folder, on a disk that they share."
                )
            _describe(root, model, files)


def files_of(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], ranks: Sequence[int], most: int
) -> list[WeightFile]:
    """The files of these tensors: at least one for each rank, unless they are small.

    Ranks take turns as writers.

    >>> files_of({"a": ("float32", (3,)), "b": ("float32", (3,))}, [0, 1], 12)[1].name
    'model-00002-of-00002.safetensors'
    """
    sizes = {name: _num_bytes(*form) for name, form in tensors.items()}
    share = max(-(-sum(sizes.values()) // len(ranks)), LEAST_BYTES)
    runs = list(_runs(sizes, min(most, share)))
    names = [WEIGHTS]
    if len(runs) > 1:
        names = [f"model-{i + 1:05d}-of-{len(runs):05d}.safetensors" for i in range(len(runs))]
    return [
        WeightFile(name, ranks[i % len(ranks)], {each: tensors[each] for each in run})
        for i, (name, run) in enumerate(zip(names, runs, strict=True))
    ]


def _runs(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """Names in runs of at most ``most`` bytes each; a larger tensor is a run of its own."""
    run: list[str] = []
    total = 0
    for name, size in sizes.items():
        if run and total + size > most:
            yield run
            run, total = [], 0
        run.append(name)
        total += size
    yield run


class _Writer:
    """One rank's part in writing files.

    Attributes:
        fault: why this rank could not write; it goes on to give the others what they write.
    """

    fault: OSError | None = None

    def __init__(
        self,
        root: Path,
        stored: StoredModel,
        entries: Mapping[str, Stored],
        shard_of: ShardOf,
        transport: Transport,
    ) -> None:
        self._root, self._stored, self._entries = root, stored, entries
        self._shard_of, self._transport = shard_of, transport

    def write(self, files: Sequence[WeightFile]) -> None:
        """Write files of different writers; collective."""
        mine = next((file for file in files if file.writer == self._stored.rank), None)
        try:
            with ExitStack() as stack:
                out = None if mine is None else self._opened(mine, stack)
                for row in zip_longest(*(file.tensors for file in files)):
                    self._put(row, files, out)
                if self.fault is not None:
                    # What was written of the file is removed.
                    raise self.fault
        except OSError as error:
            self.fault = self.fault or error

    def _opened(self, file: WeightFile, stack: ExitStack) -> OpenFile | None:
        """The file that this rank writes, with its header; None if it cannot."""
        if self.fault is None:
            try:
                path = stack.enter_context(replacing(self._root / file.name))
                return OpenFile(stack.enter_context(path.open("wb")), file)
            except OSError as error:
                self.fault = error
        return None

    def _put(
        self, row: Sequence[str | None], files: Sequence[WeightFile], out: OpenFile | None
    ) -> None:
        """Bring one tensor of each file to its writer, which writes it; collective."""
        pairs = [(file, name) for file, name in zip(files, row, strict=True) if name is not None]
        moved = [pair for pair in pairs if pair[1] in self._entries]
        shards = {name: self._shard_of(name, _torch(file.tensors[name][0])) for file, name in moved}
        parts = (windows(self._entries[name].whole, name, file) for file, name in moved)
        for together in zip_longest(*parts):
            moves = {
                name: ([each] if self._stored.rank in each.ranks else [], shards[name])
                for (_, name), each in zip(moved, together, strict=True)
                if each is not None
            }
            for name, box, piece in move_many(self._transport, moves):
                self._write(out, name, box, piece)
        for file, name in pairs:
            if file.writer == self._stored.rank and name not in self._entries:
                buffer = self._stored.buffers[name]
                self._write(out, name, rv.Box.of_shape(tuple(buffer.shape)), buffer)

    def _write(self, out: OpenFile | None, name: str, box: rv.Box, piece: Tensor) -> None:
        if out is None or self.fault is not None:
            return
        shape = self._entries[name].shape if name in self._entries else box.shape
        try:
            out.put(name, shape, box, piece)
        except OSError as error:
            self.fault = error


class OpenFile:
    """A file of whole tensors that is written box by box, so that no tensor is in memory.

    Args:
        file: the file, open for writing.
        form: its tensors.
    """

    def __init__(self, file: BinaryIO, form: WeightFile) -> None:
        self._file = file
        header = header_bytes(form.tensors, {"format": "pt"})
        file.write(header)
        self._starts: dict[str, int] = {}
        position = len(header)
        for name, each in form.tensors.items():
            self._starts[name] = position
            position += _num_bytes(*each)
        file.truncate(position)

    def put(self, name: str, shape: Sequence[int], box: rv.Box, piece: Tensor) -> None:
        """Write a box of a tensor.

        Args:
            name: the tensor.
            shape: its dims in which the box is, which have its elements in the same order.
            box: the box.
            piece: its values, on any device.
        """
        sizes = box.shape
        # Elements that follow each other both in the box and in the tensor: a range of the last
        # dim that is cut, and all dims behind it.
        cut = [dim for dim, size in enumerate(shape) if sizes[dim] != size]
        last = cut[-1] if cut else 0
        strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        data = memoryview(bytes_of(piece.cpu().contiguous()))
        run = prod(sizes[last:]) * piece.element_size()
        base = sum(lo * stride for lo, stride in zip(box.lo, strides, strict=True))
        for number, index in enumerate(product(*map(range, sizes[:last]))):
            outer = zip(index, strides[:last], strict=True)
            start = base + sum(i * stride for i, stride in outer)
            self._file.seek(self._starts[name] + start * piece.element_size())
            self._file.write(data[number * run : (number + 1) * run])


def windows(
    sub_transfers: Sequence[SubTransfer], name: str, file: WeightFile
) -> Iterator[SubTransfer]:
    """Sub-transfers of at most ``WINDOW_BYTES`` that bring a parameter to a file's writer.

    Each stored box comes from one of the ranks that store it: the writer, if it is one of them.

    Args:
        sub_transfers: those that gather the parameter.
        name: the parameter.
        file: the file in which it is.
    """
    dtype, writer = file.tensors[name][0], file.writer
    for each in sub_transfers:
        owners: dict[rv.Box, int] = {}
        for rank in each.layouts[0].ranks:
            box = each.src_box(rank)
            if box is not None and (box not in owners or rank == writer):
                owners[box] = rank
        for box, owner in owners.items():
            for window in _rows(box, WINDOW_BYTES // _torch(dtype).itemsize):
                src, dst = on_rank(owner, window.shape), on_rank(writer, window.shape)
                yield SubTransfer(str(window), str(src), str(dst), dtype)


def _rows(box: rv.Box, most: int) -> Iterator[rv.Box]:
    """A box in windows of rows, each of at most ``most`` elements if a row has no more."""
    if not box.shape or box.num_elements <= most:
        yield box
        return
    step = max(most * box.shape[0] // box.num_elements, 1)
    for lo in range(box.lo[0], box.hi[0], step):
        hi = min(lo + step, box.hi[0])
        yield rv.Box((lo, *box.lo[1:]), (hi, *box.hi[1:]))


def _describe(root: Path, model: Any, files: Sequence[WeightFile]) -> None:
    """Write what ``from_pretrained`` reads besides the weights."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    # As ``from_pretrained`` would read them: the dtype of the first fractions.
    found = (_torch(name) for file in files for name, _ in file.tensors.values())
    config.dtype = next((each for each in found if each.is_floating_point), config.dtype)
    config.save_pretrained(root)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(root)
    if len(files) > 1:
        sizes = [_num_bytes(*form) for file in files for form in file.tensors.values()]
        homes = {name: file.name for file in files for name in file.tensors}
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": homes}
        write_whole(root / INDEX, json.dumps(index, indent=2))


def _dtype(name: str, wanted: torch.dtype | None) -> str:
    is_kept = wanted is None or not _torch(name).is_floating_point
    return name if is_kept else str(wanted).removeprefix("torch.")


def _num_bytes(dtype: str, shape: Sequence[int]) -> int:
    return prod(shape) * _torch(dtype).itemsize


def _torch(dtype: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype)
    return found
