"""Reported: a parallel model tells how fast its calls are, and calls back after each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from superscaler_core.cost import DeviceProfile
from superscaler_core.errors import PlanError
from superscaler_core.parallel.callbacks import Callback
from superscaler_core.parallel.habits import Habits
from superscaler_core.parallel.meter import Facts, Meter, checked_peak
from superscaler_core.parallel.stats import Stats, StepStats
from superscaler_core.training.trainer import Trainer

T = TypeVar("T")


class Reported(Habits):
    """What a ``Parallel`` tells of its calls.

    Attributes:
        trainer: the trainer of the model.
        meter: counts and times the calls.
        facts: what a call of the program that ran last does.
    """

    trainer: Trainer
    meter: Meter
    facts: Facts

    @property
    def callbacks(self) -> list[Callback]:
        """The callbacks, in the order in which they are called."""
        found: list[Callback] = self.__dict__.setdefault("_callbacks", [])
        return found

    def add_callback(self, callback: Callback) -> None:
        """Call this after every step and evaluation on this rank, after the callbacks before it.

        >>> # model.add_callback(ss.TensorBoardWriter("runs/first"))

        Args:
            callback: a ``Callback``, such as ``TensorBoardWriter`` or ``WandbWriter``.

        Raises:
            PlanError: it is no ``Callback``.
        """
        if not isinstance(callback, Callback):
            raise PlanError(
                f"add_callback takes an object of a class that derives from ss.Callback, not "
                f"{callback!r}."
            )
        self.callbacks.append(callback)

    def remove_callback(self, callback: Callback) -> None:
        """Do not call this any more; nothing happens if it was not added."""
        self.callbacks[:] = [each for each in self.callbacks if each is not callback]

    def stats(
        self,
        *,
        peak_flops_per_sec: float | DeviceProfile | None = None,
        reset: bool = True,
        of_all_ranks: bool = False,
    ) -> Stats:
        """How fast the last step was, and all steps since these stats were last taken.

        It waits neither for a device nor for other ranks, unless ``of_all_ranks``.

        >>> # stats = model.stats(peak_flops_per_sec=ss.cost.PROFILES["h100"])
        >>> # print(stats.all)
        >>> # step 11 to 20: 250 ms each, 64 samples/s, ..., MFU 41.3 %

        Args:
            peak_flops_per_sec: the floating-point operations per second of a device at best, or its
                profile, for the model FLOPs utilisation; from then on callbacks have it too.
            reset: whether the next stats begin here.
            of_all_ranks: collective: times and memory are the largest of all ranks, and bytes sent
                those of all ranks together.

        Raises:
            PlanError: the peak is no number above 0; or the profile has none for the dtype in which
                most of the model is computed.
        """
        if peak_flops_per_sec is not None:
            self.meter.peak = checked_peak(peak_flops_per_sec)
        found = self.meter.take(reset=reset)
        return self._together(found) if of_all_ranks else found

    def _together(self, found: Stats) -> Stats:
        with self.trainer.calls.prepared("stats"):
            pass
        row = torch.tensor([_numbers(found.last), _numbers(found.all)], dtype=torch.float64)
        rows = self.trainer.calls.rows(row.flatten()).reshape(-1, *row.shape)
        most, total = rows.amax(0).tolist(), rows.sum(0).tolist()
        last, every = (
            replace(
                stats, secs=most[i][0], wall_secs=most[i][1], peak_bytes=int(most[i][2]),
                sent_bytes=int(total[i][3]),
            )
            for i, stats in enumerate((found.last, found.all))
        )  # fmt: skip
        return Stats(last, every)

    def _reported(
        self,
        kind: str,
        run: Callable[[tuple[Any, ...], Mapping[str, Any]], T],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        loss_of: Callable[[T], Tensor],
    ) -> T:
        """A call of the user that is timed, and after which callbacks are called."""
        with self.trainer.calls.users.inside(kind, args, kwargs), self.meter.timed() as measured:
            found = run(args, kwargs)
        self.meter.note(kind, self.facts, measured)
        # After the call: what callbacks do, such as an evaluation, are calls of their own.
        if self.callbacks:
            stats = self.meter.last(kind)
            for callback in [*self.callbacks]:
                getattr(callback, f"on_{kind}_end")(self, stats, loss_of(found))
        return found


def _numbers(stats: StepStats) -> list[float]:
    return [stats.secs, stats.wall_secs, float(stats.peak_bytes), float(stats.sent_bytes)]
