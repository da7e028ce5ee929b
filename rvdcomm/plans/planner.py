"""Planner: ``plan`` picks a low-cost candidate; a ``Plan`` owns its program and its bound."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from rvdcomm.cost import (
    Cost,
    StepCost,
    demands_of,
    joined_cost,
    lower_bound,
    network_bound,
    step_cost,
    total_cost,
)
from rvdcomm.errors import LayoutError, MemoryLimitError
from rvdcomm.layout import ITEM_BYTES, Layout, check_summable, dtype_name
from rvdcomm.network import DEFAULT_LINK, Level, Links, Network, Topology
from rvdcomm.planning.candidates import candidate_paths, direct_path
from rvdcomm.planning.estimate import MAX_COUNTED_RANKS, Estimator
from rvdcomm.planning.modelled_bound import modelled_bound
from rvdcomm.planning.path import Path, State, Step
from rvdcomm.planning.pipeline import NUM_SLICES, best_num_slices
from rvdcomm.plans.modelled import ModelledCost, modelled_cost
from rvdcomm.program import Collective, Copy, Program, SharedDomains
from rvdcomm.program.lower import lower, together
from rvdcomm.program.trees import program_of_trees
from rvdcomm.program.verify import Proof, verify
from rvdcomm.synthesis import Forest, forest_of
from rvdcomm.text import MAX_INTEGER, quoted
from rvdcomm.units import bytes_text, secs_text

WINDOW_COUNTS = (2, 4, 8, 16, 32, 64)
"""Windows that a direct exchange may be cut into to stay below a memory limit."""

MAX_CACHED_PLANS = 4096

EXECUTORS = ("auto", "dist", "peer")
"""``dist``: all ranks send messages. ``peer``: ranks of one host read each other's memory.
``auto``: as ``peer`` where that is possible, unless only messages keep the memory limit."""

CACHED_BYTES = 512 << 10
"""The most bytes that a rank publishes at a time: others then read them while they are cached."""

MAX_TREE_RANKS, MAX_DEMANDS = 16, 256
"""Limits on a plan by trees: more take tens of seconds to pack."""

MAX_SLICES_OF_ALL = 128
"""Limit on slices times ranks: every rank lowers every slice and waits for it."""


@dataclass(frozen=True, eq=False)
class Plan:
    """A plan that takes a tensor of ``dtype`` from ``path.src`` to ``path.dst``; prints as a table.

    A plan owns the one program that runs. ``program`` is the program of all ranks, ``program_of``
    the program of one rank, lowered alone. ``cost``, ``peak_bytes`` and ``verify`` refer to it.

    ``near`` are groups of ranks that read each other's memory (shared-memory domains). If None,
    these are the ranks of each host, or no groups if ``executor`` is "dist". ``slices`` is the
    number of pipeline slices that overlap; the plan chooses it if None.

    ``network`` is given where no topology says how fast the links are; ``topology`` then resembles
    it (``Network.nearest_levels``). ``forest`` are the trees of a path of one step, "trees"; ranks
    then send messages only.

    Law (tests/plans/test_plan.py): ``cost`` and ``simulate`` count the same bytes, and the same
    peak. On more than ``MAX_COUNTED_RANKS`` ranks costs are modelled where there is a formula
    (``modelled.py``), and no program is lowered. The bytes of equal shards are then still exact.
    """

    path: Path
    dtype: str
    topology: Topology
    executor: str = "dist"
    near: SharedDomains | None = None
    slices: int | None = None
    memory_limit: int | None = None
    network: Network | None = None
    forest: Forest | None = None

    @property
    def links(self) -> Links:
        """What costs refer to: the network, or the topology if that says all."""
        return self.topology if self.network is None else self.network

    @property
    def src(self) -> Layout:
        """The layout that the tensor has."""
        return self.path.src

    @property
    def dst(self) -> Layout:
        """The layout that the tensor gets."""
        return self.path.dst

    @cached_property
    def domains(self) -> SharedDomains:
        """The shared-memory domains of two or more ranks, which read each other's memory."""
        if self.forest is not None:
            return ()
        return domains_of(self.near, self.executor, self.topology, self.path.ranks)

    @cached_property
    def num_slices(self) -> int:
        """Pipeline slices of the program that runs.

        The cost model chooses their number if links inside a host and between hosts can work at
        the same time. If all ranks read each other's memory, slices are so small that the data that
        a rank wrote are still in the cache when others read them.
        """
        if self.slices is not None:
            return self.slices
        if self.forest is not None:
            return self._num_tree_slices(self.forest)
        if not self.domains or len(self.path.ranks) > MAX_COUNTED_RANKS:
            return 1
        found = best_num_slices(self.path, self.dtype, self.links)
        if self.domains != (self.path.ranks,):
            return found
        item = ITEM_BYTES[self.dtype]
        largest = max(self.src.cell(rank).box.num_elements for rank in self.src.ranks) * item
        counts = _slice_counts(self.path)
        wanted = next((n for n in counts if largest <= n * CACHED_BYTES), counts[-1])
        return max(found, wanted)

    def _num_tree_slices(self, forest: Forest) -> int:
        """The number of slices of trees with the least modelled time."""
        latency = max((wire.link.alpha_secs for wire in forest.wires), default=0.0)

        def secs(count: int) -> float:
            beats = forest.beat_secs(count)
            return sum(beats) * ITEM_BYTES[self.dtype] + len(beats) * latency

        return min(NUM_SLICES, key=lambda count: (secs(count), count))

    @property
    def identity(self) -> str:
        """A text that is equal on all ranks that run the same plan."""
        ends = f"{self.src} -> {self.dst} {self.dtype} on {self.links!r}"
        steps = [(step.kind, step.num_slices, step.dst.text) for step in self.path.steps]
        trees = "" if self.forest is None else f" trees {self.forest.to_json()}"
        return f"{ends}: {steps} in {self.num_slices} slices, near {self.domains}{trees}"

    @cached_property
    def program(self) -> Program:
        """The path, lowered for all ranks."""
        return self._lowered(None)

    def program_of(self, rank: int) -> Program:
        """The program that ``rank`` runs; ranks that share no memory with it are not lowered.

        The program also has the instructions of the ranks that share memory with ``rank``. The
        program of a rank in neither layout is empty.
        """
        if self.forest is not None:
            return self.program
        members = together([rank], self.domains)
        if members not in self._programs:
            self._programs[members] = self._lowered(members)
        return self._programs[members]

    @cached_property
    def _programs(self) -> dict[tuple[int, ...], Program]:
        return {}

    def _lowered(self, ranks: tuple[int, ...] | None) -> Program:
        if self.forest is not None:
            return program_of_trees(self.src, self.dst, self.dtype, self.forest, self.num_slices)
        return lower(
            self.path,
            self.dtype,
            self.topology,
            ranks=ranks,
            domains=self.domains,
            num_slices=self.num_slices,
        )

    @cached_property
    def modelled(self) -> ModelledCost | None:
        """The cost of the plan by formula; None where there is no formula."""
        if self.network is not None:
            return None
        return modelled_cost(self.path, ITEM_BYTES[self.dtype], self.topology)

    @cached_property
    def is_counted(self) -> bool:
        """Whether costs are counted in the program, not modelled."""
        return len(self.path.ranks) <= MAX_COUNTED_RANKS or self.modelled is None

    @cached_property
    def step_costs(self) -> tuple[StepCost, ...]:
        """The cost of every step of the path."""
        if not self.is_counted and self.modelled is not None:
            return self.modelled.steps
        if self.forest is not None:
            num_beats = 1 + max((step for step, *_ in self.program.traffic()), default=-1)
            beats = program_step_costs(self.program, num_beats, self.links)
            return (joined_cost(beats),)
        return program_step_costs(self.program, len(self.path.steps), self.links, self.num_slices)

    @cached_property
    def cost(self) -> Cost:
        """The cost of the plan."""
        if not self.is_counted and self.modelled is not None:
            return self.modelled.cost
        return total_cost(self.step_costs, self.peak_bytes)

    @cached_property
    def peak_bytes(self) -> int:
        """Bytes of the rank whose buffers take most memory, counted in the program."""
        return max(self.program.peak_bytes(rank) for rank in self.program.ranks)

    @cached_property
    def bound(self) -> Cost:
        """A lower bound on the cost of any plan, field by field."""
        if self.network is not None:
            return network_bound(self.src, self.dst, ITEM_BYTES[self.dtype], self.network)
        request = self.src, self.dst, ITEM_BYTES[self.dtype], self.topology
        if len(self.path.ranks) > MAX_COUNTED_RANKS:
            found = modelled_bound(*request)
            if found is not None:
                return found
        return lower_bound(*request)

    @property
    def gap(self) -> float:
        """``cost.secs / bound.secs``: 1.0 is optimal; infinite if only the bound is 0."""
        if self.bound.secs == 0:
            return 1.0 if self.cost.secs == 0 else float("inf")
        return self.cost.secs / self.bound.secs

    def verify(self) -> Proof:
        """Prove that the program is right, or raise a ProgramError."""
        return verify(self.program)

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
    topology: Links | None = None,
    memory_limit: int | None = None,
    *,
    executor: str = "auto",
) -> Plan:
    """A low-cost plan from ``src`` to ``dst``; the same arguments give the same object.

    Args:
        src, dst: layouts of one global shape, over any ranks.
        dtype: a name, a numpy dtype or a torch dtype.
        topology: hosts and links, or a network; one host with a port for every rank if None.
        memory_limit: the most bytes that a rank's buffers may take, src and dst shards included.
        executor: one of ``EXECUTORS``: whether ranks of one host read each other's memory.

    Raises:
        LayoutError: the shapes differ, the dtype has no sum but a layout has V > 1, a rank is not
            in the topology, there is no such executor, or the shards of all ranks together take
            2^63 bytes or more.
        MemoryLimitError: no plan fits; the message names the least memory that a plan needs.
    """
    return _plan_as_given(src, dst, dtype, topology, memory_limit, executor)


