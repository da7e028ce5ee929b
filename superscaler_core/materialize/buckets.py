"""Buckets: weights outside FSDP units, fetched or reduced together at a step's start or end."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter

from superscaler_core.graph.graph import Op
from superscaler_core.materialize.edges import stages_by_op
from superscaler_core.materialize.routes import home
from superscaler_core.materialize.weights import Use, Weights
from superscaler_core.plan import Device, Plan


@dataclass(frozen=True, eq=False)
class Bucket:
    """Weights whose copies one call fetches from storage, or whose gradients one call reduces.

    Attributes:
        name: name in the step's text: "f0" for a fetched bucket, "r0" for a reduced one.
        uses: uses of one stage, unless stages share the weights.
    """

    name: str
    uses: tuple[Use, ...]

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """All devices that store or read any of the weights, ascending."""
        sides = {side for use in self.uses for side in (use.storage, use.sharding)}
        return tuple(sorted({device for side in sides for device in side.shards}))


def fetched(plan: Plan, weights: Weights, ends: Collection[Op]) -> tuple[Bucket, ...]:
    """Buckets that are fetched for the whole step, in the order in which forwards read them.

    Args:
        plan: the plan; ``plan.overlap.bucket_bytes`` bounds the size of a bucket.
        weights: the weights of the plan.
        ends: ops before which segments end (see ``ends``).
    """
    uses = [use for use in weights.uses if not use.is_fetched and use.is_brought]
    return _buckets("f", uses, plan, ends, 1)


def reduced(plan: Plan, weights: Weights, ends: Collection[Op]) -> tuple[Bucket, ...]:
    """Buckets of gradients outside FSDP units, in the order in which backwards complete them."""
    uses = [
        use
        for use in weights.uses
        # The gradient of a borrowed weight is handed over even where it does not have to move.
        if use.unit is None and (use.is_reduced or use.owner is not None)
    ]
    return _buckets("r", uses, plan, ends, -1)


def _buckets(
    prefix: str, uses: Iterable[Use], plan: Plan, ends: Collection[Op], direction: int
) -> tuple[Bucket, ...]:
    """Pack consecutive uses of one stage into buckets; split a segment only if it does not fit.

    ``direction`` is the order in which stages run their segments: 1 forward, -1 backward.
    """
    stages, last = stages_by_op(plan), sorted(op.index for op in ends)
    homes = [home(plan, stage) for stage in range(plan.num_stages)]

    def place(use: Use) -> tuple[int, int]:
        indexes = [op.index for op, _ in use.readers]
        # A copy of a stage on another route counts as the stage itself.
        mine = {homes[stages[index]] for index in indexes}
        # A borrowed weight is fetched when its owner updates it; the borrower reduces its gradient.
        if use.owner is not None:
            return plan.num_stages + 1 + (use.owner if direction > 0 else min(mine)), 0
        # Weights that several stages share come last, because they wait for all of these stages.
        if len(mine) != 1:
            return plan.num_stages, 0
        return mine.pop(), direction * bisect_right(last, min(indexes))

    groups: list[list[Use]] = []
    size, before = 0, -1
    placed = sorted(((place(use), use) for use in uses), key=itemgetter(0))
    for (stage, _), same in groupby(placed, key=itemgetter(0)):
        mine = [use for _, use in same]
        mine_bytes = sum(use.most_bytes for use in mine)
        if stage != before or size + mine_bytes > plan.overlap.bucket_bytes:
            groups.append([])
            size, before = 0, stage
        for use in mine:
            if groups[-1] and size + use.most_bytes > plan.overlap.bucket_bytes:
                groups.append([])
                size = 0
            groups[-1].append(use)
            size += use.most_bytes
    return tuple(Bucket(f"{prefix}{i}", tuple(group)) for i, group in enumerate(groups))


def ends(plan: Plan, weights: Weights) -> frozenset[Op]:
    """The ops before which segments end, so that no segment reads more than one bucket.

    Then the gradients of one bucket can be reduced, and its weights fetched, while other segments
    run. Without overlap, segments end only where there is communication.
    """
    found: set[Op] = set()
    size, seen = 0, set[Use]()
    own = [op for op in plan.graph.ops if op.copy_of is None]
    for op in own if plan.overlap.is_of_weights else ():
        mine = {
            use
            for position in range(len(op.inputs))
            if (use := weights.of_reader.get((op, position))) is not None
            and use.unit is None
            and (use.is_brought or use.is_reduced)
        }
        more = sum(use.most_bytes for use in mine - seen)
        if size and size + more > plan.overlap.bucket_bytes:
            found.add(op)
            size = 0
        size += more
        seen |= mine
    # Copies of a stage on other routes have the same segments.
    return frozenset(op for op in plan.graph.ops if (op.copy_of or op) in found)
