"""Repeats: finds repeated structure in a model by what its ops compute; names are not used.

Sibling modules that compute nearly the same are blocks; else the longest run of ops that repeats
with a period is searched. Both are heuristics; ``find_blocks(graph, Modules(...))`` overrides them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from superscaler_core.graph.annotation import Annotation, loops_of
from superscaler_core.graph.graph import Graph, Op, paths
from superscaler_core.graph.tensor import ACTIVATION, INPUT, PARAMETER
from superscaler_core.grouped import grouped

ALIKE = 0.7
"""Two blocks are alike if they share at least this fraction of the smaller block's ops. A decoder
block has all ops of an encoder block, and a block with experts has the attention of a block
without."""

SIZES_APART = 2.5
"""Blocks differ in their number of ops by at most this factor: a norm is no block."""

MOST = 0.8
"""A module counts as a list of blocks if these have at least this fraction of its linear maps."""

Signature = Counter[tuple[str, str]]
"""Kinds of ops with their annotations, and the number of ops of each."""


def is_map(op: Op) -> bool:
    """Whether an op is a linear map: it sums over a loop of a parameter and of another input."""
    pairs = list(zip(op.inputs, map(loops_of, op.annotation.inputs), strict=True))
    weights = frozenset[str]().union(*(loops for t, loops in pairs if t.kind == PARAMETER))
    others = frozenset[str]().union(*(loops for t, loops in pairs if t.kind != PARAMETER))
    return not (weights & others).isdisjoint(op.annotation.reductions)


def starts_of_blocks(graph: Graph) -> tuple[Op, ...]:
    """The first op of every block, then the last op of the last block; empty if there are none.

    Repetitions with less than half of the model's linear maps do not count.
    """
    num_maps = sum(map(is_map, graph.ops))
    for search in (_starts_by_modules, _starts_by_period):
        starts = search(graph)
        inside = graph.ops[starts[0].index : starts[-1].index + 1] if starts else ()
        if starts and 2 * sum(map(is_map, inside)) >= num_maps:
            return starts
    return ()


# --- sibling modules ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Family:
    """Sibling modules that compute nearly the same, in order.

    Attributes:
        members: the ops of each module.
        num_maps: linear maps in all modules together.
        is_list: whether the modules are members of a list, which torch numbers.
    """

    members: tuple[tuple[Op, ...], ...]
    num_maps: int
    is_list: bool

    @property
    def span(self) -> tuple[int, int]:
        """The indices of the first and the last op."""
        return self.members[0][0].index, self.members[-1][-1].index

    @property
    def is_row(self) -> bool:
        """Whether each member reads a result of the previous one, unlike experts in parallel."""
        made = [{tensor for op in ops for tensor in op.outputs} for ops in self.members]
        read = [{tensor for op in ops for tensor in op.inputs} for ops in self.members]
        return all(a & b for a, b in zip(made, read[1:], strict=False))

    def is_like(self, other: _Family) -> bool:
        """Whether some members of both compute nearly the same."""
        signatures = [_signature(ops) for ops in other.members]
        return any(_is_alike(_signature(ops), s) for ops in self.members for s in signatures)


def _starts_by_modules(graph: Graph) -> tuple[Op, ...]:
    every = sorted(_families(graph), key=lambda f: (-f.num_maps, -len(f.members)))
    lists = [family for family in every if family.is_list and family.is_row]
    families = [family for family in every if not _has_blocks(family, lists)]
    if not families:
        return ()
    chosen = families[:1]
    for family in families[1:]:
        # An encoder's blocks and a decoder's are two families.
        pairs = (sorted((family.span, other.span)) for other in chosen)
        if all(one[1] < then[0] for one, then in pairs) and family.is_like(chosen[0]):
            chosen.append(family)
    members = sorted((ops for f in chosen for ops in f.members), key=lambda ops: ops[0].index)
    return (*(ops[0] for ops in members), members[-1][-1])


def _has_blocks(family: _Family, lists: Sequence[_Family]) -> bool:
    """Whether each member is itself a list of blocks, such as an encoder and a decoder."""

    def is_list(ops: Sequence[Op]) -> bool:
        least, first, last = MOST * sum(map(is_map, ops)), ops[0].index, ops[-1].index
        inside = (x for x in lists if first <= x.span[0] and x.span[1] <= last)
        return any(inner is not family and inner.num_maps >= least for inner in inside)

    return all(map(is_list, family.members))


def _families(graph: Graph) -> Iterator[_Family]:
    """Sibling modules that are alike; a single module if it is the only member of a list."""
    inside = grouped((path, op) for op in graph.ops if op.module for path in paths(op.module))
    beside = grouped((path.rpartition(".")[0], path) for path in inside)
    maps = set(filter(is_map, graph.ops))
    signatures = {path: _signature(ops) for path, ops in inside.items()}
    for parent, children in beside.items():
        groups: list[list[str]] = []
        for child in filter(lambda child: maps.intersection(inside[child]), children):
            own = signatures[child]
            near = (g for g in groups if any(_is_alike(own, signatures[c]) for c in g))
            group = next(near, None)
            if group is None:
                groups.append(group := [])
            group.append(child)
        for group in groups:
            is_list = bool(parent) and group[0].rpartition(".")[2].isdecimal()
            members = tuple(tuple(inside[child]) for child in group)
            in_turn = all(a[-1].index < b[0].index for a, b in pairwise(members))
            if (len(group) > 1 or (is_list and len(children) == 1)) and in_turn:
                num_maps = sum(len(maps.intersection(ops)) for ops in members)
                yield _Family(members, num_maps, is_list)


def _signature(ops: Sequence[Op]) -> Signature:
    return Counter(map(_kind, ops))


def _kind(op: Op) -> tuple[str, str]:
    return op.kind, _text(op.annotation)


@lru_cache(maxsize=4096)
def _text(annotation: Annotation) -> str:
    """The printed annotation; cached, since ops of a kind share it and modules are nested."""
    return str(annotation)


def _is_alike(one: Signature, other: Signature) -> bool:
    small, large = sorted((one.total(), other.total()))
    return (one & other).total() >= ALIKE * small and large <= SIZES_APART * small


# --- a period of ops ----------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Run:
    """``covered`` places from ``start`` on: ``count`` repetitions of ``period``, and a rest."""

    covered: int
    count: int
    start: int
    period: int


def runs_of(row: Sequence[Hashable], period: int, lo: int, hi: int) -> Iterator[Run]:
    """The longest runs in ``[lo, hi)`` that repeat with a period, at least once."""
    length = 0
    for i in range(lo, hi - period + 1):
        if i + period < hi and row[i] == row[i + period]:
            length += 1
            continue
        covered = length + period
        if length >= period:
            yield Run(covered, covered // period, i - length, period)
        length = 0


def _starts_by_period(graph: Graph) -> tuple[Op, ...]:
    ops = graph.ops
    numbers: dict[tuple[object, ...], int] = {}
    row = [
        numbers.setdefault((*_kind(op), *(t.kind == PARAMETER for t in op.inputs)), len(numbers))
        for op in ops
    ]
    maps = [is_map(op) for op in ops]
    runs = [replace(run, start=_border(ops, run)) for run in _longest(row, maps, 0, len(ops), 1)]
    firsts = (ops[run.start + i * run.period] for run in runs for i in range(run.count))
    ends = [ops[run.start + run.count * run.period - 1] for run in runs[-1:]]
    return (*firsts, *ends)


def _longest(row: Sequence[int], maps: Sequence[bool], lo: int, hi: int, least: int) -> list[Run]:
    """The longest run in ``[lo, hi)``, and further runs before and after it, in order.

    The period of a further run has at least half as many linear maps as that of the longest run,
    which has at least ``least``. ``row`` has equal numbers for ops that compute alike, and ``maps``
    says which ops are linear maps.
    """
    runs = (run for period in range(2, (hi - lo) // 2 + 1) for run in runs_of(row, period, lo, hi))
    long = (run for run in runs if sum(maps[run.start : run.start + run.period]) >= least)
    run = max(long, default=None)
    if run is None:
        return []
    least = -(-sum(maps[run.start : run.start + run.period]) // 2)
    before = _longest(row, maps, lo, run.start, least)
    return [*before, run, *_longest(row, maps, run.start + run.covered, hi, least)]


def _border(ops: Sequence[Op], run: Run) -> int:
    """The start of the first period, where the fewest bytes cross from one period to the next."""
    slack = run.covered - run.count * run.period
    return min(range(run.start, run.start + slack + 1), key=lambda i: (_crossing(ops, i), i))


def _crossing(ops: Sequence[Op], at: int) -> int:
    """Bytes of inputs and activations that ops from ``at`` on read from earlier ops."""
    made = {tensor for op in ops[at:] for tensor in op.outputs}
    read = {t for op in ops[at:] for t in op.inputs if t.kind in (ACTIVATION, INPUT)}
    return sum(tensor.num_bytes for tensor in read - made)