def plan_of_steps(
    src: Layout, dst: Layout, dtype: str, topology: Links, *, executor: str = "auto"
) -> Plan:
    """As ``plan``, but never by trees: its steps can be joined with those of other tensors."""
    made = plan(src, dst, dtype, topology, executor=executor)
    return made if made.forest is None else with_trees(made, None)


@lru_cache(maxsize=MAX_CACHED_PLANS)
def _plan_as_given(
    src: Layout,
    dst: Layout,
    dtype: Any,
    topology: Links | None,
    memory_limit: int | None,
    executor: str,
) -> Plan:
    """Plans, cached by the arguments as the caller writes them: a cache hit checks nothing."""
    name = dtype_name(dtype)
    check_executor(executor)
    if src.shape != dst.shape:
        raise LayoutError(f"src {src} and dst {dst} differ in shape: {src.shape} and {dst.shape}.")
    check_summable(name, [src, dst])
    for layout in (src, dst):
        _check_size(layout, name)
    if topology is None:
        topology = default_topology((*src.ranks, *dst.ranks))
    for layout in (src, dst):
        topology.check_ranks(layout.span or layout.ranks)
    if isinstance(topology, Network):
        topology = topology.levels or topology
    return _cached_plan(src, dst, name, topology, memory_limit, executor)


