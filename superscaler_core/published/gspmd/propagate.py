"""Propagate: a few specs of tensors, passed along the loops of ops until nothing changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from superscaler_core.errors import AnnotationError, PlanError
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.shard_spec import Axes, ShardSpec
from superscaler_core.graph.tensor import PTensor
from superscaler_core.plan import OpSplit
from superscaler_core.published.gspmd.links import (
    NUM_PRIORITIES,
    Specs,
    links_of,
    merged,
    priorities,
    wanted,
)
from superscaler_core.published.gspmd.price import Conflict, Cut, Prices, cut_text

Change = tuple[int, Axes]
"""A dim of a tensor, and its new axes, which begin with the axes that it has."""


@dataclass(frozen=True, eq=False)
class Propagated:
    """The spec of every tensor of a graph, and how each op is cut.

    Attributes:
        graph: the graph.
        prices: prices of the graph on the mesh.
        said: the given specs, by the names of their tensors.
        specs: the axes of every dim of every tensor.
        cuts: the cut of every op.
        choices: the ops whose tensors want cuts that exclude each other; price decided.
    """

    graph: Graph
    prices: Prices
    said: Mapping[str, ShardSpec]
    specs: Specs
    cuts: Mapping[Op, Cut]
    choices: tuple[Conflict, ...]

    def spec(self, tensor: str) -> ShardSpec:
        """The spec of a tensor, with all its dims that are cut."""
        cut = ((dim, axes) for dim, axes in enumerate(self.specs[tensor]) if axes)
        return ShardSpec(tuple(cut), others_whole=True)

    def split(self, op: Op) -> OpSplit:
        """The parts of an op."""
        return self.prices.split(op, self.cuts[op])

    @property
    def unused(self) -> tuple[str, ...]:
        """The tensors with a given spec that no op reads or writes."""
        return tuple(name for name in self.said if name not in self.specs)

    def summed(self, op: Op) -> frozenset[str]:
        """The axes along which an op's results are partial sums."""
        sums = op.annotation.reductions
        return frozenset(axis for loop, axes in self.cuts[op] if loop in sums for axis in axes)

    def __str__(self) -> str:
        lines = [f"{self.graph.name}: {len(self.said)} specs said, {len(self.choices)} choices"]
        for op in self.graph.ops:
            results = ", ".join(f"{t} {self.spec(t.name)}" for t in op.outputs)
            sums = ", ".join(sorted(self.summed(op)))
            partial = f" (partial sums along {sums})" if sums else ""
            lines.append(f"{op.name}: {cut_text(self.cuts[op])}{partial} -> {results}")
        lines += [f"unused: no op reads or writes {name}" for name in self.unused]
        return "\n".join([*lines, *(f"choice: {choice}" for choice in self.choices)])


def propagate(graph: Graph, said: Mapping[str, ShardSpec], prices: Prices) -> Propagated:
    """Complete the specs of a graph from those of a few tensors, and cut every op by them.

    In a round, each op proposes to each of its tensors the axes that its other tensors have for the
    same loops (``wanted``). A proposal only adds axes, and only to a dim without a given spec.
    Loops of priority 0 come first (``priorities``), and again after every change. Proposals of a
    round may exclude each other, because an axis cuts only one dim of a tensor; then the price of
    the ops around the tensor decides. When nothing changes any more, every op is cut as its tensors
    want. Where these cuts exclude each other, price decides (``Prices.chosen``).

    Laws (tests/superscaler_core/published/gspmd): given specs stay; the result does not depend on
    the order of ops; if all specs of a result are given, the result is the same.

    Complexity: at most (dims * axes) changes of a tensor, each of which lets its ops propose again.

    Args:
        graph: the graph.
        said: the given specs, by the names of their tensors.
        prices: prices of the graph on the mesh.

    Raises:
        PlanError: a spec does not fit its tensor or the mesh.

    Source: Xu et al., GSPMD, 2021. Differences: loops of annotations replace rules for every op;
    conflicts are resolved by price, not by order; partial sums are not specs, but follow from the
    cut of the op that makes them.
    """
    run = _Run(graph, said, prices)
    run.to_fixpoint()
    found = {op: prices.chosen(op, run.specs) for op in graph.ops}
    return Propagated(
        graph,
        prices,
        dict(said),
        run.specs,
        {op: cut for op, (cut, _) in found.items()},
        tuple(choice for _, choice in found.values() if choice is not None),
    )


