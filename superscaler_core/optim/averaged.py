"""Averaged: averages of parameters over steps (EMA, SWA), each where its parameter is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rvdcomm import CheckpointError
from superscaler_core.errors import PlanError
from superscaler_core.training.checksum import checksum
from superscaler_core.training.trainer import Trainer

Average = Callable[[Tensor, Tensor, int], Tensor]
"""From an average, a value and the number of values so far to the new average, by element."""


class Averaged:
    """Averages of a parallel model's parameters, as ``torch.optim.swa_utils.AveragedModel``.

    They are element-wise, so each rank averages the boxes that it stores, and nothing moves.

    >>> # ema = ss.optim.Averaged(model, decay=0.999)
    >>> # optimizer.step(); ema.update()
    >>> # with ema.applied():
    >>> #     model.evaluate(**batch)
    >>> # ema.save("averages"); ema.load("averages")

    Args:
        model: a ``Parallel`` or ``Trainer``.
        decay: the exponential average keeps this share of itself in each update; None for the equal
            average of all values (SWA).
        average: computes averages in another way, as ``avg_fn`` of torch's class.

    Attributes:
        num_averaged: the number of updates; the first one copies the values. None if averages were
            put into the model inside ``applied``, of an unknown number of updates.

    Raises:
        PlanError: both ``decay`` and ``average`` are given, or ``decay`` is not in [0, 1].
    """

    def __init__(
        self, model: Any, decay: float | None = None, average: Average | None = None
    ) -> None:
        if decay is not None and (average is not None or not 0 <= decay <= 1):
            raise PlanError(f"Averaged takes a decay from 0 to 1 or an average, not {decay}.")
        self._trainer: Trainer = getattr(model, "trainer", model)
        self._decay, self._average = decay, average
        self._averages = {
            name: parameter.detach().clone() for name, parameter in self._stored.items()
        }
        self.num_averaged: int | None = 0

    @property
    def _stored(self) -> dict[str, Tensor]:
        return dict(self._trainer.named_parameters())

    @torch.no_grad()
    def update(self) -> None:
        """Take the present values into the averages.

        Raises:
            PlanError: the averages were put there inside ``applied``, and how much one more value
                counts depends on the number of updates, which is not known: use ``load``.
        """
        num = self.num_averaged
        if num is None and self._decay is None:
            raise PlanError(
                "Averaged.update: averages were loaded inside applied(), and of how many values "
                "they are is not known: save and load them by ema.save and ema.load, or set "
                "ema.num_averaged."
            )
        averages, values = [*self._averages.values()], [*self._stored.values()]
        if num == 0:
            torch._foreach_copy_(averages, values)
        elif self._average is not None:
            for old, value in zip(averages, values, strict=True):
                old.copy_(self._average(old, value, num or 0))
        else:
            weight = 1 / ((num or 0) + 1) if self._decay is None else 1 - self._decay
            torch._foreach_lerp_(averages, values, weight)
        self.num_averaged = None if num is None else num + 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside this context the model has the averages as its values.

        ``evaluate``, ``state_dict`` and ``save`` of the model are then those of the averages, and
        what is changed or loaded here are the averages.
        """
        stored = self._stored
        before = {} if self.num_averaged else {n: checksum(x) for n, x in self._averages.items()}
        held = {name: value.detach().clone() for name, value in stored.items()}
        with torch.no_grad():
            for name, value in stored.items():
                value.copy_(self._averages[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in stored.items():
                    self._averages[name].copy_(value)
                    value.copy_(held[name])
            if any(checksum(self._averages[name]) != known for name, known in before.items()):
                self.num_averaged = None

    def save(self, folder: str | Path) -> None:
        """Write the averages, and of how many values they are, as a checkpoint of the model.

        Any rank numbers and plans can load it, also as the model. Collective; errors as of the
        model's ``save``.
        """
        with self.applied():
            self._trainer.save(folder, extra={"num_averaged": self.num_averaged})

    def load(self, folder: str | Path) -> None:
        """Read what ``save`` wrote; the model keeps its values. Collective.

        Raises:
            CheckpointError: as of the model's ``load``; or there is no number of updates, as if the
                model had been saved.
        """
        with self.applied():
            saved = self._trainer.load(folder).extra
        if not isinstance(saved, dict) or "num_averaged" not in saved:
            raise CheckpointError(f"{folder} was not written by Averaged.save.")
        self.num_averaged = saved["num_averaged"]
