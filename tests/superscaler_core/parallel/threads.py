"""Parallel models for tests, whose ranks are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import superscaler_core as ss
from superscaler_core.front_end import ModelCall
from superscaler_core.parallel import Programs, SProgram
from superscaler_core.parallel.programs import MadeProgram
from superscaler_core.training import in_threads

T = TypeVar("T")


class ProgramsOfThreads(Programs):
    """Programs that the ranks of one process share.

    No rank computes while a model is traced, because tracing patches torch for the whole process.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._barrier = threading.Barrier(self.num_devices, timeout=60)

    def of(self, call: ModelCall, trained: frozenset[str] | None) -> MadeProgram:
        self._barrier.wait()
        found = super().of(call, trained)
        self._barrier.wait()
        return found

    def captured(self, call: ModelCall) -> ss.Graph:
        self._barrier.wait()
        found = super().captured(call)
        self._barrier.wait()
        return found


def on_threads(
    model: Any,
    example: Mapping[str, Any],
    num_ranks: int,
    work: Callable[[ss.Parallel], T],
    *,
    plan: str | Callable[..., None] = "data_parallel",
    options: Mapping[str, Any] | None = None,
    batch: ss.Batch | None = None,
    results: tuple[str | int, ...] = (),
    step_results: tuple[str | int, ...] = (),
    timeout_secs: float = 60.0,
    **how: Any,
) -> dict[int, T]:
    """Run ``work(parallelize(model, kwargs=example, ...))`` on every rank; results by rank."""
    programs = ProgramsOfThreads(
        model, SProgram.of(plan, options), num_ranks, batch=batch, results=results,
        step_results=step_results,
    )  # fmt: skip
    call = programs.call((), example)
    ranks = range(num_ranks)
    return in_threads(
        lambda there: work(ss.Parallel(programs, call, there, **how)),
        ranks,
        timeout_secs=timeout_secs,
    )