def _check_size(layout: Layout, dtype: str) -> None:
    """Raise a LayoutError if the shards of all ranks together are too large to be counted."""
    num_bytes = layout.rvd.r * layout.rvd.v * prod(layout.shape) * ITEM_BYTES[dtype]
    if num_bytes > MAX_INTEGER:
        raise LayoutError(
            f"the shards of {layout} {dtype} take {num_bytes} bytes on all ranks together; at most "
            f"{MAX_INTEGER} are counted."
        )


def check_executor(name: str) -> None:
    """Raise a LayoutError if there is no executor of this name."""
    if name not in EXECUTORS:
        raise LayoutError(f"executor {quoted(name)} is unknown; use one of {', '.join(EXECUTORS)}.")


def plan_with(made: Plan, *, executor: str | None = None, memory_limit: int | None = None) -> Plan:
    """``made``, changed to another executor or memory limit if one is given.

    Raises:
        MemoryLimitError: no plan fits the limit.
    """
    executor = executor or made.executor
    memory_limit = made.memory_limit if memory_limit is None else memory_limit
    if (executor, memory_limit) == (made.executor, made.memory_limit):
        return made
    if memory_limit == made.memory_limit and made.forest is None:
        # The path is kept, since it may not come from the search.
        near = None if executor != made.executor else made.near
        return _fitting(replace(made, executor=executor, near=near, slices=None), [made.path])
    request = made.src, made.dst, made.dtype, made.links, memory_limit
    return _cached_plan(*request, executor)


