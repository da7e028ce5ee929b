"""Shortened: the graph of a model with fewer of its repeated blocks, from the captured graph.

Blocks that compute the same take the same time and memory: two short graphs show how much one adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise

from superscaler_core.graph.blocks import Blocks, OpGroup, find_blocks
from superscaler_core.graph.form import OpForm
from superscaler_core.graph.graph import Graph
from superscaler_core.graph.tensor import CONSTANT, PARAMETER, PTensor
from superscaler_core.known import remembers

MAX_PERIOD = 4
"""Most blocks after which a model may repeat: for example, every fourth block has experts."""

GAIN = 0.75
"""Two short graphs together have at most this share of a graph's blocks; more gains too little."""


LEAST = 3
"""Periods of blocks that every stage keeps, as two blocks' weights may be fetched ahead of one."""


def even(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Blocks of every stage, as ``stages_of_blocks`` cuts them without ``sizes``."""
    ends = (num_blocks * i // num_stages for i in range(num_stages + 1))
    return tuple(b - a for a, b in pairwise(ends))


@dataclass(frozen=True, eq=False)
class Short:
    """Two short graphs of a model, the shorter one first, for a plan with pipeline stages.

    From the first graph to the second, every stage gains equally many blocks, to ``sizes``; after
    ``steps`` such gains it has all its blocks of the whole graph.
    """

    graphs: tuple[Graph, Graph]
    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    steps: int

    def at_whole(self, first: float, second: float) -> float:
        """Extrapolate a figure of both graphs linearly to the whole graph.

        Raises:
            NotEvenError: the figure is smaller in the second graph.
        """
        if second < first:
            raise NotEvenError
        return first + self.steps * (second - first)


class NotEvenError(Exception):
    """Raised for a figure that falls as the number of blocks grows."""


@dataclass(frozen=True, eq=False)
class Repeats:
    """The repetition of a graph's blocks: which blocks compute what earlier blocks compute."""

    blocks: Blocks

    # --- short graphs ---------------------------------------------------------------------------

    def short(self, sizes: Sequence[int]) -> Short | None:
        """Two short graphs for stages of ``sizes`` blocks; None if they would not be short.

        Every stage loses the same number of blocks, so the slowest of similar stages stays the
        slowest. For a fixed pipeline order, the step time is a maximum over paths of dependencies;
        the time of a path is linear in the number of blocks. The step time is therefore convex: if
        another path becomes the longest, the extrapolated time is too low. The same holds for peak
        memory, which is a maximum of sums.
        """
        return self._short(tuple(sizes))

    @cached_property
    def fewest(self) -> Graph:
        """The graph with the fewest blocks in which every kind is followed by what follows it."""
        graph, period = self.blocks.graph, self.period
        kinds = {forms_of(ops) for ops in self.blocks.layers}
        runs = self._runs(0, len(self.blocks.layers))
        most = max((len(run) // period for run in runs), default=0)
        for left in range(1, most):
            lost = frozenset(i for run in runs for i in run[left * period :])
            few = self.without(lost)
            layers = find_blocks(few).layers if few is not None else ()
            is_found = len(layers) == len(self.blocks.layers) - len(lost)
            if few is not None and is_found and {forms_of(ops) for ops in layers} == kinds:
                return few
        return graph

    @remembers()
    def _short(self, sizes: tuple[int, ...]) -> Short | None:
        num, ends = len(self.blocks.layers), [*accumulate(sizes, initial=0)]
        if ends[-1] != num:
            return None
        stages = [self._rows(a, b) for a, b in pairwise(ends)]
        most = max((len(row) // self.period for rows in stages for row in rows), default=0)
        losses = [(steps, _loss(stages, steps, self.period)) for steps in range(2, most + 1)]
        if not losses:
            return None
        # The first graph lacks the blocks of all steps, and the second those of all but one.
        steps, loss = max(losses, key=lambda each: (2 * each[0] - 1) * each[1].num)
        if 2 * num - (2 * steps - 1) * loss.num * len(sizes) > GAIN * num:
            return None
        first, second = (self._lacking(loss, place, sizes) for place in (steps, steps - 1))
        if first is None or second is None:
            return None
        return Short((first[0], second[0]), (first[1], second[1]), steps)

    def _lacking(
        self, loss: _Loss, steps: int, sizes: tuple[int, ...]
    ) -> tuple[Graph, tuple[int, ...]] | None:
        """The graph without the blocks of ``steps`` steps, and its number of blocks per stage."""
        graph = self.without(frozenset(loss.times(steps)))
        left = tuple(size - steps * loss.num for size in sizes)
        # With few blocks left, the model may not be recognized as repeating any more.
        is_found = graph is not None and len(find_blocks(graph).layers) == sum(left)
        return (graph, left) if graph is not None and is_found else None

    def _rows(self, start: int, end: int) -> list[range]:
        """Runs of consecutive blocks of a stage that may be removed, each of whole periods."""
        # The first blocks of a stage repeat blocks of another stage.
        return self._runs(start + LEAST * self.period, end)

    def _runs(self, start: int, end: int) -> list[range]:
        """Runs of consecutive blocks that repeat earlier ones, each of whole periods."""
        inside = range(start, end)
        rows = (list(row) for again, row in groupby(inside, self._is_again.__getitem__) if again)
        return [range(row[0], row[0] + len(row) // self.period * self.period) for row in rows]

    # --- removed --------------------------------------------------------------------------------

    def without(self, removed: frozenset[int]) -> Graph | None:
        """The graph without some blocks; None if they are not whole periods of repeated blocks.

        A block repeats if it computes what the block one period before it computes. The readers of
        a removed block's result read that earlier block's result instead. Ops, tensors and
        parameters keep their names.

        Law (tests/superscaler_core/evaluation/test_shortened.py): if a block reads only the
        block before it and what all blocks share, the result equals the graph captured from a model
        with as many blocks, op by op, up to names.
        """
        if not removed <= {i for i, again in enumerate(self._is_again) if again}:
            return None
        runs = groupby(enumerate(sorted(removed)), lambda pair: pair[1] - pair[0])
        if any(len(list(run)) % self.period for _, run in runs):
            return None
        graph, layers = self.blocks.graph, self.blocks.layers
        lost = {op for i in removed for op in layers[i]}
        instead: dict[PTensor, PTensor] = {}
        for i in sorted(removed):
            for op, like in zip(layers[i], layers[i - self.period], strict=True):
                for tensor, other in zip(op.outputs, like.outputs, strict=True):
                    instead[tensor] = instead.get(other, other)
        ops = tuple(
            replace(op, index=i, inputs=tuple(instead.get(t, t) for t in op.inputs))
            for i, op in enumerate(op for op in graph.ops if op not in lost)
        )
        read = {tensor.name for op in ops for tensor in op.inputs}
        made = {tensor for op in ops for tensor in op.outputs}
        return replace(
            graph,
            ops=ops,
            parameters={n: t for n, t in graph.parameters.items() if n in read},
            aliases={n: of for n, of in graph.aliases.items() if of in read},
            constants={n: value for n, value in graph.constants.items() if n in read},
            packed={n: packing for n, packing in graph.packed.items() if n in read},
            recycled={t: instead.get(of, of) for t, of in graph.recycled.items()},
            state={t: of for t, of in graph.state.items() if of in made},
            results={n: of for n, of in graph.results.items() if of in made},
        )

    # --- alike ----------------------------------------------------------------------------------

    @cached_property
    def period(self) -> int:
        """The number of blocks after which the model repeats."""
        return max(range(1, MAX_PERIOD + 1), key=lambda period: sum(self._alike(period)))

    @property
    def _is_again(self) -> Sequence[bool]:
        """For each block, whether it computes what the block one period before it computes."""
        return self._alike(self.period)

    @remembers()
    def _alike(self, period: int) -> list[bool]:
        found: list[bool] = []
        for i in range(len(self.blocks.layers)):
            found.append(i >= period and self._is_like(i, i - period, found))
        return found

    def _is_like(self, new: int, old: int, is_again: Sequence[bool]) -> bool:
        """Whether block ``new`` computes what ``old`` does, from the corresponding tensors."""
        graph, period = self.blocks.graph, new - old
        if graph.more_losses or len(self.blocks.layers[new]) != len(self.blocks.layers[old]):
            return False
        own: dict[PTensor, PTensor] = {}

        def agrees(a: PTensor, b: PTensor) -> bool:
            if a is b:
                return True
            if a.kind in (PARAMETER, CONSTANT):
                is_packed_alike = graph.packed.get(a.name) == graph.packed.get(b.name)
                return own.setdefault(a, b) is b and is_packed_alike
            if a not in self._places:
                return False
            block, place = self._places[a]
            if block == new or (new - period <= block and is_again[block]):
                return self._places.get(b) == (block - period, place)
            return new - period <= block

        return all(
            op.form is like.form
            and op.modules == like.modules
            and all(map(agrees, op.inputs, like.inputs))
            for op, like in zip(self.blocks.layers[new], self.blocks.layers[old], strict=True)
        )

    @cached_property
    def _places(self) -> dict[PTensor, tuple[int, tuple[int, int]]]:
        """For every result of a block: the block, its op's place there, and the result's number."""
        return {
            tensor: (number, (at, which))
            for number, ops in enumerate(self.blocks.layers)
            for at, op in enumerate(ops)
            for which, tensor in enumerate(op.outputs)
        }


def forms_of(ops: OpGroup) -> tuple[OpForm, ...]:
    """The forms of some ops, which are equal for blocks that compute the same."""
    return tuple(op.form for op in ops)


@dataclass(frozen=True)
class _Loss:
    """The ``num`` blocks that every stage loses per step towards the shortest graph.

    ``rows`` has every run of blocks that may be removed, with the number removed per step.
    """

    rows: tuple[tuple[range, int], ...]
    num: int

    def times(self, steps: int) -> Iterator[int]:
        """The blocks that ``steps`` steps remove."""
        for row, num in self.rows:
            yield from row[: steps * num]


def _loss(stages: Sequence[Sequence[range]], steps: int, period: int) -> _Loss:
    """The largest number of blocks that every stage can lose ``steps`` times."""
    nums = [[len(row) // period // steps * period for row in rows] for rows in stages]
    least = min(map(sum, nums))
    found = []
    for rows, given in zip(stages, nums, strict=True):
        left = least
        for row, num in zip(rows, given, strict=True):
            found.append((row, min(num, left)))
            left -= min(num, left)
    return _Loss(tuple(found), least)


@lru_cache(maxsize=32)
def repeats_of(graph: Graph) -> Repeats:
    """The repeats of a graph's blocks; cached, because a search asks for few graphs many times."""
    return Repeats(find_blocks(graph))
