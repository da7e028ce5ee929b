"""Read: a rank's boxes of a model, straight from the files of a folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

import rvdcomm as rv
from rvdcomm.checkpoint import Split, Stack, StoredTensor, cropped, load_shards
from superscaler_core.errors import PlanError
from superscaler_core.graph.packing import Packing
from superscaler_core.hugging_face.names import Tensors, as_parameters
from superscaler_core.run.tables import Stored, Tables, box_of
from superscaler_core.training.checkpoint import on_rank

_log = logging.getLogger("superscaler_core")

_MOST_NAMES = 5


def read_weights(
    folder: str | Path,
    model: nn.Module,
    tables: Tables,
    stored: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
) -> list[str]:
    """Read this rank's boxes of parameters, and buffers that are there, in place.

    Nothing but these boxes is read, and no memory is taken beside them, but for buffers in which
    values are converted.

    Args:
        folder: a folder of ``save_pretrained``, or any checkpoint with the model's names.
        model: tells the names in the folder.
        tables: tables of the program.
        stored: the boxes of this rank, by name.
        buffers: the program's buffers, by name.

    Returns:
        The parameters that the folder lacks, whose boxes are as before.

    Raises:
        PlanError: it is no folder, or a tensor has another shape.
        CheckpointError: it cannot be read.
    """
    if not Path(folder).is_dir():
        raise PlanError(
            f"weights={str(folder)!r} is no folder here: download it first, for example by "
            "huggingface_hub.snapshot_download(...), and give the path that this returns."
        )
    of_alias = _aliases(tables)
    missing: list[str] = []

    def view(tensors: Tensors) -> dict[str, StoredTensor]:
        found = as_parameters(model, tensors)
        missing.extend(n for n in tables.parameters if not _one_of(found, of_alias[n]))
        for names in of_alias.values():
            if len(both := [each for each in names if each in found]) > 1:
                text = "%s has %s, which are one parameter of the model: %s is read"
                _log.warning(text, folder, " and ".join(both), both[0])
        chosen = {n: _one_of(found, of_alias[n]) for n in tables.parameters}
        used = {name for names in of_alias.values() for name in names} | buffers.keys()
        if odd := sorted(found.keys() - used):
            _log.warning("%s has tensors that the model does not: %s", folder, _some(odd))
        boxes = {
            name: _box_of(found[source], tables.parameters[name], name)
            for name, source in chosen.items()
            if source and name in stored
        }
        return boxes | {n: found[n] for n in buffers if n in found and n not in boxes}

    rank = tables.rank
    entries = {name: tables.parameters[name] for name in stored}
    layouts = {n: on_rank(rank, _held(entry).shape) for n, entry in entries.items()}
    layouts |= {n: on_rank(rank, tuple(buffer.shape)) for n, buffer in buffers.items()}
    out = {n: entry.boxed(stored[n].data) for n, entry in entries.items()}
    load_shards(folder, layouts, rank, strict=False, out={**buffers, **out}, view=view)
    return missing


def _aliases(tables: Tables) -> dict[str, list[str]]:
    """All names of every parameter, its own first."""
    found = {name: [name] for name in tables.parameters}
    for alias, name in tables.aliases.items():
        found[name].append(alias)
    return found


def _one_of(found: Tensors, names: Sequence[str]) -> str:
    return next((name for name in names if name in found), "")


def _box_of(tensor: StoredTensor, entry: Stored, name: str) -> StoredTensor:
    """The box of a stored tensor that a rank stores, in the dims of the program."""
    if tensor.shape != entry.model_shape:
        raise PlanError(
            f"{name} is {list(entry.model_shape)} in the model and {list(tensor.shape)} in the "
            "folder: give the folder's own config to the model."
        )
    packed = tensor if entry.packing is None else _packed(tensor, entry.packing)
    return replace(cropped(packed, _held(entry)), name=name)


def _packed(tensor: StoredTensor, packing: Packing) -> StoredTensor:
    """A stored tensor with a dim of its pieces."""
    names = tuple(f"t.{number}" for number in range(packing.num))
    pieces = Split("t", names, packing.dim).apply({"t": replace(tensor, name="t")})
    return Stack("t", "t.#", packing.dim).apply(pieces)["t"]


def _held(entry: Stored) -> rv.Box:
    assert entry.box is not None, "it stores some of it"
    return box_of(entry.box)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{', '.join(names[:_MOST_NAMES])}{more}"