class _Run:
    """The specs at one point of the propagation."""

    def __init__(self, graph: Graph, said: Mapping[str, ShardSpec], prices: Prices) -> None:
        self.graph, self.prices, self.mesh = graph, prices, prices.mesh
        self.fixed = {
            tensor.name: self._checked(tensor, said[tensor.name])
            for tensor in self.tensors.values()
            if tensor.name in said
        }
        self.specs = {
            name: tuple(self.fixed.get(name, {}).get(dim, ()) for dim in range(len(tensor.shape)))
            for name, tensor in self.tensors.items()
        }

    @cached_property
    def tensors(self) -> Mapping[str, PTensor]:
        every = (t for op in self.graph.ops for t in (*op.inputs, *op.outputs))
        return {tensor.name: tensor for tensor in every}

    @cached_property
    def around(self) -> Mapping[str, tuple[Op, ...]]:
        """The ops that write or read a tensor, in the order of their names."""
        found: dict[str, dict[Op, None]] = {}
        for op in sorted(self.graph.ops, key=lambda op: op.name):
            for tensor in (*op.inputs, *op.outputs):
                found.setdefault(tensor.name, {})[op] = None
        return {name: tuple(ops) for name, ops in found.items()}

    def _checked(self, tensor: PTensor, spec: ShardSpec) -> Mapping[int, Axes]:
        unknown = sorted(spec.axes - self.mesh.sizes.keys())
        if unknown:
            raise PlanError(
                f"spec {str(spec)!r} of {tensor}: mesh {self.mesh} has no axis {unknown[0]}."
            )
        try:
            said = spec.said(len(tensor.shape))
        except AnnotationError as error:
            raise PlanError(f"{tensor}: {error}") from None
        for dim, axes in said.items():
            if self.mesh.num_pieces(axes) > tensor.shape[dim]:
                raise PlanError(
                    f"spec {str(spec)!r} of {tensor}: dim {dim} has {tensor.shape[dim]} elements, "
                    f"and mesh {self.mesh} cuts it into {self.mesh.num_pieces(axes)}."
                )
        return said

    def to_fixpoint(self) -> None:
        waiting = [dict.fromkeys(self.graph.ops) for _ in range(NUM_PRIORITIES)]
        while (level := next((i for i, ops in enumerate(waiting) if ops), None)) is not None:
            ops, waiting[level] = waiting[level], {}
            # A round: all ops propose from the same specs, so their order does not matter.
            for tensor in self._round(ops, level):
                for later in waiting:
                    later |= dict.fromkeys(self.around[tensor])

    def _round(self, ops: Iterable[Op], level: int) -> list[str]:
        """Let ops propose along loops of one priority; return the tensors that changed."""
        proposed: dict[str, set[Change]] = {}
        for op in ops:
            for tensor, change in self._proposals(op, level):
                proposed.setdefault(tensor, set()).add(change)
        made = {name: self._resolved(name, changes) for name, changes in proposed.items()}
        self.specs |= made
        return list(made)

    def _proposals(self, op: Op, level: int) -> Iterator[tuple[str, Change]]:
        now = wanted(op, self.specs, self.mesh)
        tensors, order = (*op.inputs, *op.outputs), priorities(op.form)
        for link in links_of(op.form):
            if order[link.loop] != level or link.loop not in now:
                continue
            name = tensors[link.operand].name
            for wish in merged(now[link.loop]):
                axes = self._free(name, link.dim, link.fitting(wish, self.mesh))
                if len(axes) > len(self.specs[name][link.dim]):
                    yield name, (link.dim, axes)

    def _free(self, tensor: str, dim: int, axes: Axes) -> Axes:
        """The longest prefix of the axes that the dim can have; none if it has other axes."""
        if dim in self.fixed.get(tensor, {}):
            return ()
        spec = self.specs[tensor]
        used = {axis for other, found in enumerate(spec) if other != dim for axis in found}
        count = next((i for i, axis in enumerate(axes) if axis in used), len(axes))
        return axes[:count] if axes[: len(spec[dim])] == spec[dim] else ()

    def _resolved(self, tensor: str, changes: Collection[Change]) -> tuple[Axes, ...]:
        """A tensor's spec after all changes or, if they conflict, after the cheapest one."""
        longest = {dim: max((c for c in changes if c[0] == dim), key=_length) for dim, _ in changes}
        made = self._changed(tensor, longest.values())
        if made is not None and all(axes == made[dim][: len(axes)] for dim, axes in changes):
            return made
        first = min(changes, key=lambda change: (self._price(tensor, change), change))
        found = self._changed(tensor, [first])
        assert found is not None, "a change alone is one that the tensor can have"
        return found

    def _changed(self, tensor: str, changes: Iterable[Change]) -> tuple[Axes, ...] | None:
        """The spec after several changes; None if an axis would cut two dims."""
        spec = list(self.specs[tensor])
        for dim, axes in changes:
            spec[dim] = axes
        used = [axis for axes in spec for axis in axes]
        return tuple(spec) if len(used) == len(set(used)) else None

    def _price(self, tensor: str, change: Change) -> float:
        """Seconds of all ops around a tensor after one change."""
        made = self._changed(tensor, [change])
        assert made is not None, "a change alone is one that the tensor can have"
        specs = {**self.specs, tensor: made}
        cuts = ((op, self.prices.chosen(op, specs)[0]) for op in self.around[tensor])
        return sum(self.prices.price(op, cut, specs) for op, cut in cuts)


def _length(change: Change) -> int:
    return len(change[1])
