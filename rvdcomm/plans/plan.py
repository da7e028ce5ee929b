"""Plan: a value that takes a tensor from one layout to another, with its program and its cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path as FilePath

from rvdcomm.cost import (
    Cost,
    StepCost,
    demand_boxes,
    joined_cost,
    lower_bound,
    network_bound,
    num_partners,
    step_cost,
    total_cost,
    with_rounds,
)
from rvdcomm.layout import ITEM_BYTES, Layout
from rvdcomm.network import Links, Network, Topology
from rvdcomm.planning.estimate import MAX_COUNTED_RANKS
from rvdcomm.planning.modelled_bound import modelled_bound
from rvdcomm.planning.path import Path
from rvdcomm.planning.pipeline import NUM_SLICES, best_num_slices, exchange_costs
from rvdcomm.plans.modelled import ModelledCost, modelled_cost
from rvdcomm.program import Collective, Copy, Program, SharedDomains
from rvdcomm.program.domains import together
from rvdcomm.program.lower import lower
from rvdcomm.program.trees import program_of_trees
from rvdcomm.program.verify import Proof, verify
from rvdcomm.synthesis import Beats, Forest, beats_in_full, beats_of, least_secs
from rvdcomm.units import bytes_text, secs_text

EXECUTORS = ("auto", "dist", "peer")
"""``dist``: all ranks send messages. ``peer``: ranks of one host read each other's memory.
``auto``: as ``peer`` where that is possible, unless only messages keep the memory limit."""

CACHED_BYTES = 512 << 10
"""The most bytes that a rank publishes at a time: others then read them while they are cached."""

EVEN = 16
"""Pieces of so many elements along their longest dim are nearly equal."""

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
    it (``Network.nearest_levels``). ``forest`` are the trees of a path of one step, "trees".

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
        if self.beats is not None:
            most = max(1, int(self.evenness))
            return self.beats.best_num_slices(ITEM_BYTES[self.dtype], most)
        if not self.domains or len(self.path.ranks) > MAX_COUNTED_RANKS:
            return 1
        found = best_num_slices(self.exchange_costs)
        if self.domains != (self.path.ranks,):
            return found
        item = ITEM_BYTES[self.dtype]
        largest = max(self.src.cell(rank).box.num_elements for rank in self.src.ranks) * item
        counts = slice_counts(self.path)
        wanted = next((n for n in counts if largest <= n * CACHED_BYTES), counts[-1])
        return max(found, wanted)

    @cached_property
    def exchange_costs(self) -> list[StepCost]:
        """The costs of the exchanges of the path, counted without lowering them."""
        return exchange_costs(self.path, self.dtype, self.links)

    @cached_property
    def beats(self) -> Beats | None:
        """When which hop of the trees runs; None without trees."""
        return None if self.forest is None else beats_of(self.forest)

    @cached_property
    def evenness(self) -> float:
        """The most slices of trees that are nearly equal, as the model has them; below 1 if boxes
        are so small that the ways of trees alone are uneven.
        """
        assert self.forest is not None
        ways = dict(zip(self.forest.demands, map(len, self.forest.ways), strict=True))
        return min(
            (
                max(box.shape, default=1) / (EVEN * ways[demand])
                for demand, boxes in demand_boxes(self.src, self.dst)
                if demand in ways
                for box in boxes
            ),
            default=1.0,
        )

    @cached_property
    def keeps_routes(self) -> bool:
        """Whether messages along trees take the routes of the network, as all others do.

        Where several ways lead from a rank to another, trees may use them all, and the time is that
        of the ways that they say.
        """
        network = Network.of(self.links)
        if self.forest is None or network.levels is not None:
            return True
        wires, routes = self.forest.wires, network.routes
        return all(
            [wires[i] for i in hop.wires]
            == [network.wires[i] for i in routes.of(hop.src, hop.dst).wires]
            for hop in {hop for tree in self.forest.trees for hop in (*tree.sums, *tree.copies)}
        )

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
        members = together([rank], self.domains)
        if members not in self._programs:
            self._programs[members] = self._lowered(members)
        return self._programs[members]

    @cached_property
    def _programs(self) -> dict[tuple[int, ...], Program]:
        return {}

    def _lowered(self, ranks: tuple[int, ...] | None) -> Program:
        if self.forest is not None:
            return program_of_trees(
                self.src,
                self.dst,
                self.dtype,
                self.forest,
                self.num_slices,
                ranks=ranks,
                domains=self.domains,
            )
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
        if self.network is not None or self.forest is not None:
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
            num_beats = self.forest.num_beats_in(self.num_slices)
            joined = joined_cost(
                program_step_costs(self.program, num_beats, self.links, is_one_exchange=True)
            )
            if self.keeps_routes:
                return (joined,)
            exact = beats_in_full(self.forest)
            secs = exact.secs(self.num_slices, ITEM_BYTES[self.dtype])
            return (replace(joined, secs=secs),)
        return program_step_costs(self.program, len(self.path.steps), self.links, self.num_slices)

    @cached_property
    def cost(self) -> Cost:
        """The cost of the plan."""
        if not self.is_counted and self.modelled is not None:
            return self.modelled.cost
        return total_cost(self.step_costs, self.peak_bytes, self.num_slices)

    @cached_property
    def peak_bytes(self) -> int:
        """Bytes of the rank whose buffers take most memory, counted in the program."""
        return max(self.program.peak_bytes(rank) for rank in self.program.ranks)

    @cached_property
    def bound(self) -> Cost:
        """A lower bound on the cost of any plan, field by field."""
        if len(self.path.ranks) > MAX_COUNTED_RANKS:
            return self._bytes_bound
        # Where a rank gets messages and reads memory, it may have a partner of each at once.
        at_once = 1 if self.domains in ((), (self.path.ranks,)) else 2
        return with_rounds(self._bytes_bound, self.src, self.dst, self.links, at_once)

    @property
    def _bytes_bound(self) -> Cost:
        """The bound with one round."""
        if self.network is not None:
            item_bytes = ITEM_BYTES[self.dtype]
            least = least_secs(self.src, self.dst, self.network) * item_bytes
            return network_bound(self.src, self.dst, item_bytes, self.network, least)
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

    def save(self, path: str | FilePath) -> None:
        """Write the plan to a file, which ``load_plan`` reads.

        Raises:
            OSError: the file cannot be written; a file that was there is as before.
        """
        from rvdcomm.plans.saved import save_plan  # It needs the planner, which needs this module.

        save_plan(self, path)

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


def slice_counts(path: Path) -> list[int]:
    """The numbers of pipeline slices that a path may have."""
    return [n for n in NUM_SLICES if n * len(path.ranks) <= MAX_SLICES_OF_ALL] or [1]


def program_step_costs(
    program: Program,
    num_steps: int,
    links: Links,
    num_slices: int = 1,
    *,
    is_one_exchange: bool = False,
) -> tuple[StepCost, ...]:
    """Price every step of a program; its messages and reads of other ranks' memory run at once.

    The pipeline slices of a step count as one step: their rounds overlap and are paid once, but at
    least once for each partner; where shards are thin, a slice has messages for some partners only.
    A rank that reads several buffers of another one in a step reads them one after another, in
    several exchanges, unless each step ``is_one_exchange``.
    """
    traffic: list[dict[tuple[int, int], int]] = [{} for _ in range(num_steps)]
    rounds: list[dict[int, int]] = [{} for _ in range(num_steps)]
    sent: list[set[tuple[int, int]]] = [set() for _ in range(num_steps)]
    # By (rank, direction): the (partner, buffer) pairs of its reads.
    reads: list[dict[tuple[int, str], set[tuple[int, str]]]] = [{} for _ in range(num_steps)]
    for one in program.instructions:
        if isinstance(one, Collective):
            pairs = one.traffic()
            sent[one.step] |= pairs.keys()
            # Groups of a step run at once, but the collectives of one rank run one after another.
            mine, count = rounds[one.step], one.rounds
            for rank in one.ranks:
                mine[rank] = mine.get(rank, 0) + count
        elif isinstance(one, Copy) and one.is_remote:
            pairs = {(one.src_rank, one.rank): one.num_elements}
            src = "" if is_one_exchange else one.src
            reads[one.step].setdefault((one.rank, "in"), set()).add((one.src_rank, src))
            reads[one.step].setdefault((one.src_rank, "out"), set()).add((one.rank, src))
        else:
            continue
        total = traffic[one.step]
        for pair, num_elements in pairs.items():
            total[pair] = total.get(pair, 0) + num_elements * program.item_bytes
    costs = []
    for step in range(num_steps):
        calls = max(rounds[step].values(), default=0)
        most = max(calls, *map(len, reads[step].values()), 0)
        read_from = max(
            (len({rank for rank, _ in each}) for each in reads[step].values()), default=0
        )
        least = max(num_partners(sent[step]), read_from)
        costs.append(step_cost(traffic[step], links, max(least, -(-most // num_slices))))
    return tuple(costs)
