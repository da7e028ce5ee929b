"""The state of a whole training run in one checkpoint, which other plans and one device can read.

Beside the model's tensors, a checkpoint of a run has

- ``optimizer.state.NAME.KEY``: a tensor of the optimizer, in the layout of parameter ``NAME``, or
  whole if an optimizer has the parameter whole;
- ``training.json``: everything else as a text, in a tensor of bytes: options and plain values of
  optimizers, schedulers and the gradient scaler, the step number, and the random state.

All of these are in one save, so a checkpoint has them all or cannot be read.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rvdcomm as rv
from superscaler_core.errors import PlanError
from superscaler_core.training import checkpoint
from superscaler_core.training.checkpoint import FORMATS, StoredModel, on_rank
from superscaler_core.training.optimizer_state import (
    Optimizer,
    ParamGroup,
    groups_of,
    keepers_of,
    merged,
    tensors_of,
)
from superscaler_core.training.plain import text_of, value_of
from superscaler_core.training.random_state import random_state
from superscaler_core.training.run_state import RunState

TEXT = "training.json"
"""Name of the tensor that has the text of a run's state."""


@dataclass(frozen=True)
class SavedRun:
    """What a checkpoint tells the caller that loads it.

    Attributes:
        step: the number that was saved as ``step``.
        extra: the value that was saved as ``extra``.
    """

    step: int | None = None
    extra: Any = None


