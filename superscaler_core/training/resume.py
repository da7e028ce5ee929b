"""Resume: read a model or a whole run from a checkpoint, on all ranks or on none."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rvdcomm as rv
from rvdcomm.checkpoint import load_shards, open_checkpoint
from superscaler_core.errors import PlanError
from superscaler_core.training import checkpoint
from superscaler_core.training.checkpoint import StoredModel, on_rank
from superscaler_core.training.optimizer_state import (
    Keeper,
    ParamGroup,
    check_fits,
    keepers_of,
    restore,
)
from superscaler_core.training.random_state import set_random_state
from superscaler_core.training.run_state import RunState
from superscaler_core.training.training_state import TEXT, Run, SavedRun, classes_of, name_of


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
        saved: SavedRun,
        groups: Sequence[ParamGroup] = (),
        tensors: Mapping[str, Mapping[str, Tensor]] | None = None,
        dropout: tuple[int, int] | None = None,
    ) -> None:
        self.saved, self.dropout = saved, dropout
        self._groups, self._tensors = groups, tensors or {}

    def into(self, keeper: Keeper) -> None:
        """Let an optimizer continue.

        Raises:
            PlanError: the saved state does not fit it.
        """
        check_fits(keeper, self._groups)
        restore(keeper, self._groups, self._tensors)


@dataclass(frozen=True)
class FoundRun:
    """What one rank read of a checkpoint; nothing is changed yet.

    Attributes:
        state: the state of the run; None if it is not wanted.
        tensors: this rank's boxes of all tensors, by name.
        resumed: the run, for the optimizers.
        identity: a text that is equal if and only if ranks read one save.
    """

    state: RunState | None
    tensors: Mapping[str, Tensor]
    resumed: Resumed
    identity: str


def load(folder: str | Path, model: StoredModel, run: Run, *, resume: bool) -> Resumed:
    """Read a model, and a run if one is wanted; collective over the model's ranks.

    All ranks take what one save has, or nothing is changed on any: everything is read and checked
    first, then what may still refuse its state takes it, and its old state again if another rank
    fails.

    Args:
        folder: a checkpoint of any kind; one of a run if it is resumed.
        model: takes its parameters and buffers.
        run: its optimizers, schedulers and scaler take their states.
        resume: whether to resume the run, including its random state.

    Raises:
        CheckpointError: a tensor is missing, damaged or has another shape; there is no state for a
            part of the run, or it does not fit; or ranks read different saves. On all ranks.
    """
    what = f"load {folder}"
    with model.agreed(what) as told:
        found = _read(Path(folder), model, run, resume=resume)
        told.here = found.identity
    for rank, identity in zip(model.ranks, told.of_all, strict=True):
        if identity != told.of_all[0]:
            raise rv.CheckpointError(
                f"{what}: ranks {model.ranks[0]} and {rank} read two different saves; give all "
                "ranks the folder of one."
            )
    with ExitStack() as undo:
        with model.agreed(what):
            _restore(found, model, run, undo)
        undo.pop_all()
    checkpoint.copy_into(model.stored, found.tensors)
    checkpoint.copy_into(model.buffers, found.tensors)
    if found.state is not None:
        set_random_state(found.state.random_here(model.ranks.index(model.rank)), run.device)
    return found.resumed


def _read(folder: Path, model: StoredModel, run: Run, *, resume: bool) -> FoundRun:
    """Read and check everything that this rank takes."""
    catalog = open_checkpoint(folder)
    try:
        kept = _state(folder)
    except rv.CheckpointError:
        if resume:
            raise
        # Of a damaged run the model can still be read.
        kept = None
    state = kept if resume else None
    if resume and state is None:
        raise PlanError(
            "it holds a model alone, without the state of a training run: load it without "
            "optimizer, scheduler and scaler."
        )
    groups = list(state.groups) if state else []
    if state:
        _check(state, model, run)
    keepers = keepers_of(run.optimizers, model.stored)
    whole = {name for keeper in keepers if keeper.is_whole for name in keeper.tensors}
    names: dict[str, tuple[str, str]] = {}
    layouts: dict[str, rv.Layout] = {}
    for group in groups:
        for name, entry in group.entries.items():
            if name not in whole and name not in model.stored:
                continue
            shapes = {key: shape for key, (_, shape) in entry.others.items()}
            if name in whole:
                shapes |= dict.fromkeys(entry.tensors, model.homes[name][0].shape)
            keys = (*entry.tensors, *entry.others)
            names |= {name_of(name, key): (name, key) for key in keys}
            layouts |= {name_of(name, k): on_rank(model.rank, s) for k, s in shapes.items()}
    of_parameter = {name: name for name in model.homes}
    of_parameter |= {full: name for full, (name, _) in names.items() if full not in layouts}
    found = model.read(folder, of_parameter, model.buffers)
    found |= load_shards(folder, layouts, model.rank) if layouts else {}
    if faults := model.buffer_faults(found):
        raise PlanError(f"{'; '.join(faults)}.")
    tensors: dict[str, dict[str, Tensor]] = {}
    for full, (name, key) in names.items():
        tensors.setdefault(name, {})[key] = found.pop(full)
    # A form without checksums tells no more than the shapes; the run's id tells its saves apart.
    blocks = repr(sorted((n, t.dtype, t.shape, t.blocks) for n, t in catalog.tensors.items()))
    said = kept or RunState([], [], None, None, None, None, [], [])
    identity = hashlib.sha256(f"{said.id} {blocks}".encode()).hexdigest()
    resumed = Resumed(SavedRun(said.step, said.extra), groups, tensors, said.dropout)
    return FoundRun(state, found, resumed, identity)


def _restore(found: FoundRun, model: StoredModel, run: Run, undo: ExitStack) -> None:
    """Let optimizers, schedulers and scaler take their states; ``undo`` gives them theirs again."""
    if found.state is None:
        return
    for keeper in keepers_of(run.optimizers, model.stored):
        # The optimizer replaces these, and leaves the old ones as they are.
        optimizer = keeper.optimizer
        undo.callback(keeper.restored)
        undo.callback(vars(optimizer).update, state=optimizer.state,
                      param_groups=optimizer.param_groups)  # fmt: skip
        found.resumed.into(keeper)
    takers = [*zip(run.schedulers, found.state.schedulers, strict=True)]
    if run.scaler is not None:
        takers.append((run.scaler, found.state.scaler))
    for taker, state in takers:
        undo.callback(_put_back, taker, deepcopy(taker.state_dict()))
        try:
            taker.load_state_dict(deepcopy(state))
        except Exception as error:
            raise PlanError(
                f"{type(taker).__name__} does not take the state that was saved in its place "
                f"({type(error).__name__}: {error}): make the schedulers and the scaler that the "
                "saved run had, or load without them."
            ) from error


def _put_back(taker: Any, state: Any) -> None:
    # The error that is behind this one is raised.
    with suppress(Exception):
        taker.load_state_dict(state)


def _state(folder: Path) -> RunState | None:
    """The state of the run in a checkpoint; None if it has a model alone."""
    tensor = open_checkpoint(folder).tensors.get(TEXT)
    if tensor is None:
        return None
    data = load_shards(folder, {TEXT: on_rank(0, tensor.shape)}, 0)[TEXT]
    return RunState.of_text(data.view(torch.uint8).numpy().tobytes().decode(errors="replace"))


def _check(state: RunState, model: StoredModel, run: Run) -> None:
    for keeper in keepers_of(run.optimizers, model.stored):
        check_fits(keeper, state.groups, model.cut)
    if len(run.schedulers) != len(state.schedulers):
        raise PlanError(
            f"it has the state of {len(state.schedulers)} schedulers, and {len(run.schedulers)} "
            "are given."
        )
    for kind, saved in zip(classes_of(run.schedulers), state.kinds, strict=False):
        if kind != saved:
            raise PlanError(
                f"it has the state of a {saved}, and the scheduler is a {kind}: make a {saved}, or "
                "load without scheduler."
            )
    if run.scaler is not None and state.scaler is None:
        raise PlanError("it has no state of a gradient scaler.")


def latest(folder: str | Path) -> Path | None:
    """The checkpoint with the most steps among the folders in ``folder``; None if there is none.

    Interrupted saves and checkpoints of a model alone do not count. A checkpoint that cannot be
    read is passed over, with a warning.
    """
    steps = {}
    for path in sorted(Path(folder).iterdir()) if Path(folder).is_dir() else ():
        if path.name.startswith(".") or not path.is_dir():
            continue
        try:
            open_checkpoint(path)
        except rv.CheckpointError:
            continue
        except OSError as error:
            _pass_over(path, error)
            continue
        try:
            state = _state(path)
        except (ValueError, OSError) as error:
            _pass_over(path, error)
            continue
        if state is not None and state.step is not None:
            steps[path] = state.step
    return max(steps, key=lambda path: (steps[path], path.name), default=None)


def _pass_over(path: Path, error: Exception) -> None:
    warnings.warn(f"latest passes over {path}: {error}", stacklevel=3)


def load_run(
    folder: str | Path,
    model: nn.Module,
    *,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
) -> SavedRun:
    """``Trainer.load`` for a model on a single device, of what a trainer of any plan saved."""
    run = Run.of(optimizer, scheduler, scaler=scaler)
    return load(folder, StoredModel.alone(model), run, resume=not run.is_empty).saved
