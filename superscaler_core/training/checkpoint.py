"""Checkpoints: every rank writes and reads its own boxes of a model, by single-device names."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import rvdcomm as rv
from rvdcomm.checkpoint import commit_shards, load_shards, reshard, save_shards
from rvdcomm.whole_file import sync_folder
from superscaler_core.front_end.state_names import StateNames
from superscaler_core.run.tables import Stored, Tables
from superscaler_core.run.together import Told, agreed, ranks_of, texts_of_all
from superscaler_core.run.transport import Transport
from superscaler_core.run.weights import WeightStore

FORMATS = ("safetensors", "dcp")
"""Forms of a checkpoint's files: those of ``rvdcomm.checkpoint.save_shards``, and those of
``torch.distributed.checkpoint``."""

Home = tuple[rv.Layout, Stored | None]
"""The layout in which a rank reads a parameter, and None. If the stored boxes form no layout of the
model's parameter, the rank reads it whole, and the ``Stored`` entry tells the box to cut out."""


@dataclass(frozen=True)
class StoredModel:
    """The part of a model that one rank stores, and where all ranks store the model.

    Attributes:
        rank: this rank.
        ranks: all ranks.
        stored: this rank's boxes of parameters, by name.
        buffers: whole, the same on all ranks.
        homes: how this rank reads every parameter.
        texts_of_all: gives every rank's text to every rank; collective.
        whole: gathers a tensor that is stored in a parameter's boxes; every rank gets all of it.
            Arguments are the parameter's name, this rank's box of the tensor (None if it stores
            none), and the tensor's dtype; collective.
        dtypes: the dtype in which each parameter is stored.
        buffer_faults: reasons why the buffers cannot take given values.
    """

    rank: int
    ranks: tuple[int, ...]
    stored: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    homes: Mapping[str, Home]
    texts_of_all: Callable[[str], list[str]]
    whole: Callable[[str, Tensor | None, torch.dtype], Tensor]
    dtypes: Mapping[str, torch.dtype]
    buffer_faults: Callable[[Mapping[str, Tensor]], list[str]] = lambda _: []

    @classmethod
    def of_program(
        cls,
        tables: Tables,
        weights: WeightStore,
        buffers: Mapping[str, Tensor],
        buffer_faults: Callable[[Mapping[str, Tensor]], list[str]],
        transport: Transport,
    ) -> StoredModel:
        """The model as one rank of a program stores it."""
        homes: dict[str, Home] = {}
        for name, entry in tables.parameters.items():
            layout = entry.whole[0].layouts[0] if len(entry.whole) == 1 else None
            if layout is not None and entry.packing is not None:
                layout = copies(layout.ranks, entry.model_shape) if max(layout.rvd.d) == 1 else None
            # Where boxes form no layout, the parameter is read whole and the box is cut out.
            whole = on_rank(tables.rank, entry.model_shape)
            homes[name] = (whole, entry) if layout is None else (layout, None)
        texts = partial(texts_of_all, tables=tables, transport=transport)
        return cls(
            tables.rank, ranks_of(tables), weights.stored, buffers, homes, texts, weights.whole,
            {name: weights.stored_dtype(name) for name in tables.parameters}, buffer_faults,
        )  # fmt: skip

    @classmethod
    def alone(cls, model: nn.Module) -> StoredModel:
        """A model on a single device, as rank 0 of one rank."""
        names = StateNames.of(model)
        parameters = {names.of_path[path]: p for path, p in model.named_parameters()}
        buffers = {name: value for name, value in names.buffers.items() if name in names.saved}
        homes: dict[str, Home] = {n: (on_rank(0, p.shape), None) for n, p in parameters.items()}
        dtypes = {name: parameter.dtype for name, parameter in parameters.items()}
        return cls(
            0, (0,), parameters, buffers, homes, lambda text: [text],
            lambda name, tensor, dtype: parameters[name] if tensor is None else tensor, dtypes,
        )  # fmt: skip

    def agreed(self, what: str) -> AbstractContextManager[Told]:
        """A block that fails on all ranks, with a CheckpointError, if it fails on one."""
        return agreed(what, self.ranks, self.texts_of_all)

    @property
    def cut(self) -> frozenset[str]:
        """The names of parameters of which this rank stores a part, but not all."""
        return frozenset(
            name for name, own in self.stored.items() if own.shape != self.homes[name][0].shape
        )

    @property
    def written(self) -> dict[str, rv.Layout]:
        """For every parameter, the layout in which it is written: each box by one rank.

        Replicas take turns, so that each writes an equal share of the model. A parameter whose
        boxes form no layout is written whole by one rank; for these, all ranks take turns.
        """
        found = {}
        for number, (name, (layout, entry)) in enumerate(self.homes.items()):
            if entry is not None:
                found[name] = on_rank(self.ranks[number % len(self.ranks)], layout.shape)
                continue
            size = len(layout.ranks) // layout.rvd.r
            start = number % layout.rvd.r * size
            found[name] = rv.Layout(
                layout.shape, replace(layout.rvd, r=1), layout.ranks[start : start + size],
                layout.cuts,
            )  # fmt: skip
        return found

    def as_written(
        self, tensors: Mapping[str, tuple[str, torch.dtype]], here: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The shards that this rank writes; collective.

        Args:
            tensors: names of the checkpoint's tensors, each with the parameter in whose boxes it is
                stored, and its dtype.
            here: this rank's boxes of these tensors.
        """
        written, found = self.written, {}
        for name, (parameter, dtype) in tensors.items():
            value = here.get(name)
            if self.homes[parameter][1] is not None:
                value = self.whole(parameter, value, dtype)
            if value is not None and self.rank in written[parameter]:
                found[name] = value
        return found

    def read(
        self, folder: Path, names: Mapping[str, str], buffers: Iterable[str] = ()
    ) -> dict[str, Tensor]:
        """Read this rank's boxes from a checkpoint with any layouts.

        Args:
            folder: the checkpoint.
            names: names of its tensors, each with the parameter in whose layout it is read.
            buffers: names of buffers, which are read whole.

        Raises:
            CheckpointError: a tensor is missing or has another shape.
        """
        layouts = {name: self.homes[parameter][0] for name, parameter in names.items()}
        layouts |= {name: on_rank(self.rank, self.buffers[name].shape) for name in buffers}
        found = load_shards(folder, layouts, self.rank)
        for name, parameter in names.items():
            entry = self.homes[parameter][1]
            if entry is not None and entry.box is not None:
                found[name] = entry.taken(found[name])
        return {n: t for n, t in found.items() if n not in names or names[n] in self.stored}


def write(
    folder: Path,
    model: StoredModel,
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, rv.Layout],
    save_id: str,
    form: str,
) -> None:
    """Write one checkpoint, which is complete or cannot be read; collective.

    Args:
        folder: a folder that all ranks share.
        model: the model; its ranks take part.
        tensors: this rank's shards by name; those that another rank writes are left out.
        layouts: layouts of all tensors, the same on all ranks.
        save_id: a text that identifies this save, the same on all ranks.
        form: one of ``FORMATS``.

    Raises:
        CheckpointError: a rank could not write; raised on all ranks.
    """
    first = model.rank == model.ranks[0]
    writers = sorted({r for layout in layouts.values() for r in layout.ranks})
    shards = folder if form == "safetensors" else _beside(folder, "shards")
    with model.agreed(f"save {folder}"):
        if model.rank in writers:
            mine = {name: tensors[name] for name, layout in layouts.items() if model.rank in layout}
            save_shards(shards, mine, layouts, model.rank, save_id=save_id)
    with model.agreed(f"save {folder}"):
        if first:
            commit_shards(shards, writers, save_id=save_id)
            if form == "dcp":
                _convert(shards, folder)


def _convert(shards: Path, folder: Path) -> None:
    """Make a checkpoint in the form "dcp" of one in our own, which is removed."""
    made = _beside(folder, "dcp")
    try:
        reshard(shards, made, to="dcp")
    except rv.CheckpointError as error:
        # Its remedy is to go on from files that are complete, which this save removes.
        raise rv.CheckpointError(
            f"it cannot be converted to DCP ({error.__cause__ or error}); no file is kept."
        ) from error
    made.rename(folder)
    sync_folder(folder.absolute().parent)
    shutil.rmtree(shards)


def clear_left_over(folder: Path) -> None:
    """Remove the files that an interrupted save in the form "dcp" left beside ``folder``."""
    for what in ("shards", "dcp"):
        shutil.rmtree(_beside(folder, what), ignore_errors=True)


def _beside(folder: Path, what: str) -> Path:
    """A hidden folder beside; named by a digest, because a longer name may be too long."""
    digest = hashlib.sha256(os.fsencode(folder.name)).hexdigest()[:16]
    return folder.with_name(f".{digest}.{what}")


def save_weights(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Save whole parameters in a new folder."""
    save_shards(folder, dict(weights), {n: on_rank(0, t.shape) for n, t in weights.items()}, 0)
    commit_shards(folder, [0])


def on_rank(rank: int, shape: Sequence[int]) -> rv.Layout:
    """The layout of a tensor that is whole on one rank."""
    return copies([rank], shape)


def copies(ranks: Sequence[int], shape: Sequence[int]) -> rv.Layout:
    """The layout of a tensor that each of ``ranks`` has whole."""
    counts = ",".join("1" for _ in shape)
    return rv.Layout(tuple(shape), f"R({len(ranks)})V(1)D({counts})", ranks=ranks)


def copy_into(stored: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Give stored tensors the values that were read for them; others are not theirs."""
    with torch.no_grad():
        for name, tensor in stored.items():
            if name in found:
                tensor.copy_(found[name])
