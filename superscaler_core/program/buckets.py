"""Buckets: weights outside windows that move in one call, at a step's start and at its end."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter

from superscaler_core.graph.graph import Op
from superscaler_core.plan import Device, Plan
from superscaler_core.program.edges import stages_by_op
from superscaler_core.program.instruction import COMPUTING, StepInstruction, Verb
from superscaler_core.program.routes import home
from superscaler_core.program.weights import Use, Weights
from superscaler_core.schedules import ActionKind

Blocks = Mapping[tuple[int, ActionKind], Sequence[StepInstruction]]
"""By stage and run, what all devices do."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Copies of weights that one call brings from storage, or whose gradients it takes there.

    Attributes:
        name: for the step's text: "f0" of those that are fetched, "r0" of those that are reduced.
        uses: of one stage, unless stages share the weights.
    """

    name: str
    uses: tuple[Use, ...]

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """All that store or read some of it, ascending."""
        sides = {side for use in self.uses for side in (use.storage, use.side)}
        return tuple(sorted({device for side in sides for device in side.shards}))


def fetched(plan: Plan, weights: Weights, ends: Collection[Op]) -> tuple[Bucket, ...]:
    """What is fetched for the whole step, in the order in which forwards read it.

    Args:
        plan: with the most bytes of a bucket.
        weights: of the plan.
        ends: ops before which segments end (``ends``).
    """
    uses = [use for use in weights.uses if not use.is_fetched and use.is_brought]
    return _buckets("f", uses, plan, ends, 1)


def reduced(plan: Plan, weights: Weights, ends: Collection[Op]) -> tuple[Bucket, ...]:
    """Gradients that no window reduces, in the order in which backwards complete them."""
    uses = [use for use in weights.uses if use.window is None and use.is_reduced]
    return _buckets("r", uses, plan, ends, -1)


def _buckets(
    prefix: str, uses: Iterable[Use], plan: Plan, ends: Collection[Op], direction: int
) -> tuple[Bucket, ...]:
    """Uses of one stage side by side, as many as fit; those of one segment together if they do.

    ``direction`` is that in which stages run their segments: 1 forward, -1 back.
    """
    stages, last = stages_by_op(plan), sorted(op.index for op in ends)
    homes = [home(plan, stage) for stage in range(plan.num_stages)]

    def place(use: Use) -> tuple[int, int]:
        indexes = [op.index for op, _ in use.readers]
        # Copies of a stage on other routes count as the stage.
        mine = {homes[stages[index]] for index in indexes}
        # Weights that several stages share come last: they wait for all of these.
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
    """The ops before which segments end, so that each reads no more than a bucket.

    So a bucket's gradients are complete, and weights are there, while other segments still run.
    Without overlap nothing runs beside, and segments end where communication is.
    """
    found: set[Op] = set()
    size, seen = 0, set[Use]()
    own = [op for op in plan.graph.ops if op.copy_of is None]
    for op in own if plan.overlap.is_of_weights else ():
        mine = {
            use
            for position in range(len(op.inputs))
            if (use := weights.of_reader.get((op, position))) is not None
            and use.window is None
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


# --- where stages read weights ------------------------------------------------------------------

Place = tuple[int, int]
"""A stage, and a place in its block."""

GRADS = (ActionKind.BACKWARD, ActionKind.WEIGHTS)
"""Runs of a stage that complete gradients of weights; a stage has one of them as a rule."""


@dataclass(frozen=True)
class Places:
    """Where in a stage's block ops are run, by op; the first place of each, or the last."""

    of_op: Mapping[Op, Place]
    is_last: bool

    def of(self, uses: Iterable[Use]) -> Place | None:
        """The first place at which any of these is read, or the last; None if not of one stage."""
        found = [self.of_op[op] for use in uses for op, _ in use.readers if op in self.of_op]
        if len({stage for stage, _ in found}) != 1:
            return None
        return max(found) if self.is_last else min(found)


def first_reads(blocks: Blocks) -> Places:
    """Where forwards read weights first."""
    places: dict[Op, Place] = {}
    for place, op in _ran(blocks, {ActionKind.FORWARD}, COMPUTING):
        places.setdefault(op, place)
    return Places(places, is_last=False)


def last_grads(blocks: Blocks) -> Places:
    """Where backwards have completed what a microbatch adds to weights' gradients."""
    ran = _ran(blocks, GRADS, {Verb.BACKWARD, Verb.BACKWARD_WEIGHTS})
    return Places({op: place for place, op in ran}, is_last=True)


def _ran(
    blocks: Blocks, runs: Collection[ActionKind], kinds: Collection[Verb]
) -> Iterator[tuple[Place, Op]]:
    """The ops that instructions of some kinds run, with their places."""
    for (stage, kind), block in blocks.items():
        for number, instruction in enumerate(block):
            if kind in runs and instruction.kind in kinds:
                for part in instruction.what.parts:
                    yield (stage, number), part.op
