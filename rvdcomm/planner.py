"""Planner: the cheapest path between any two layouts, its program, its cost and its bound.

Regular pairs over one rank set are searched as bindings (``search.py``). All other pairs (ragged
cuts that do not nest, groups that differ, overlap in part or are disjoint) are an exchange between
two planes: the src group may first reduce or split what it holds, the dst group may take its shards
in pieces and gather them. The direct exchange is always a candidate, so every pair has a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import product
from typing import Any

from rvdcomm.binding import Binding, R, V, refine
from rvdcomm.bound import lower_bound
from rvdcomm.cost import Cost, StepCost, step_cost, total_cost
from rvdcomm.dtypes import ITEM_BYTES, check_summable, dtype_name
from rvdcomm.errors import LayoutError, MemoryLimitError
from rvdcomm.layout import Layout
from rvdcomm.lower import lower
from rvdcomm.path import Path, State, Step, exchange_step, path_of_bindings, steps_of_bindings
from rvdcomm.primitives import RebindPricer, Targets
from rvdcomm.program import Program
from rvdcomm.search import cheapest_rebinds
from rvdcomm.topology import DEFAULT_LINK, Level, Topology
from rvdcomm.verify import verify

SLICE_COUNTS = (2, 4, 8, 16, 32, 64)
"""Windows that a direct exchange may be cut into to stay below a memory limit."""

MAX_CACHED_PLANS = 4096


@dataclass(frozen=True, eq=False)
class Plan:
    """How to take a tensor of ``dtype`` from ``path.src`` to ``path.dst``; prints as a table.

    Law (tests/test_plan.py): ``cost`` and ``simulate`` count the same bytes, and the same peak.
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
    def step_costs(self) -> tuple[StepCost, ...]:
        """What every step of the path costs, counted in its program."""
        return program_step_costs(self.program, len(self.path.steps), self.topology)

    @cached_property
    def cost(self) -> Cost:
        """What the plan costs, counted in its program."""
        peak_bytes = max(self.program.peak_bytes(rank) for rank in self.program.ranks)
        return total_cost(self.step_costs, peak_bytes)

    @cached_property
    def bound(self) -> Cost:
        """A lower bound on the cost of any plan, field by field."""
        return lower_bound(self.src, self.dst, ITEM_BYTES[self.dtype], self.topology)

    @property
    def gap(self) -> float:
        """``cost.secs / bound.secs``: 1.0 is optimal; infinite if the bound is 0 and the cost not."""
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
        table = "\n".join(self.path.table(notes))
        cost, bound = self.cost, self.bound
        return (
            f"{self.src.rvd} -> {self.dst.rvd}  {shape} {self.dtype}\n{table}\n"
            f"cost   {secs_text(cost.secs)}, {bytes_text(cost.wire_bytes)} on the wire "
            f"({bytes_text(cost.host_bytes)} between hosts), "
            f"busiest rank receives {bytes_text(cost.recv_bytes)}\n"
            f"bound  {secs_text(bound.secs)}, {bytes_text(bound.wire_bytes)} on the wire "
            f"({bytes_text(bound.host_bytes)} between hosts), "
            f"busiest rank receives {bytes_text(bound.recv_bytes)}\n"
            f"gap    {self.gap:.3g}x   rounds {cost.rounds}   "
            f"peak memory {bytes_text(cost.peak_bytes)} a rank (src and dst shards: "
            f"{bytes_text(bound.peak_bytes)})"
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
    name = dtype_name(dtype)
    if src.shape != dst.shape:
        raise LayoutError(f"src {src} and dst {dst} differ in shape: {src.shape} and {dst.shape}.")
    check_summable(name, [src, dst])
    if topology is None:
        topology = default_topology((*src.ranks, *dst.ranks))
    topology.check_ranks((*src.ranks, *dst.ranks))
    return _cached_plan(src, dst, name, topology, memory_limit)


def default_topology(ranks: Iterable[int]) -> Topology:
    """One host that holds these ranks."""
    ports = tuple((rank,) for rank in sorted(set(ranks)))
    return Topology((Level("rank", ports, DEFAULT_LINK),))


@lru_cache(maxsize=MAX_CACHED_PLANS)
def _cached_plan(
    src: Layout, dst: Layout, dtype: str, topology: Topology, memory_limit: int | None
) -> Plan:
    make = partial(Plan, dtype=dtype, topology=topology)
    plans = [make(path) for path in _candidates(src, dst, ITEM_BYTES[dtype], topology)]
    # One candidate, as for every even regular pair, needs no pricing here.
    if memory_limit is None:
        return plans[0] if len(plans) == 1 else min(plans, key=_rank_of_plan)
    sliced = (make(_sliced(src, dst, n)) for n in SLICE_COUNTS)
    least: Plan | None = None
    for group in (sorted([*plans, make(_sliced(src, dst, 1))], key=_rank_of_plan), sliced):
        for candidate in group:
            if candidate.cost.peak_bytes <= memory_limit:
                return candidate
            if least is None or candidate.cost.peak_bytes < least.cost.peak_bytes:
                least = candidate
    assert least is not None
    raise MemoryLimitError(
        f"{src.rvd} -> {dst.rvd} of shape {src.shape} {dtype}: memory_limit={memory_limit} bytes a "
        f"rank, but the least that a plan needs is {least.cost.peak_bytes}; the src and dst shards "
        f"alone are {least.bound.peak_bytes}."
    )


def _rank_of_plan(plan: Plan) -> tuple[float, int, int, str]:
    """Order of candidates: time (ties within a billionth), rounds, steps, text."""
    secs = sum(cost.secs for cost in _step_costs_of_moves(plan))
    rounds = sum(cost.rounds for cost in _step_costs_of_moves(plan))
    return float(f"{secs:.9g}"), rounds, len(plan.path.steps), str(plan.path)


def _step_costs_of_moves(plan: Plan) -> list[StepCost]:
    """Costs counted in moves: the same bytes as the program's, and much cheaper to get."""
    cached = plan.__dict__.get("_move_costs")
    if cached is None:
        item_bytes = ITEM_BYTES[plan.dtype]
        cached = [
            step_cost(_bytes_by_pair(moves, item_bytes), plan.topology)
            for step in plan.path.steps
            for moves in step.moves(plan.topology)
        ]
        plan.__dict__["_move_costs"] = cached
    return cached


def _bytes_by_pair(moves: Iterable[Any], item_bytes: int) -> Mapping[tuple[int, int], int]:
    traffic: dict[tuple[int, int], int] = {}
    for move in moves:
        pair = (move.src_rank, move.dst_rank)
        traffic[pair] = traffic.get(pair, 0) + move.box.num_elements * item_bytes
    return traffic


def program_step_costs(
    program: Program, num_steps: int, topology: Topology
) -> tuple[StepCost, ...]:
    """Price every step of a program: its collectives' traffic, all groups at once."""
    traffic: list[dict[tuple[int, int], int]] = [{} for _ in range(num_steps)]
    rounds: list[list[int]] = [[] for _ in range(num_steps)]
    for collective in program.collectives:
        total = traffic[collective.step]
        for pair, num_elements in collective.traffic().items():
            total[pair] = total.get(pair, 0) + num_elements * program.item_bytes
        rounds[collective.step].append(collective.rounds)
    return tuple(
        step_cost(pairs, topology, max(counts, default=0))
        for pairs, counts in zip(traffic, rounds, strict=True)
    )


# --- candidates ---------------------------------------------------------------------------------


def _candidates(src: Layout, dst: Layout, item_bytes: int, topology: Topology) -> Iterator[Path]:
    """Paths of which one is the best known."""
    if src == dst:
        yield Path(src, dst, ())
        return
    pair = refine(src, dst, topology)
    num_bytes = item_bytes
    for size in src.shape:
        num_bytes *= size
    if pair is not None:
        pricer = RebindPricer(pair[0].grid, topology, num_bytes)
        _, bindings = cheapest_rebinds(*pair, pricer)
        yield path_of_bindings(src, dst, bindings)
        if all(_is_even(binding) for binding in bindings):
            return
        yield Path(src, dst, (exchange_step(State.of(src), State.of(dst)),))
        return
    heads = _plane_paths(src, topology, num_bytes, leaves_src=True)
    tails = _plane_paths(dst, topology, num_bytes, leaves_src=False)
    for head, tail in product(heads, tails):
        middle = exchange_step(head[1], tail[0])
        yield Path(src, dst, (*head[2], middle, *tail[2]))


def _is_even(binding: Binding) -> bool:
    """Whether all shards of a part are equally large, so that closed-form costs are exact."""
    sizes = {holding.num_elements for holding in binding.placement.holdings}
    num_ranks = sum(len(holding.ranks) for holding in binding.placement.holdings)
    return len(sizes) == 1 and num_ranks == len(binding.grid.ranks)


def _plane_paths(
    layout: Layout, topology: Topology, num_bytes: int, *, leaves_src: bool
) -> list[tuple[State, State, tuple[Step, ...]]]:
    """Paths inside one group, (from, to, steps): before the exchange, or after it.

    Before it, parts are summed into flat pieces, with or without the replicas sharing the work. After
    it, replicas are gathered from flat pieces: all of them, or those inside a host.
    """
    own = State.of(layout)
    found: list[tuple[State, State, tuple[Step, ...]]] = [(own, own, ())]
    pair = refine(layout, layout, topology)
    if pair is None:
        return found
    binding = pair[0]
    pricer = RebindPricer(binding.grid, topology, num_bytes)
    movable = (V,) if leaves_src else (R,)
    seen = {binding.targets}
    for targets in _scratched(binding, movable, leaves_src):
        if targets in seen:
            continue
        seen.add(targets)
        other = Binding(binding.grid, targets)
        ends = (binding, other) if leaves_src else (other, binding)
        _, bindings = cheapest_rebinds(*ends, pricer)
        order = max((b.scratch_order for b in bindings), key=len)
        if not leaves_src:
            axes = tuple(a for a, t in enumerate(targets) if t == binding.grid.scratch(a))
            order = tuple(sorted({*order, *axes}, key=lambda a: a))
        bindings = [b.with_scratch_order(order) for b in bindings]
        states = State.of(bindings[0]), State.of(bindings[-1])
        found.append((*states, tuple(steps_of_bindings(bindings))))
    return found


def _scratched(binding: Binding, movable: tuple[int, ...], leaves_src: bool) -> Iterator[Targets]:
    """Targets with axes of R or V moved to their scratch digits: all, or those below each level."""
    grid = binding.grid
    choices = [movable, (R, V)] if leaves_src else [movable]
    for roles in choices:
        if leaves_src and V not in binding.targets:
            return
        for block in sorted({*grid.blocks[1:], len(grid.ranks)}):
            yield tuple(
                grid.scratch(a) if t in roles and axis.stride < block else t
                for a, (t, axis) in enumerate(zip(binding.targets, grid.axes, strict=True))
            )


def _sliced(src: Layout, dst: Layout, num_slices: int) -> Path:
    step = exchange_step(State.of(src), State.of(dst), num_slices)
    return Path(src, dst, (step,))


# --- words --------------------------------------------------------------------------------------


def bytes_text(num_bytes: float) -> str:
    """Bytes in the largest binary unit that is not above them.

    >>> bytes_text(3 * 1024 * 1024)
    '3 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def secs_text(secs: float) -> str:
    """Seconds in a unit that keeps the number readable.

    >>> secs_text(0.00125)
    '1.25 ms'
    """
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if secs >= scale:
            return f"{secs / scale:.4g} {unit}"
    return f"{secs / 1e-9:.4g} ns"
