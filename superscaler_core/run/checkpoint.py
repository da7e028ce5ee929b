"""Checkpoints of a program: every rank writes and reads its own boxes, by single-device names."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

import rvdcomm as rv
from rvdcomm.checkpoint import commit_shards, load_shards, save_shards
from superscaler_core.errors import PlanError
from superscaler_core.run.tables import Tables
from superscaler_core.run.together import ranks_of, wait_for_all
from superscaler_core.run.transport import Transport


def save(
    folder: str | Path, tables: Tables, stored: Mapping[str, Tensor], transport: Transport
) -> None:
    """Write what all ranks store to one checkpoint; collective over the program's ranks.

    Raises:
        PlanError: a parameter is stored in boxes that form no layout.
        CheckpointError: the folder holds a checkpoint already.
    """
    layouts = _layouts(tables)
    save_shards(folder, dict(stored), layouts, tables.rank)
    ranks = ranks_of(tables)
    wait_for_all(tables, transport)
    if tables.rank == ranks[0]:
        commit_shards(folder, [r for r in ranks if any(r in layout for layout in layouts.values())])
    wait_for_all(tables, transport)


def save_weights(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Replace the parameters saved in ``folder`` by these whole parameters; by none if empty."""
    shutil.rmtree(folder, ignore_errors=True)
    if weights:
        save_shards(folder, dict(weights), {n: _whole(t.shape, 0) for n, t in weights.items()}, 0)
        commit_shards(folder, [0])


def load(folder: str | Path, tables: Tables, stored: Mapping[str, Tensor]) -> None:
    """Read this rank's boxes from a checkpoint with any layouts, or from a single device."""
    parameters = tables.parameters
    # If the boxes form no layout, the parameter is read whole and the box is cut out.
    cut = {n for n, entry in parameters.items() if len(entry.whole) != 1 and entry.box is not None}
    layouts = {
        name: _whole(entry.shape, tables.rank) if name in cut else entry.whole[0].layouts[0]
        for name, entry in parameters.items()
        if name in cut or len(entry.whole) == 1
    }
    with torch.no_grad():
        for name, shard in load_shards(folder, layouts, tables.rank).items():
            stored[name].copy_(shard[parameters[name].index] if name in cut else shard)


def _whole(shape: Sequence[int], rank: int) -> rv.Layout:
    counts = ",".join("1" for _ in shape)
    return rv.Layout(tuple(shape), f"R(1)V(1)D({counts})", ranks=[rank])


def _layouts(tables: Tables) -> dict[str, rv.Layout]:
    """The layout in which every parameter is stored, as all ranks know it."""
    found = {}
    for name, entry in tables.parameters.items():
        if len(entry.whole) != 1:
            raise PlanError(
                f"{name} is stored in boxes that form no layout ({len(entry.whole)} regions): use "
                "state_dict() and load_state_dict(), or give plan.update(...) parts of one split."
            )
        found[name] = entry.whole[0].layouts[0]
    return found
