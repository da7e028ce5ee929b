"""Assignments: how the ops of many runs are cut best, all runs at once.

Runs of one model have the same nodes and edges, in other numbers. So one elimination, with a place
for every run, solves all of them (``space.elimination``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from superscaler_core.errors import PlanError
from superscaler_core.planners.hierarchical.runs import Counts, Run, Runs
from superscaler_core.planners.space import Array, Space
from superscaler_core.planners.space.alpa_intra import alpa_intra
from superscaler_core.planners.space.elimination import Choices, Core

PRICES = (0.1, 1.0, 10.0)
"""Of memory: the time of the fastest way for so many times the memory of a device."""

AT_ONCE = 64
"""Runs that are solved together: arrays of some ten megabytes."""


def assignments(
    runs: Runs, wanted: Sequence[Run], in_flight: int
) -> Iterator[list[tuple[float, Choices]]]:
    """For every run its fastest assignment, and where that needs much memory, leaner ones.

    Those are the fastest at some prices of memory, so each is the best for some limit of memory
    (Everett, 1963).

    Args:
        runs: of a model on a mesh.
        wanted: which.
        in_flight: microbatches that a stage of its size has to hold, or nearly.

    Returns:
        Each with the time of a step in seconds, and the choices ``[node]`` of all nodes of the
        model; those of nodes that the run does not have mean nothing. A run of which no assignment
        can be has an empty list.
    """
    for start in range(0, len(wanted), AT_ONCE):
        yield from _Batch(runs, wanted[start : start + AT_ONCE]).found(in_flight)


@dataclass(frozen=True, eq=False)
class _Batch:
    """Some runs of a model, ``[run]``."""

    runs: Runs
    wanted: Sequence[Run]

    def found(self, in_flight: int) -> list[list[tuple[float, Choices]]]:
        """The assignments of every run, each once, the fastest first."""
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
                    break  # a programme each takes longer than it is worth
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
        """What every choice of a node adds, ``[run, choice]``, by the node."""
        return [
            _times(self._counts[:, node, None], secs / of.count)
            for node, (of, secs) in enumerate(
                zip(self._space.nodes, self._space.node_secs, strict=True)
            )
        ]

    @cached_property
    def _edge_secs(self) -> list[Array]:
        """What every pair of choices adds, ``[run, choice, choice]``, by the edge."""
        counts = self.runs.edge_counts(self.wanted)
        return [
            _times(counts[:, edge, None, None], secs / of.count)
            for edge, (of, secs) in enumerate(
                zip(self._space.edges, self._space.edge_secs, strict=True)
            )
        ]

    def _held(self, in_flight: int) -> list[Array]:
        """Bytes of every choice, ``[run, choice]``, by the node."""
        return [
            self._counts[:, number, None] * (node.resting_bytes + in_flight * node.kept_bytes)
            for number, node in enumerate(self._space.nodes)
        ]

    def _secs(self, choices: Choices, some: Choices | slice = slice(None)) -> Array:
        """Times of a step, ``[run]``, of choices ``[run, node]``."""
        total: Array = np.zeros(len(choices))
        for node, secs in enumerate(self._node_secs):
            total += _at(secs[some], choices[:, node])
        for edge, secs in zip(self._space.edges, self._edge_secs, strict=True):
            rows = _at(secs[some], choices[:, edge.src])
            total += _at(rows, choices[:, edge.dst])
        return total

    # --- solutions ------------------------------------------------------------------------------

    def _core(self, node_secs: Sequence[Array], some: Choices | slice = slice(None)) -> Core:
        """What elimination leaves."""
        core = Core.joined(self._space, node_secs, [secs[some] for secs in self._edge_secs])
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
            with suppress(PlanError):  # none can be, so the first choices take forever as well
                found[place, list(numbers)] = alpa_intra(free).assignment
        return found


def _times(count: Counts, secs: Array) -> Array:
    """Costs so many times; what is not there costs nothing, also where it cannot be."""
    with np.errstate(invalid="ignore"):
        return np.where(count > 0, count * secs, 0.0)


def _at(costs: Array, choices: Choices) -> Array:
    """Every run's costs at its choice, of ``[run, choice, ...]``."""
    return costs[np.arange(len(choices)), choices]
