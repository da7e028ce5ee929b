"""Galvatron's knapsack: each layer of a stage has degrees of its own, under a memory budget.

Objective: with M microbatches, and stages of equally many layers, or nearly, that take t_i seconds
per microbatch, the least

    sum of t_i + (M - 1) max of t_i

over the numbers of stages that divide the number of devices. Inside a stage, f(l, v, s) is the
least time of its first l layers in v units of memory, the last of them with strategy s:

    f(l, v, s) = time(l, s) + min over r of (f(l - 1, v - memory(l, s), r) + change(l, r, s))

A strategy is one of the degrees that use all devices of the stage. ``time`` includes a microbatch's
share of the reduction of gradients. ``change`` is the time to move a microbatch from the layout of
one strategy to that of the next.

Complexity: ``O(K V G**2)`` for K layers, V units of memory and G strategies, for every number of
stages.

Differences from the published code (``dynamic_programming.py``): a unit is 1 / ``UNITS`` of the
memory that a stage may use, instead of a megabyte, and memory is rounded up to units, so that every
result really fits. Recomputation and sharded data parallelism are no strategies. Work memory, which
a layer needs only while it runs, is taken from the budget once: the largest of all layers and
strategies of a stage.

Source: Miao et al., Galvatron, VLDB 2023, section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from superscaler_core.published.stages.cut import StageCut
from superscaler_core.published.stages.degrees import Degrees
from superscaler_core.published.stages.problem import StageProblem

UNITS = 2048
"""Number of units into which a stage's memory is divided."""

Strategies = list[Degrees]


def galvatron(problem: StageProblem) -> StageCut:
    """Choose the number of stages, and for every layer its degrees on its stage's devices.

    Raises:
        PlanError: no choice fits in memory.
    """
    best, chosen = np.inf, None
    num_layers, num_devices = len(problem.layers), problem.num_devices
    for num in range(1, min(num_layers, num_devices) + 1):
        if num_devices % num:
            continue
        ends = [num_layers * i // num for i in range(num + 1)]
        runs = [range(a, b) for a, b in pairwise(ends)]
        found = [
            galvatron_stage(problem, run, num_devices // num, num - index - 1)
            for index, run in enumerate(runs)
        ]
        secs = [value for value, _ in found]
        step_secs = sum(secs) + (problem.microbatches - 1) * max(secs)
        if step_secs < best:
            best = step_secs
            chosen = [(run, degrees) for run, (_, degrees) in zip(runs, found, strict=True)]
    if chosen is None:
        raise problem.no_cut("Galvatron")
    return problem.placed(chosen, best)


def galvatron_stage(
    problem: StageProblem, layers: Sequence[int], num_devices: int, num_behind: int
) -> tuple[float, Strategies]:
    """The least time of a microbatch in one stage, and the degrees of its layers.

    Args:
        problem: the stage problem.
        layers: a run of its layers.
        num_devices: devices of the stage.
        num_behind: stages after it.

    Returns:
        Infinity and no degrees if nothing fits.
    """
    numbers = [i for i, each in enumerate(problem.degrees) if each.num_devices == num_devices]
    if not numbers:
        return np.inf, []
    units = memory_units(problem, layers, numbers, num_behind)
    secs = problem.table("secs") + problem.table("sync_secs") / problem.microbatches
    least = np.zeros((UNITS + 1, len(numbers)))
    before: list[np.ndarray] = []
    for row, layer in enumerate(layers):
        changes = np.array(
            problem.layers[layer].change_secs or np.zeros((len(problem.degrees),) * 2)
        )
        if row:
            ways = least[:, :, None] + changes[np.ix_(numbers, numbers)]
            before.append(ways.argmin(axis=1))
            least = ways.min(axis=1)
        moved = np.full_like(least, np.inf)
        for column, number in enumerate(numbers):
            need = units[row, column]
            if need <= UNITS:
                moved[need:, column] = least[: UNITS + 1 - need, column] + secs[layer, number]
        least = moved
    value = float(least[UNITS].min())
    if not np.isfinite(value):
        return np.inf, []
    column, left = int(least[UNITS].argmin()), UNITS
    chosen = [column]
    for row in range(len(layers) - 1, 0, -1):
        left -= units[row, column]
        column = int(before[row - 1][left, column])
        chosen.append(column)
    return value, [problem.degrees[numbers[each]] for each in reversed(chosen)]


def memory_units(
    problem: StageProblem, layers: Sequence[int], numbers: Sequence[int], num_behind: int
) -> np.ndarray:
    """The memory of every layer in units, ``[layer, strategy]``; above ``UNITS`` if it never fits.

    Args:
        problem, layers, num_behind: as in ``galvatron_stage``.
        numbers: numbers of the strategies among the problem's degrees.
    """
    rest, kept, work = (
        problem.table(name)[np.ix_(layers, numbers)]
        for name in ("resting_bytes", "kept_bytes", "work_bytes")
    )
    can_be = np.isfinite(rest)
    free = problem.memory_bytes - work[can_be].max(initial=0.0)
    in_flight = min(num_behind + 1, problem.microbatches)
    if free <= 0:
        return np.full(rest.shape, UNITS + 1)
    needed = np.ceil(np.where(can_be, rest + in_flight * kept, 0.0) / free * UNITS)
    return np.where(can_be, np.minimum(needed, UNITS + 1), UNITS + 1).astype(int)
