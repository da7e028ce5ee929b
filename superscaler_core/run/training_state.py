"""The state of a whole training run in one checkpoint, which other plans and one device can read.

Beside the model's tensors, a checkpoint of a run has

- ``optimizer.state.NAME.KEY``: a tensor of the optimizer, in the layout of parameter ``NAME``;
- ``training.json``: everything else as a text, in a tensor of bytes: options and plain values of
  optimizers, schedulers and the gradient scaler, the step number, and the random state.

All of these are in one save, so a checkpoint has them all or cannot be read.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rvdcomm as rv
from rvdcomm.checkpoint import load_shards, open_checkpoint
from superscaler_core.errors import PlanError
from superscaler_core.run import checkpoint
from superscaler_core.run.checkpoint import FORMATS, StoredModel, on_rank
from superscaler_core.run.optimizer_state import (
    Group,
    Optimizer,
    check_fits,
    groups_of,
    merged,
    restore,
    tensors_of,
)
from superscaler_core.run.plain import text_of, value_of
from superscaler_core.run.random_state import random_state, set_random_state

TEXT = "training.json"
"""Name of the tensor that has the text of a run's state."""


@dataclass(frozen=True)
class Saved:
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
        PlanError: a part of the state cannot be saved; raised on all ranks, whichever has the part.
        CheckpointError: the folder holds a checkpoint already, or a rank could not write; raised
            on all ranks.
    """
    folder, first = Path(folder), model.rank == model.ranks[0]
    if form not in FORMATS:
        raise ValueError(f"format {form!r} is none of {', '.join(FORMATS)}.")
    written = model.written
    if first:
        checkpoint.clear_left_over(folder)
    parts = _parts_of_all(model, run)
    kinds = {name: (name, dtype) for name, dtype in model.dtypes.items()}
    here: dict[str, Tensor] = dict(model.stored)
    tensors = dict(model.buffers) if first else {}
    layouts = written | {n: on_rank(model.ranks[0], b.shape) for n, b in model.buffers.items()}
    if not all(part["is_empty"] for part in parts):
        groups = merged(Group.of_plain(group) for part in parts for group in part["groups"])
        entries = {name: entry for group in groups for name, entry in group.entries.items()}
        layouts |= {_name(n, key): written[n] for n, e in entries.items() for key in e.tensors}
        kinds |= {
            _name(n, key): (n, getattr(torch, dtype))
            for n, entry in entries.items()
            for key, dtype in entry.tensors.items()
        }
        own = tensors_of(run.optimizers, model.stored)
        here |= {_name(n, key): value for n, found in own.items() for key, value in found.items()}
        text = _text(groups, parts).encode()
        layouts[TEXT] = on_rank(model.ranks[0], [len(text)])
        tensors[TEXT] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    if len(layouts) < len(written) + len(model.buffers):
        raise PlanError(f"a parameter is named like what a run saves beside it: {TEXT}.")
    tensors |= model.as_written(kinds, here)
    checkpoint.write(folder, model, tensors, layouts, parts[0]["id"], form)


def _parts_of_all(model: StoredModel, run: Run) -> list[dict[str, Any]]:
    """Every rank's part of the run, as plain values; state common to all is in the first part."""
    part: dict[str, Any] = {"id": uuid.uuid4().hex, "fault": "", "groups": [], "rest": {}}
    # A rank without trained parameters has no optimizer, though the others have some.
    part["is_empty"] = run.is_empty
    part["random"] = random_state(run.device)
    try:
        part["groups"] = [group.plain for group in groups_of(run.optimizers, model.stored)]
        if model.rank == model.ranks[0]:
            part["rest"] = {
                "schedulers": [scheduler.state_dict() for scheduler in run.schedulers],
                "scaler": None if run.scaler is None else run.scaler.state_dict(),
                "step": run.step,
                "extra": run.extra,
                "dropout": run.dropout,
            }
        text = text_of(part, "state")
    except PlanError as error:
        text = text_of({"fault": str(error)}, "state")
    parts = [value_of(text) for text in model.texts_of_all(text)]
    for rank, found in zip(model.ranks, parts, strict=True):
        if found["fault"]:
            raise PlanError(f"save: rank {rank}: {found['fault']}")
    return parts


def _text(groups: Sequence[Group], parts: Sequence[Mapping[str, Any]]) -> str:
    states = [text_of(part["random"], "random") for part in parts]
    different = [*dict.fromkeys(states)]
    saved = {
        **parts[0]["rest"],
        "groups": [group.plain for group in groups],
        "random": [value_of(text) for text in different],
        "random_of_rank": [different.index(text) for text in states],
    }
    return text_of(saved, "state")


def _name(parameter: str, key: str) -> str:
    return f"optimizer.state.{parameter}.{key}"


