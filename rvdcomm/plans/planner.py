"""Planner: ``plan`` picks the cheapest candidate; a ``Plan`` knows its program, cost and bound."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from rvdcomm.cost import Cost, StepCost, lower_bound, step_cost, total_cost
from rvdcomm.errors import LayoutError, MemoryLimitError
from rvdcomm.layout import (
    DEFAULT_LINK,
    ITEM_BYTES,
    Layout,
    Level,
    Topology,
    check_summable,
    dtype_name,
)
from rvdcomm.planning.candidates import candidate_paths, direct_path
from rvdcomm.planning.estimate import MAX_COUNTED_RANKS, Estimator
from rvdcomm.planning.modelled_bound import modelled_bound
from rvdcomm.planning.path import Path
from rvdcomm.plans.modelled import ModelledCost, modelled_cost
from rvdcomm.program import Program
from rvdcomm.program.lower import lower
from rvdcomm.program.verify import verify
from rvdcomm.units import bytes_text, secs_text

SLICE_COUNTS = (2, 4, 8, 16, 32, 64)
"""Windows that a direct exchange may be cut into to stay below a memory limit."""

MAX_CACHED_PLANS = 4096


@dataclass(frozen=True, eq=False)
class Plan:
    """How to take a tensor of ``dtype`` from ``path.src`` to ``path.dst``; prints as a table.

    Law (tests/plans/test_plan.py): ``cost`` and ``simulate`` count the same bytes, and the same
    peak. On more than ``MAX_COUNTED_RANKS`` ranks costs are modelled where there is a formula,
    and no program is made: bytes of equal shards are the same, all else is what ``modelled.py``
    says.
    """

    path: Path
    dtype: str
    topology: Topology

    @property
    def src(self) -> Layout:
        """The layout that the tensor has."""
        return self.path.src

    @property
    def dst(self) -> Layout:
        """The layout that the tensor gets."""
        return self.path.dst

    @cached_property
    def program(self) -> Program:
        """The path, lowered for all ranks."""
        return lower(self.path, self.dtype, self.topology)

    @cached_property
    def modelled(self) -> ModelledCost | None:
        """What the plan costs by formula; None where there is none."""
        return modelled_cost(self.path, ITEM_BYTES[self.dtype], self.topology)

    @cached_property
    def is_counted(self) -> bool:
        """Whether costs are counted in the program."""
        return len(self.path.ranks) <= MAX_COUNTED_RANKS or self.modelled is None

    @cached_property
    def step_costs(self) -> tuple[StepCost, ...]:
        """What every step of the path costs."""
        if not self.is_counted and self.modelled is not None:
            return self.modelled.steps
        return program_step_costs(self.program, len(self.path.steps), self.topology)

    @cached_property
    def cost(self) -> Cost:
        """What the plan costs."""
        if not self.is_counted and self.modelled is not None:
            return self.modelled.cost
        return total_cost(self.step_costs, self.peak_bytes)

    @cached_property
    def peak_bytes(self) -> int:
        """Memory of the rank whose buffers take most, counted in the program."""
        return max(self.program.peak_bytes(rank) for rank in self.program.ranks)

    @cached_property
    def bound(self) -> Cost:
        """A lower bound on the cost of any plan, field by field."""
        request = self.src, self.dst, ITEM_BYTES[self.dtype], self.topology
        if len(self.path.ranks) > MAX_COUNTED_RANKS:
            found = modelled_bound(*request)
            if found is not None:
                return found
        return lower_bound(*request)

    @property
    def gap(self) -> float:
        """``cost.secs / bound.secs``: 1.0 is optimal; infinite if the bound alone is 0."""
        if self.bound.secs == 0:
            return 1.0 if self.cost.secs == 0 else float("inf")
        return self.cost.secs / self.bound.secs

    def verify(self) -> None:
        """Prove the program right, or raise a ProgramError."""
        verify(self.program)

    def __str__(self) -> str:
        shape = "x".join(map(str, self.src.shape)) or "scalar"
        notes = [
            f"{bytes_text(sum(c.recv_bytes.values()))}, {secs_text(c.secs)}"
            for c in self.step_costs
        ]
        lines = [
            f"{self.src.rvd} -> {self.dst.rvd}  {shape} {self.dtype}",
            *self.path.table(notes),
            f"cost   {_cost_text(self.cost)}",
            f"bound  {_cost_text(self.bound)}",
            f"gap    {self.gap:.3g}x   rounds {self.cost.rounds}   "
            f"{'peak' if self.is_counted else 'modelled'} memory "
            f"{bytes_text(self.cost.peak_bytes)} a rank (src and dst shards: "
            f"{bytes_text(self.bound.peak_bytes)})",
        ]
        return "\n".join(lines)


def _cost_text(cost: Cost) -> str:
    return (
        f"{secs_text(cost.secs)}, {bytes_text(cost.wire_bytes)} on the wire "
        f"({bytes_text(cost.host_bytes)} between hosts), busiest rank receives "
        f"{bytes_text(cost.recv_bytes)}"
    )


def plan(
    src: Layout,
    dst: Layout,
    dtype: Any = "float32",
    topology: Topology | None = None,
    memory_limit: int | None = None,
) -> Plan:
    """The cheapest plan from ``src`` to ``dst``; the same arguments give the same object.

    Args:
        src, dst: layouts of one global shape, over any ranks.
        dtype: a name, a numpy dtype or a torch dtype.
        topology: who is near to whom; one host with a port for every rank if None.
        memory_limit: bytes that no rank's buffers may exceed, src and dst shards included.

    Raises:
        LayoutError: the shapes differ, the dtype has no sum but a layout has V > 1, or a rank is
            not in the topology.
        MemoryLimitError: no plan fits; the message names the least limit that one fits.
    """
    return _plan_as_given(src, dst, dtype, topology, memory_limit)


@lru_cache(maxsize=MAX_CACHED_PLANS)
def _plan_as_given(
    src: Layout, dst: Layout, dtype: Any, topology: Topology | None, memory_limit: int | None
) -> Plan:
    """Plans by the arguments as they are written, so that a look-up checks nothing."""
    name = dtype_name(dtype)
    if src.shape != dst.shape:
        raise LayoutError(f"src {src} and dst {dst} differ in shape: {src.shape} and {dst.shape}.")
    check_summable(name, [src, dst])
    if topology is None:
        topology = default_topology((*src.ranks, *dst.ranks))
    for layout in (src, dst):
        topology.check_ranks(layout.span or layout.ranks)
    return _cached_plan(src, dst, name, topology, memory_limit)


def default_topology(ranks: Iterable[int]) -> Topology:
    """One host that holds these ranks."""
    ports = tuple((rank,) for rank in sorted(set(ranks)))
    return Topology((Level("rank", ports, DEFAULT_LINK),))


@lru_cache(maxsize=MAX_CACHED_PLANS)
def _cached_plan(
    src: Layout, dst: Layout, dtype: str, topology: Topology, memory_limit: int | None
) -> Plan:
    """Plans by what their arguments mean."""
    paths = list(candidate_paths(src, dst, ITEM_BYTES[dtype], topology))
    # One candidate, as for every even regular pair, needs no pricing.
    if len(paths) > 1:
        paths = Estimator(topology, ITEM_BYTES[dtype]).cheapest_first(paths)
    best = Plan(paths[0], dtype, topology)
    if memory_limit is None or best.peak_bytes <= memory_limit:
        return best
    least = best
    for candidate in (Plan(path, dtype, topology) for path in _leaner(paths[1:], src, dst)):
        if candidate.peak_bytes <= memory_limit:
            return candidate
        least = min(least, candidate, key=lambda made: made.peak_bytes)
    raise MemoryLimitError(
        f"{src.rvd} -> {dst.rvd} of shape {src.shape} {dtype}: memory_limit={memory_limit} bytes a "
        f"rank, but the least that a plan needs is {least.peak_bytes}; the src and dst shards "
        f"alone are {least.bound.peak_bytes}."
    )


def clear_cache() -> None:
    """Forget all plans, so that the next ``plan`` is cold."""
    _plan_as_given.cache_clear()
    _cached_plan.cache_clear()


def _leaner(paths: list[Path], src: Layout, dst: Layout) -> Iterator[Path]:
    """What to try when the cheapest path needs too much: the others, then ever finer windows."""
    yield from paths
    if src != dst:
        yield from (direct_path(src, dst, count) for count in (1, *SLICE_COUNTS))


def program_step_costs(
    program: Program, num_steps: int, topology: Topology
) -> tuple[StepCost, ...]:
    """Price every step of a program: its collectives' traffic, all groups at once."""
    traffic: list[dict[tuple[int, int], int]] = [{} for _ in range(num_steps)]
    rounds: list[dict[int, int]] = [{} for _ in range(num_steps)]
    for collective in program.collectives:
        total = traffic[collective.step]
        for pair, num_elements in collective.traffic().items():
            total[pair] = total.get(pair, 0) + num_elements * program.item_bytes
        # Groups of a step run at once, but what one rank takes part in runs one after another.
        for rank in collective.ranks:
            mine = rounds[collective.step]
            mine[rank] = mine.get(rank, 0) + collective.rounds
    return tuple(
        step_cost(pairs, topology, max(counts.values(), default=0))
        for pairs, counts in zip(traffic, rounds, strict=True)
    )