@dataclass(frozen=True)
class Run:
    """The state of a training run besides its model.

    Attributes:
        optimizers, schedulers: in the order in which they were saved.
        scaler: the gradient scaler, with ``state_dict`` and ``load_state_dict``.
        step: number of steps that were taken.
        extra: a plain value of the caller.
        device: the device whose random state belongs to the run.
        dropout: seed and number of draws of the program's dropout; None on a single device.
    """

    optimizers: tuple[Optimizer, ...] = ()
    schedulers: tuple[Any, ...] = ()
    scaler: Any = None
    step: int | None = None
    extra: Any = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dropout: tuple[int, int] | None = None

    @classmethod
    def of(cls, optimizer: Any = None, scheduler: Any = None, **fields: Any) -> Run:
        """A run whose optimizer and scheduler are one object each, several, or None."""
        return cls(_several(optimizer), _several(scheduler), **fields)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to save beside the model."""
        beside = (self.scaler, self.step, self.extra)
        return not (self.optimizers or self.schedulers) and all(x is None for x in beside)


def _several(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, Mapping):
        return tuple(value.values())
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def save(folder: str | Path, model: StoredModel, run: Run, form: str = FORMATS[0]) -> None:
    """Write a model, and a run if there is one; collective over the model's ranks.

    Raises:
        CheckpointError: a part of the state cannot be saved, the folder holds a checkpoint already,
            or a rank could not write; raised on all ranks, whichever has the fault. Nothing of the
            save is left, except in a folder that was there before.
    """
    folder, is_first = Path(folder), model.rank == model.ranks[0]
    is_new = is_first and not folder.exists()
    try:
        _save(folder, model, run, form)
    except rv.CheckpointError:
        if is_first:
            checkpoint.clear_left_over(folder)
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _save(folder: Path, model: StoredModel, run: Run, form: str) -> None:
    is_first = model.rank == model.ranks[0]
    with model.agreed(f"save {folder}") as told:
        if form not in FORMATS:
            raise ValueError(f"format {form!r} is none of {', '.join(FORMATS)}.")
        if is_first:
            checkpoint.clear_left_over(folder)
        told.here = text_of(_part(model, run), "state")
    with model.agreed(f"save {folder}"):
        parts = [value_of(text) for text in told.of_all]
        tensors, layouts, kinds, here = _contents(model, run, parts)
    tensors |= model.as_written(kinds, here)
    checkpoint.write(folder, model, tensors, layouts, parts[0]["id"], form)


Contents = tuple[
    dict[str, Tensor], dict[str, rv.Layout], dict[str, tuple[str, torch.dtype]], dict[str, Tensor]
]


def _contents(model: StoredModel, run: Run, parts: Sequence[dict[str, Any]]) -> Contents:
    """What a checkpoint holds.

    Returns:
        Tensors that this rank alone has; the layouts of all tensors; those stored in the boxes of
        parameters, each with the parameter and its dtype; and this rank's boxes of these.
    """
    first, written = model.ranks[0], model.written
    kinds = {name: (name, dtype) for name, dtype in model.dtypes.items()}
    here: dict[str, Tensor] = dict(model.stored)
    tensors = dict(model.buffers) if model.rank == first else {}
    layouts = written | {n: on_rank(first, b.shape) for n, b in model.buffers.items()}
    if not all(part["is_empty"] for part in parts):
        groups = merged(ParamGroup.of_plain(group) for part in parts for group in part["groups"])
        entries = {name: entry for group in groups for name, entry in group.entries.items()}
        owners = {n: r for r, part in zip(model.ranks, parts, strict=True) for n in part["whole"]}
        for n, entry in entries.items():
            shapes = {key: model.homes[n][0].shape for key in entry.tensors if n in owners}
            shapes |= {key: shape for key, (_, shape) in entry.others.items()}
            # Without an owner, all ranks that store the parameter have it whole.
            owner = owners[n] if n in owners else written[n].ranks[0]
            layouts |= {name_of(n, key): on_rank(owner, shape) for key, shape in shapes.items()}
            cut = {key: dtype for key, dtype in entry.tensors.items() if key not in shapes}
            layouts |= {name_of(n, key): written[n] for key in cut}
            kinds |= {name_of(n, k): (n, getattr(torch, dtype)) for k, dtype in cut.items()}
        own = (tensors_of(keeper) for keeper in keepers_of(run.optimizers, model.stored))
        mine = {name_of(n, k): v for found in own for n, by in found.items() for k, v in by.items()}
        here |= {name: value for name, value in mine.items() if name in kinds}
        tensors |= {n: v for n, v in mine.items() if n not in kinds and model.rank in layouts[n]}
        text = _state_of(groups, parts).text.encode()
        layouts[TEXT] = on_rank(first, [len(text)])
        tensors[TEXT] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    if len(layouts) < len(written) + len(model.buffers):
        raise PlanError(f"a parameter is named like what a run saves beside it: {TEXT}.")
    return tensors, layouts, kinds, here


def _part(model: StoredModel, run: Run) -> dict[str, Any]:
    """This rank's part of the run, as plain values; state common to all is in the first's."""
    keepers = keepers_of(run.optimizers, model.stored)
    part: dict[str, Any] = {
        "id": uuid.uuid4().hex,
        # A rank without trained parameters has no optimizer, though the others have some.
        "is_empty": run.is_empty,
        "random": random_state(run.device),
        "groups": [group.plain for group in groups_of(keepers, model.cut)],
        "whole": [name for keeper in keepers if keeper.is_whole for name in keeper.tensors],
        "rest": {},
    }
    if model.rank == model.ranks[0]:
        part["rest"] = {
            "schedulers": [scheduler.state_dict() for scheduler in run.schedulers],
            "kinds": classes_of(run.schedulers),
            "scaler": None if run.scaler is None else run.scaler.state_dict(),
            "step": run.step,
            "extra": run.extra,
            "dropout": run.dropout,
        }
    return part


def classes_of(schedulers: Sequence[Any]) -> list[str]:
    """The names of the classes of schedulers."""
    return [type(scheduler).__name__ for scheduler in schedulers]


def _state_of(groups: Sequence[ParamGroup], parts: Sequence[Mapping[str, Any]]) -> RunState:
    states = [text_of(part["random"], "random") for part in parts]
    different = [*dict.fromkeys(states)]
    return RunState(
        **parts[0]["rest"],
        groups=groups,
        random=[value_of(text) for text in different],
        random_of_rank=[different.index(text) for text in states],
        id=parts[0]["id"],
    )


def name_of(parameter: str, key: str) -> str:
    """The name of an optimizer's tensor in a checkpoint."""
    return f"optimizer.state.{parameter}.{key}"


def save_run(
    folder: str | Path,
    model: nn.Module,
    *,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    step: int | None = None,
    extra: Any = None,
    format: str = FORMATS[0],
) -> None:
    """``Trainer.save`` for a model on a single device; a trainer of any plan can load it."""
    run = Run.of(optimizer, scheduler, scaler=scaler, step=step, extra=extra)
    save(folder, StoredModel.alone(model), run, format)
