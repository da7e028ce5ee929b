"""Moves: all communication of a step: each transfer, how often it runs, and its cost."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import rvdcomm as rv
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.transfer import Transfer
from superscaler_core.precision import Precision
from superscaler_core.program.event import P2PSend
from superscaler_core.program.verb import Verb

_NUMBER = re.compile(r"(?<=\.)\d+(?=[.:])")
_COPY = re.compile(r"@\d+$")


def pattern_of(name: str) -> str:
    """The name of a tensor or op without the numbers of modules and of copies of the model.

    >>> pattern_of("layers.12.attn.q.linear"), pattern_of("layers.3:add_2@1")
    ('layers.*.attn.q.linear', 'layers.*:add_2')
    """
    return _NUMBER.sub("*", _COPY.sub("", name))


@dataclass(frozen=True)
class PricedMove:
    """A tensor that moves in one direction.

    Attributes:
        name: name of the edge (``e3``) or of the use of a weight.
        way: "forward" and "backward" of an edge, "fetch" and "reduce" of a weight, "loss".
        tensor: its name.
        stages: the src and dst stages.
        num_times: how often it moves in a step.
        plans: the plans of its regions, without those where nothing moves.
    """

    name: str
    way: str
    tensor: str
    stages: tuple[int, int]
    num_times: int
    plans: tuple[rv.Plan, ...] = ()

    @property
    def pattern(self) -> str:
        """The tensor's name without the numbers of layers: ``layers.*.attn.out.linear``."""
        return pattern_of(self.tensor)

    @cached_property
    def layouts(self) -> str:
        """The src and dst layouts."""
        if len(self.plans) != 1:
            return f"{len(self.plans)} regions"
        return f"{self.plans[0].src.rvd} -> {self.plans[0].dst.rvd}"

    @cached_property
    def primitives(self) -> tuple[str, ...]:
        """Names of the primitives in the plans, each once."""
        steps = (step.kind for plan in self.plans for step in plan.path.steps)
        return tuple(dict.fromkeys(steps))

    @cached_property
    def level_bytes(self) -> tuple[int, ...]:
        """Bytes of one move, by the highest level of the topology that they cross."""
        return tuple(map(sum, zip(*map(_level_bytes, self.plans), strict=True)))

    @cached_property
    def secs(self) -> tuple[float, float]:
        """Time of one move under the port model, and its lower bound."""
        plans = self.plans
        return sum(p.cost.secs for p in plans), sum(p.bound.secs for p in plans)


def moves_of(
    made: Materialized,
    topology: rv.Topology | None = None,
    precision: Precision = Precision(),
) -> Iterator[PricedMove]:
    """All communication of a step, without transfers where nothing moves.

    Args:
        made: the plan.
        topology: hosts and links; one host if None.
        precision: the dtypes of the training.
    """
    for move, transfers in _moves(made, precision):
        plans = tuple(each.plan(topology) for each in transfers if not each.is_idle)
        if plans:
            yield replace(move, plans=plans)


def _moves(
    made: Materialized, precision: Precision
) -> Iterator[tuple[PricedMove, Iterable[Transfer]]]:
    """Every move without its plans, and the transfers of its regions."""
    sends = Counter((made.edge(e.name), e.is_back) for e in made.events if isinstance(e, P2PSend))
    for edge in made.edges.all:
        times = made.counts[Verb.MOVE, edge] + sends[edge, False]
        times_back = made.counts[Verb.MOVE_BACK, edge] + sends[edge, True]
        name, ends = edge.tensor.name, (edge.src_stage, edge.dst_stage)
        yield PricedMove(edge.name, "forward", name, ends, times), edge.forward
        yield PricedMove(edge.name, "backward", name, ends[::-1], times_back), edge.backward
    stage_of = {op.index: stage.index for stage in made.plan.stages for op in stage.ops}
    for use in made.weights.uses:
        mine = [stage_of[op.index] for op, _ in use.readers]
        stages = min(mine, default=0), max(mine, default=0)
        # Once per step, or whenever the FSDP unit of the weight unshards or reduces.
        fetches = reductions = 1
        if use.unit is not None:
            fetches = made.counts[Verb.UNSHARD, use.unit] if use.is_fetched else 1
            reductions = made.counts[Verb.REDUCE, use.unit]
        name, dtype = use.tensor.name, precision.stored(use.tensor.dtype)
        reduce = [transfer.of_dtype(dtype) for transfer in use.reduce]
        yield PricedMove(use.name, "fetch", name, stages, fetches), use.fetch
        yield PricedMove(use.name, "reduce", name, stages, reductions), reduce
    graph = made.plan.graph
    last = stage_of[graph.producer[graph.loss].index]
    yield PricedMove("loss", "loss", graph.loss.name, (last, last), 1), made.loss


def _level_bytes(plan: rv.Plan) -> tuple[int, ...]:
    levels = plan.topology.levels
    cost = plan.cost
    if len(levels) <= 2:
        return (cost.wire_bytes - cost.host_bytes, cost.host_bytes)[: len(levels)]
    found = [0] * len(levels)
    for collective in plan.program.collectives:
        for (src, dst), num_elements in collective.traffic().items():
            if src != dst:
                level = plan.topology.distance(src, dst) - 1
                found[level] += num_elements * plan.program.item_bytes
    return tuple(found)
