"""Assignments: the best cuts of the ops of many runs of layers, computed for all runs at once.

Runs of one model have the same nodes and edges, and differ only in how often each occurs. So one
elimination solves all of them, with one entry per run in its arrays (``space.elimination``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from superscaler_core.errors import PlanError
from superscaler_core.published.alpa.alpa_intra import alpa_intra
from superscaler_core.published.alpa.runs import Counts, Run, Runs
from superscaler_core.space import Array, Space
from superscaler_core.space.elimination import Choices, Core

PRICES = (0.1, 1.0, 10.0)
"""Prices of memory: a device's whole memory costs this many times the time of the fastest
assignment."""

AT_ONCE = 64
"""Runs that are solved together; their arrays take some ten megabytes."""


def assignments(
    runs: Runs, wanted: Sequence[Run], in_flight: int
) -> Iterator[list[tuple[float, Choices]]]:
    """For every run its fastest assignment and, if that needs much memory, leaner ones.

    A leaner assignment is the fastest one at some price of memory, so it is the best for some limit
    of memory (Everett, 1963).

    Args:
        runs: the runs of a model on a mesh.
        wanted: the runs to solve.
        in_flight: microbatches that a stage on this mesh keeps at a time, approximately.

    Returns:
        For every run a list of its assignments, each with the time of a step in seconds and the
        choices ``[node]`` of all nodes of the model. Choices of nodes that the run does not have
        mean nothing. The list is empty if no assignment is possible.
    """
    for start in range(0, len(wanted), AT_ONCE):
        yield from _Batch(runs, wanted[start : start + AT_ONCE]).found(in_flight)


@dataclass(frozen=True, eq=False)
class _Batch:
    """Runs of a model that are solved together, ``[run]``."""

    runs: Runs
    wanted: Sequence[Run]

    def found(self, in_flight: int) -> list[list[tuple[float, Choices]]]:
        """The assignments of every run, without duplicates, the fastest first."""
        fastest = self._fastest()
        secs = self._secs(fastest)
        found = [{tuple(row): (each, row)} for each, row in zip(secs, fastest, strict=True)]
        limit = self._space.memory_bytes
        for flying in (0, in_flight):
            held = self._held(flying)
            need = sum(_at(size, fastest[:, node]) for node, size in enumerate(held))
            short = np.flatnonzero((2 * need >= limit) & np.isfinite(secs))
            if not len(short):
                continue
            for price in PRICES:
                per_byte = price * secs / limit
                priced = [
                    (own + per_byte[:, None] * size)[short]
                    for own, size in zip(self._node_secs, held, strict=True)
                ]
                core = self._core(priced, short)
                if core.node_secs:
                    break  # one integer programme per run takes longer than it is worth
                leaner = core.choices({})
                for place, each, row in zip(short, self._secs(leaner, short), leaner, strict=True):
                    found[place].setdefault(tuple(row), (each, row))
        return [
            [(float(each), row) for each, row in mine.values() if np.isfinite(each)]
            for mine in found
        ]

    # --- costs ----------------------------------------------------------------------------------

    @property
    def _space(self) -> Space:
        return self.runs.priced.space

    @cached_property
    def _counts(self) -> Counts:
        return self.runs.node_counts(self.wanted)

    @cached_property
    def _node_secs(self) -> list[Array]:
        """For every node the seconds that each choice adds, ``[run, choice]``."""
        return [
            _times(self._counts[:, node, None], secs / of.count)
            for node, (of, secs) in enumerate(
                zip(self._space.nodes, self._space.node_secs, strict=True)
            )
        ]

    @cached_property
    def _edge_secs(self) -> list[Array]:
        """For every edge the seconds that each pair of choices adds, ``[run, choice, choice]``."""
        counts = self.runs.edge_counts(self.wanted)
        return [
            _times(counts[:, edge, None, None], secs / of.count)
            for edge, (of, secs) in enumerate(
                zip(self._space.edges, self._space.edge_secs, strict=True)
            )
        ]

    def _held(self, in_flight: int) -> list[Array]:
        """For every node the bytes that each choice holds, ``[run, choice]``."""
        return [
            self._counts[:, number, None] * (node.resting_bytes + in_flight * node.kept_bytes)
            for number, node in enumerate(self._space.nodes)
        ]

    def _secs(self, choices: Choices, some: Choices | slice = slice(None)) -> Array:
        """Seconds of a step, ``[run]``, for choices ``[run, node]``; of the runs ``some`` only."""
        total: Array = np.zeros(len(choices))
        for node, secs in enumerate(self._node_secs):
            total += _at(secs[some], choices[:, node])
        for edge, secs in zip(self._space.edges, self._edge_secs, strict=True):
            rows = _at(secs[some], choices[:, edge.src])
            total += _at(rows, choices[:, edge.dst])
        return total

    # --- solutions ------------------------------------------------------------------------------

    def _core(self, node_secs: Sequence[Array], some: Choices | slice = slice(None)) -> Core:
        """The core that elimination leaves."""
        core = Core.of(self._space, node_secs, [secs[some] for secs in self._edge_secs])
        core.eliminate()
        return core

    def _fastest(self) -> Choices:
        """The fastest choices, ``[run, node]``."""
        core = self._core(self._node_secs)
        if not core.node_secs:
            return core.choices({})
        found = np.zeros((len(self.wanted), len(self._space.nodes)), dtype=np.int64)
        for place, run in enumerate(self.wanted):
            space, numbers = self.runs.space(*run)
            free = Space(space.nodes, space.edges, space.microbatches)
            with suppress(PlanError):  # none is possible: the first choices are infinite as well
                found[place, list(numbers)] = alpa_intra(free).assignment
        return found


def _times(count: Counts, secs: Array) -> Array:
    """Costs times counts; where the count is 0 the cost is 0, even if it is infinite."""
    with np.errstate(invalid="ignore"):
        return np.where(count > 0, count * secs, 0.0)


def _at(costs: Array, choices: Choices) -> Array:
    """The costs of every run at its own choice, from ``[run, choice, ...]``."""
    return costs[np.arange(len(choices)), choices]