class Resumed:
    """A run that was read from a checkpoint; optimizers can take their states from it later.

    Args:
        saved: the values for the caller.
        groups: the optimizers' groups.
        tensors: this rank's boxes of the optimizers' tensors, by parameter and key.
        dropout: seed and number of draws of the program's dropout.
    """

    def __init__(
        self,
        saved: Saved,
        groups: Sequence[Group] = (),
        tensors: Mapping[str, Mapping[str, Tensor]] | None = None,
        dropout: tuple[int, int] | None = None,
    ) -> None:
        self.saved, self.dropout = saved, dropout
        self._groups, self._tensors = groups, tensors or {}

    def into(self, optimizer: Optimizer, stored: Mapping[str, Tensor]) -> None:
        """Let an optimizer continue.

        Raises:
            PlanError: the saved state does not fit it.
        """
        check_fits(optimizer, self._groups, stored)
        restore(optimizer, self._groups, self._tensors, stored)


def load(folder: str | Path, model: StoredModel, run: Run, *, resume: bool) -> Resumed:
    """Read a model, and a run if one is wanted.

    Nothing is changed if a part of the checkpoint does not fit.

    Args:
        folder: a checkpoint of any kind; one of a run if it is resumed.
        model: takes its parameters and buffers.
        run: its optimizers, schedulers and scaler take their states.
        resume: whether to resume the run, including its random state.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
        PlanError: there is no state for a part of the run, or it does not fit.
    """
    folder = Path(folder)
    state = _state(folder) if resume else None
    if resume and state is None:
        raise PlanError(
            f"{folder} holds a model alone, without the state of a training run: load it without "
            "optimizer, scheduler and scaler."
        )
    groups = [Group.of_plain(group) for group in state["groups"]] if state else []
    if state:
        _check(folder, state, groups, model, run)
    names = {
        _name(name, key): (name, key)
        for group in groups
        for name, entry in group.entries.items()
        for key in entry.tensors
        if name in model.stored
    }
    of_parameter = {name: name for name in model.homes} | {n: p for n, (p, _) in names.items()}
    found = model.read(folder, of_parameter, model.buffers)
    if faults := model.buffer_faults(found):
        raise PlanError(f"load {folder}: {'; '.join(faults)}.")
    checkpoint.copy_into(model.stored, {n: t for n, t in found.items() if n in model.stored})
    checkpoint.copy_into(model.buffers, {n: t for n, t in found.items() if n in model.buffers})
    if state is None:
        return Resumed(Saved())
    tensors: dict[str, dict[str, Tensor]] = {}
    for full, (name, key) in names.items():
        tensors.setdefault(name, {})[key] = found[full]
    resumed = Resumed(Saved(state["step"], state["extra"]), groups, tensors, state["dropout"])
    for optimizer in run.optimizers:
        resumed.into(optimizer, model.stored)
    for scheduler, saved in zip(run.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(saved)
    if run.scaler is not None:
        run.scaler.load_state_dict(state["scaler"])
    # A rank that the saved run did not have goes on like the first one.
    which, place = state["random_of_rank"], model.ranks.index(model.rank)
    state_here = state["random"][which[place if place < len(which) else 0]]
    set_random_state(state_here, run.device)
    return resumed


def _state(folder: Path) -> dict[str, Any] | None:
    """The state of the run in a checkpoint; None if it has a model alone."""
    tensor = open_checkpoint(folder).tensors.get(TEXT)
    if tensor is None:
        return None
    data = load_shards(folder, {TEXT: on_rank(0, tensor.shape)}, 0)[TEXT]
    found: dict[str, Any] = value_of(data.numpy().tobytes().decode())
    return found


def _check(
    folder: Path, state: Mapping[str, Any], groups: Sequence[Group], model: StoredModel, run: Run
) -> None:
    for optimizer in run.optimizers:
        check_fits(optimizer, groups, model.stored)
    if len(run.schedulers) != len(state["schedulers"]):
        raise PlanError(
            f"{folder} has the state of {len(state['schedulers'])} schedulers, and "
            f"{len(run.schedulers)} are given."
        )
    if run.scaler is not None and state["scaler"] is None:
        raise PlanError(f"{folder} has no state of a gradient scaler.")


def latest(folder: str | Path) -> Path | None:
    """The checkpoint with the most steps among the folders in ``folder``; None if there is none.

    Interrupted saves and checkpoints of a model alone do not count.
    """
    steps = {}
    for path in Path(folder).iterdir() if Path(folder).is_dir() else ():
        try:
            is_named = path.is_dir() and not path.name.startswith(".")
            state = _state(path) if is_named else None
        except rv.CheckpointError:
            continue
        if state is not None and state["step"] is not None:
            steps[path] = state["step"]
    return max(steps, key=lambda path: (steps[path], path.name), default=None)


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


def load_run(
    folder: str | Path,
    model: nn.Module,
    *,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
) -> Saved:
    """``Trainer.load`` for a model on a single device, of what a trainer of any plan saved."""
    run = Run.of(optimizer, scheduler, scaler=scaler)
    return load(folder, StoredModel.alone(model), run, resume=not run.is_empty).saved