def plan_over(made: Plan, domains: SharedDomains) -> Plan:
    """``made``, changed to other shared-memory domains (``domains``).

    Raises:
        MemoryLimitError: no plan fits the limit of ``made``.
    """
    near = tuple(group for group in domains if len(group) > 1)
    if near == made.domains or (not made.domains and made.memory_limit is not None):
        return made
    return _fitting(replace(made, near=near, slices=None), [made.path])


def hosts_of(topology: Topology, ranks: Iterable[int]) -> SharedDomains:
    """``ranks``, grouped by the host on which the topology puts them."""
    if len(topology.levels) == 1:
        return (tuple(sorted(ranks)),)
    hosts: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        hosts.setdefault(topology.home(1, rank), []).append(rank)
    return tuple(map(tuple, hosts.values()))


def domains_of(
    near: SharedDomains | None, executor: str, topology: Topology, ranks: Iterable[int]
) -> SharedDomains:
    """Shared-memory domains of two or more ranks: ``near``, or if None the ranks of each host."""
    if near is None:
        near = hosts_of(topology, ranks) if executor != "dist" else ()
    return tuple(group for group in near if len(group) > 1)


def _slice_counts(path: Path) -> list[int]:
    """The numbers of pipeline slices that a path may have."""
    return [n for n in NUM_SLICES if n * len(path.ranks) <= MAX_SLICES_OF_ALL] or [1]


def default_topology(ranks: Iterable[int]) -> Topology:
    """One host that holds these ranks."""
    ports = tuple((rank,) for rank in sorted(set(ranks)))
    return Topology((Level("rank", ports, DEFAULT_LINK),))


@lru_cache(maxsize=MAX_CACHED_PLANS)
def _cached_plan(
    src: Layout,
    dst: Layout,
    dtype: str,
    links: Links,
    memory_limit: int | None,
    executor: str,
) -> Plan:
    """Plans, cached by arguments that are checked and have their defaults filled in."""
    network = links if isinstance(links, Network) else None
    topology = links.nearest_levels if isinstance(links, Network) else links
    paths = list(candidate_paths(src, dst, ITEM_BYTES[dtype], topology))
    # One candidate, as for every even regular pair, needs no pricing.
    if len(paths) > 1:
        paths = Estimator(topology, ITEM_BYTES[dtype], network).cheapest_first(paths)
    best = Plan(paths[0], dtype, topology, executor, memory_limit=memory_limit, network=network)
    trees = tree_plan(best)
    if trees is not None and trees.cost.secs < best.cost.secs:
        best = trees
    return _fitting(best, paths)


def tree_plan(plan: Plan) -> Plan | None:
    """The plan by trees between the same layouts; None where there are none.

    There are none on topologies, if ranks have to read each other's memory, to several value parts,
    and for more than ``MAX_TREE_RANKS`` ranks or ``MAX_DEMANDS`` demands.
    """
    network, src, dst = plan.network, plan.src, plan.dst
    if network is None or plan.executor == "peer" or dst.rvd.v > 1:
        return None
    if len(plan.path.ranks) > MAX_TREE_RANKS or len(demands_of(src, dst)) > MAX_DEMANDS:
        return None
    forest = forest_of(src, dst, network)
    if not forest.demands:
        return None
    path = Path(src, dst, (Step("trees", State(src), State(dst), direct=True),))
    return replace(plan, path=path, near=None, slices=None, forest=forest)


