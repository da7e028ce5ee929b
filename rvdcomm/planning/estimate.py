"""Estimate: compare the times of candidate paths before any of them is lowered.

Steps between equal shards are priced by formula, for any number of ranks. For other steps the moves
are counted, which gives the bytes of the program without lowering it.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod

from rvdcomm.cost import step_cost
from rvdcomm.layout import Layout
from rvdcomm.network import Network, Topology
from rvdcomm.planning.binding import Binding, Grid
from rvdcomm.planning.path import Path, Step
from rvdcomm.planning.primitives import RebindPricer
from rvdcomm.planning.transfer import transfer

MAX_COUNTED_RANKS = 64
"""On more ranks, counting the moves of one exchange takes seconds."""

SIGNIFICANT_DIGITS = 9
"""Times are rounded to this many digits, so that rounding errors break no tie."""


class Estimator:
    """Prices paths on one topology; a step that several paths share is priced once.

    If a network is given, it has no levels: all steps are counted, and their times are those of its
    wires. The topology then resembles it.
    """

    def __init__(self, topology: Topology, item_bytes: int, network: Network | None = None) -> None:
        self.topology, self.item_bytes, self.network = topology, item_bytes, network
        # Keys are ids, since comparing two steps takes as long as pricing one. Each value holds its
        # step or grid, so that no id is reused while it is a key.
        self._costs: dict[int, tuple[Step, tuple[float, int] | None]] = {}
        self._pricers: dict[int, RebindPricer] = {}

    def cheapest_first(self, paths: list[Path]) -> list[Path]:
        """Sort candidates by time, rounds and number of steps; ties keep the given order.

        On more than ``MAX_COUNTED_RANKS`` ranks, candidates without a formula are not counted and
        come last. If no candidate has a formula, those without a direct exchange come first; if all
        have a direct exchange, all are counted.
        """
        priced, rest = paths, list[Path]()
        if self.network is None and len(paths[0].ranks) > MAX_COUNTED_RANKS:
            has_formula = [all(map(self._closed_form, path.steps)) for path in paths]
            if any(has_formula):
                priced = [path for path, has in zip(paths, has_formula, strict=True) if has]
                rest = [path for path, has in zip(paths, has_formula, strict=True) if not has]
            elif not all(map(_is_exchanged, paths)):
                return sorted(paths, key=_is_exchanged)
        return [*sorted(priced, key=self._order), *rest]

    def _order(self, path: Path) -> tuple[float, int, int]:
        costs = [self._closed_form(step) or self.counted(step) for step in path.steps]
        secs = float(f"{sum(secs for secs, _ in costs):.{SIGNIFICANT_DIGITS}g}")
        return secs, sum(rounds for _, rounds in costs), len(path.steps)

    def _closed_form(self, step: Step) -> tuple[float, int] | None:
        if id(step) not in self._costs:
            self._costs[id(step)] = step, self._priced(step)
        return self._costs[id(step)][1]

    def _priced(self, step: Step) -> tuple[float, int] | None:
        src, dst = step.src.source, step.dst.source
        if self.network is not None:
            return None
        if not (src.is_even and dst.is_even):
            return None
        if step.direct:
            found = transfer(src, dst, self.item_bytes, self.topology)
            return None if found is None else (found.secs, found.rounds)
        if isinstance(src, Layout) or isinstance(dst, Layout):
            return None
        middle = [step.middle.source] if step.middle else []
        states = [state for state in (src, *middle, dst) if isinstance(state, Binding)]
        pricer = self._pricer(src.grid)
        step_exchanges = [pricer.ticks(a.targets, b.targets) for a, b in pairwise(states)]
        return pricer.secs(sum(ticks for ticks, _ in step_exchanges)), sum(
            rounds for _, rounds in step_exchanges
        )

    def _pricer(self, grid: Grid) -> RebindPricer:
        if id(grid) not in self._pricers:
            num_bytes = prod(grid.shape) * self.item_bytes
            self._pricers[id(grid)] = RebindPricer(grid, self.topology, num_bytes)
        return self._pricers[id(grid)]

    def counted(self, step: Step) -> tuple[float, int]:
        """Seconds and rounds of a step, counted from its moves."""
        traffic = step.traffic(self.topology, self.item_bytes)
        links = self.topology if self.network is None else self.network
        costs = [step_cost(step_exchange, links) for step_exchange in traffic]
        return sum(cost.secs for cost in costs), sum(cost.rounds for cost in costs)


def _is_exchanged(path: Path) -> bool:
    """Whether some step is an exchange among all ranks."""
    return any(step.direct for step in path.steps)
