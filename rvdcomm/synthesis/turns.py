"""Turns: beats of hops such that a rank sends to one rank at a time, and receives from one.

List scheduling: in each beat, of the hops whose rank has the element, those go first from which the
longest chain of hops starts. Hops of all trees from a rank to another that are ready at once are
one message.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rvdcomm.synthesis.forest import Pair, Tree

Sides = tuple[dict["Pair", int], dict["Pair", int]]
"""When the hops of a tree start: those of sums, and of copies."""


@dataclass(eq=False)
class _Job:
    """A hop of a tree; ``after`` wait for it, and it waits for ``num_before``."""

    tree: Tree
    side: int
    pair: Pair
    after: list[_Job] = field(default_factory=list)
    num_before: int = 0

    @cached_property
    def height(self) -> int:
        """Hops of the longest chain that starts here."""
        return 1 + max((job.height for job in self.after), default=0)


def in_turn(trees: Iterable[Tree]) -> dict[Tree, Sides]:
    """When the hops of each tree start."""
    found: dict[Tree, Sides] = {tree: ({}, {}) for tree in trees}
    jobs = [job for tree in found for job in _jobs_of(tree)]
    ready: dict[Pair, list[_Job]] = {}
    for job in jobs:
        if not job.num_before:
            ready.setdefault(job.pair, []).append(job)
    beat = 0
    while ready:
        chosen: list[Pair] = []
        senders, receivers = set[int](), set[int]()
        for pair in sorted(ready, key=lambda pair: (-max(j.height for j in ready[pair]), pair)):
            if pair[0] not in senders and pair[1] not in receivers:
                chosen.append(pair)
                senders.add(pair[0])
                receivers.add(pair[1])
        for job in [job for pair in chosen for job in ready.pop(pair)]:
            found[job.tree][job.side][job.pair] = beat
            for later in job.after:
                later.num_before -= 1
                if not later.num_before:
                    ready.setdefault(later.pair, []).append(later)
        beat += 1
    return found


def _jobs_of(tree: Tree) -> list[_Job]:
    """The hops of a tree, each with those that wait for it."""
    sums = [_Job(tree, 0, (hop.src, hop.dst)) for hop in tree.sums]
    copies = [_Job(tree, 1, (hop.src, hop.dst)) for hop in tree.copies]
    for later in [*sums, *copies]:
        here = later.pair[0]
        # A sum goes on when all parts have come, a copy when it is there; at the root, the sum.
        before = [job for job in copies if later.side and job.pair[1] == here]
        if not later.side or here == tree.root:
            before += [job for job in sums if job.pair[1] == here]
        later.num_before = len(before)
        for job in before:
            job.after.append(later)
    return [*sums, *copies]