def with_trees(plan: Plan, ways: Any) -> Plan:
    """``plan`` with the ways of another rank (``Forest.to_json``), or without trees if None.

    Raises:
        LayoutError: the ways do not serve the layouts of the plan.
        MemoryLimitError: no plan fits the limit.
    """
    if ways is None:
        paths = list(candidate_paths(plan.src, plan.dst, ITEM_BYTES[plan.dtype], plan.topology))
        paths = Estimator(plan.topology, ITEM_BYTES[plan.dtype], plan.network).cheapest_first(paths)
        return _fitting(replace(plan, path=paths[0], slices=None, forest=None), paths)
    made = plan if plan.forest is not None else tree_plan(plan)
    if made is None or made.forest is None:
        raise LayoutError(f"{plan.src} -> {plan.dst}: the first rank uses trees, this one cannot.")
    return replace(made, slices=None, forest=made.forest.with_ways(ways))


def _fitting(best: Plan, paths: list[Path]) -> Plan:
    """``best`` if it fits its memory limit, else the first plan of ``_leaner`` that fits."""
    limit = best.memory_limit
    if limit is None or best.cost.peak_bytes <= limit:
        return best
    least = best
    for candidate in _leaner(best, paths):
        if candidate.cost.peak_bytes <= limit:
            return candidate
        least = min(least, candidate, key=lambda made: made.cost.peak_bytes)
    raise MemoryLimitError(
        f"{best.src.rvd} -> {best.dst.rvd} of shape {best.src.shape} {best.dtype}: "
        f"memory_limit={limit} bytes a rank, but the least that a plan needs is "
        f"{least.cost.peak_bytes}; the src and dst shards alone are {least.bound.peak_bytes}."
    )


def clear_cache() -> None:
    """Forget all plans, so that the next ``plan`` finds an empty cache."""
    _plan_as_given.cache_clear()
    _cached_plan.cache_clear()


def _leaner(best: Plan, paths: list[Path]) -> Iterator[Plan]:
    """Plans to try when the best one needs too much memory.

    First every path with its chosen number of slices and with the most slices; then plans that only
    send messages, which may arrive in their final place; then one exchange in more and more
    windows.
    """
    finest = _slice_counts(best.path)[-1]
    if best.forest is not None:
        yield from (replace(best, slices=count) for count in NUM_SLICES if count > best.num_slices)
        best = replace(best, path=paths[0], forest=None, slices=None)
        yield best
    for path in paths if best.domains else ():
        made = replace(best, path=path)
        yield made
        if made.num_slices < finest:
            yield replace(made, slices=finest)
    if best.executor != "peer":
        best = replace(best, near=())
        yield from (replace(best, path=path) for path in paths)
    if best.src != best.dst:
        windows = (direct_path(best.src, best.dst, count) for count in (1, *WINDOW_COUNTS))
        yield from (replace(best, path=path) for path in windows)


def program_step_costs(
    program: Program, num_steps: int, links: Links, num_slices: int = 1
) -> tuple[StepCost, ...]:
    """Price every step of a program; its messages and reads of other ranks' memory run at once.

    The pipeline slices of a step count as one step: their rounds overlap and are paid once.
    """
    traffic: list[dict[tuple[int, int], int]] = [{} for _ in range(num_steps)]
    rounds: list[dict[int, int]] = [{} for _ in range(num_steps)]
    # By (rank, direction): the (partner, buffer) pairs of its reads.
    reads: list[dict[tuple[int, str], set[tuple[int, str]]]] = [{} for _ in range(num_steps)]
    for one in program.instructions:
        if isinstance(one, Collective):
            pairs = one.traffic()
            # Groups of a step run at once, but the collectives of one rank run one after another.
            mine, count = rounds[one.step], one.rounds
            for rank in one.ranks:
                mine[rank] = mine.get(rank, 0) + count
        elif isinstance(one, Copy) and one.is_remote:
            pairs = {(one.src_rank, one.rank): one.num_elements}
            reads[one.step].setdefault((one.rank, "in"), set()).add((one.src_rank, one.src))
            reads[one.step].setdefault((one.src_rank, "out"), set()).add((one.rank, one.src))
        else:
            continue
        total = traffic[one.step]
        for pair, num_elements in pairs.items():
            total[pair] = total.get(pair, 0) + num_elements * program.item_bytes
    costs = []
    for step in range(num_steps):
        calls = max(rounds[step].values(), default=0)
        most = max(calls, *map(len, reads[step].values()), 0)
        costs.append(step_cost(traffic[step], links, -(-most // num_slices)))
    return tuple(costs)
