"""Writers: callbacks that log the stats of a model with TensorBoard or Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from superscaler_core.errors import PlanError
from superscaler_core.parallel.callbacks import Callback
from superscaler_core.parallel.reported import Reported
from superscaler_core.parallel.stats import StepStats


class _Writer(Callback):
    """Logs the stats and the loss of calls on the first rank, which has the loss of all.

    Args:
        every: logs each so many-th step. Each time waits for the loss, so on a GPU for its work.
    """

    def __init__(self, every: int) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise PlanError(f"{type(self).__name__}: every is a number from 1, not {every!r}.")
        self._every, self._num_steps = every, 0

    def on_step_end(self, model: Reported, stats: StepStats, loss: Tensor) -> None:
        self._num_steps = stats.number
        if stats.number % self._every == 0:
            self._log(model, stats, loss)

    def on_evaluate_end(self, model: Reported, stats: StepStats, loss: Tensor) -> None:
        self._log(model, stats, loss)

    def _log(self, model: Reported, stats: StepStats, loss: Tensor) -> None:
        if model.trainer.rank > 0:
            return
        values = {"loss": float(loss), **stats.values}
        # Evaluations are drawn over the steps before them.
        self._write({f"{stats.kind}/{name}": x for name, x in values.items()}, self._num_steps)

    def _write(self, values: Mapping[str, float], step: int) -> None:
        raise NotImplementedError


class TensorBoardWriter(_Writer):
    """Logs stats for TensorBoard, under names such as ``step/samples_per_sec``.

    >>> # model.add_callback(ss.TensorBoardWriter("runs/first", every=10))

    Args:
        to: the folder of the run, or a ``SummaryWriter``, which the caller closes.
        every: logs each so many-th step.

    Raises:
        ImportError: tensorboard is not installed.
    """

    def __init__(self, to: Any, *, every: int = 1) -> None:
        super().__init__(every)
        self._to, self._writer = to, None if isinstance(to, str | Path) else to
        if self._writer is None:
            _check("TensorBoardWriter", "tensorboard")

    def _write(self, values: Mapping[str, float], step: int) -> None:
        if self._writer is None:
            made = import_module("torch.utils.tensorboard").SummaryWriter
            self._writer = made(str(self._to))
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is not in the folder yet, and close its file."""
        if self._writer is not None:
            self._writer.close()


class WandbWriter(_Writer):
    """Logs stats with Weights & Biases, under names such as ``step/samples_per_sec``.

    >>> # model.add_callback(ss.WandbWriter(project="first"))

    Args:
        run: a run that ``wandb.init`` returned; if None, the first rank calls it when it logs
            first.
        every: logs each so many-th step.
        options: arguments of ``wandb.init``.

    Raises:
        ImportError: wandb is not installed.
    """

    def __init__(self, run: Any = None, *, every: int = 1, **options: Any) -> None:
        super().__init__(every)
        self._run, self._options = run, options
        if run is None:
            _check("WandbWriter", "wandb")

    def _write(self, values: Mapping[str, float], step: int) -> None:
        if self._run is None:
            self._run = import_module("wandb").init(**self._options)
        self._run.log(dict(values), step=step)


def _check(writer: str, package: str) -> None:
    """Refuse a writer on all ranks alike, though only the first one imports its package."""
    if find_spec(package) is None:
        raise ImportError(f"{writer} needs {package}: pip install 'rvdcomm[{package}]'.")
