"""Blocks: finds the parts of a model to which plans refer, by what its ops compute, not by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from math import prod

from superscaler_core.errors import PlanError
from superscaler_core.graph.annotation import loops_of
from superscaler_core.graph.dims import DimClass, Dims, dims_of
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.modules import Modules
from superscaler_core.graph.once import once_per_graph
from superscaler_core.graph.repeats import is_map, starts_of_blocks
from superscaler_core.graph.tensor import PARAMETER, PTensor

OpGroup = tuple[Op, ...]

ParameterDims = tuple[tuple[str, int], ...]
"""Names of parameters, with wildcards, each with a dim: ``(("*.q.weight", 0), ("*.up.w", 0))``."""


@once_per_graph
def find_blocks(
    graph: Graph,
    blocks: Modules | None = None,
    *,
    features: ParameterDims = (),
    experts: Modules | None = None,
    embedding: str = "",
) -> Blocks:
    """The parts of a model; parts that are not given are found by the model's structure.

    Args:
        graph: the graph of the model.
        blocks: the modules of the blocks; each matching module is one block.
        features: parameters, each with the dim that is its inner features.
        experts: the modules of the experts.
        embedding: the name of the parameter in which words are looked up.
    """
    return Blocks(dims_of(graph), blocks, features, experts, embedding)


@dataclass(frozen=True, eq=False)
class Blocks:
    """The parts of one model; each part is searched at its first use.

    Laws (tests/superscaler_core/graph/test_blocks.py): the groups of ``groups`` are all ops, in
    order; a model under other names has the same parts, op by op; if the structure does not
    determine a part, the error says what was searched for and how to give the part.

    What the caller of ``find_blocks`` gave has names with ``said``.
    """

    dims: Dims
    said: Modules | None = None
    said_features: ParameterDims = ()
    said_experts: Modules | None = None
    said_embedding: str = ""

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self.dims.graph

    # --- blocks ---------------------------------------------------------------------------------

    @cached_property
    def all(self) -> tuple[OpGroup, ...]:
        """The ops of every block, in order; ops between two blocks belong to the earlier block.

        Raises:
            PlanError: the model has no repeated structure, or no module matches ``said``.
        """
        if not (starts := self._found):
            modules = ", ".join(dict.fromkeys(op.module for op in self.graph.ops if op.module))
            looked = "modules beside each other, or a run of ops, that repeat"
            raise PlanError(
                f"{self.graph.name} has no blocks: looked for "
                f"{looked if self.said is None else f'modules {self.said}'}; its modules are "
                f"{modules[:200]}: say find_blocks(graph, Modules('layers.*')) with a wildcard for "
                "the number of the block."
            )
        return self._runs(starts)

    @cached_property
    def layers(self) -> tuple[OpGroup, ...]:
        """The blocks; without repeated structure, one layer per module that reads parameters.

        Such a layer begins at the module's first op that reads parameters. A model with one such
        module is one layer.
        """
        if self.said is not None or self._found:
            return self.all
        firsts: dict[str, Op] = {}
        for op in self.graph.ops:
            if op.parameters:
                firsts.setdefault(op.module, op)
        last = [op for op in self.graph.ops if op.module in firsts][-1:]
        return self._runs((*firsts.values(), *last)) if last else (self.graph.ops,)

    @cached_property
    def _found(self) -> OpGroup:
        return starts_of_blocks(self.graph) if self.said is None else self._starts(self.said)

    def _runs(self, starts: Sequence[Op]) -> tuple[OpGroup, ...]:
        """The ops from each start up to the next; the last of ``starts`` is only where they end."""
        ends = [*(op.index for op in starts[:-1]), starts[-1].index + 1]
        return tuple(self.graph.ops[a:b] for a, b in pairwise(ends))

    def _starts(self, said: Modules) -> OpGroup:
        """The first op of each module, then the last op of all modules; empty if none matches."""
        firsts = [ops[0] for ops in said.instances(self.graph)]
        return (*firsts, *said.ops(self.graph)[-1:])

    @property
    def groups(self) -> tuple[OpGroup, ...]:
        """All ops in groups: the ops before the layers, every layer, the ops after the layers."""
        before = self.graph.ops[: self.layers[0][0].index]
        return tuple(filter(None, (before, *self.layers, self.behind)))

    @property
    def behind(self) -> OpGroup:
        """The ops after the last layer."""
        return self.graph.ops[self.layers[-1][-1].index + 1 :]

    # --- what a block consists of ---------------------------------------------------------------

    @cached_property
    def attention(self) -> tuple[OpGroup, ...]:
        """For each block, the ops of its attentions, between linear maps; ``()`` if none."""
        return tuple(map(self._attention, self.all))

    @cached_property
    def mlp(self) -> tuple[OpGroup, ...]:
        """For each block, the ops outside attention that have inner features, such as its MLP."""
        return tuple(map(self._mlp, self.all))

    def _mlp(self, block: OpGroup) -> OpGroup:
        inside, found = set(block), set[Op]()
        for dim in self.inner:
            run = [op for op in block if self.dims.ids(op, dim)]
            if not any(self._attends(op, inside) for op in run):
                found.update(run)
        return tuple(op for op in block if op in found)

    def _attention(self, block: OpGroup) -> OpGroup:
        inside, found = set(block), set[Op]()
        for op in block:
            if self._attends(op, inside):
                near = (self._near(op, inside, side) for side in (self._makers, self._readers))
                found.update([op], *near)
        return tuple(op for op in block if op in found)

    def _attends(self, op: Op, inside: set[Op]) -> bool:
        """Whether an op is an attention, or a softmax over a product of two activations."""
        if op.kind == "attention":
            return True
        before = self._near(op, inside, self._makers) if op.kind == "softmax" else ()
        sums = (made for made in before if made.annotation.reductions)
        return any(sum(t in self.graph.producer for t in made.inputs) > 1 for made in sums)

    def _near(self, op: Op, inside: set[Op], next_to: Callable[[Op], Iterable[Op]]) -> set[Op]:
        """The ops of a block that ``next_to`` reaches from an op, up to but without linear maps."""
        found: set[Op] = set()
        left = list(next_to(op))
        while left:
            other = left.pop()
            if other in inside and other not in found and not is_map(other):
                found.add(other)
                left += next_to(other)
        return found

    def _makers(self, op: Op) -> list[Op]:
        return [self.graph.producer[t] for t in op.inputs if t in self.graph.producer]

    def _readers(self, op: Op) -> list[Op]:
        return [reader for t in op.outputs for reader, _ in self.graph.readers.get(t, ())]

    # --- features -------------------------------------------------------------------------------

    @cached_property
    def inner(self) -> tuple[DimClass, ...]:
        """The inner features of all blocks: dims that one linear map makes and the next sums over.

        Examples are attention heads and the features of MLPs. If one map makes queries, keys and
        values of different sizes together, the inner features begin after that map, which is whole
        on every device; a map that makes pieces of one size is cut (ADR 39). Of three maps in a
        row, the last two are used, so that no map is cut twice. If each block is one linear map,
        two blocks form a pair; a block that is left over contributes the dims of its result.

        A model without repeated structure, or whose blocks have no such pair, is searched as if it
        were one block. If it has no pair either, the dims of the results of all its maps are used.

        Raises:
            PlanError: the model has no linear map and no convolution whose features can be cut, or
                no parameter matches ``said_features``.
        """
        if self.said_features:
            return self._in_order(self.dims.of_params(*self.said_features))
        found = {dim for unit in self._units for dim in self._inner(unit)}
        found = found or self._inner(self.graph.ops)
        found = found or {dim for op in filter(is_map, self.graph.ops) for dim in self._made(op)}
        if not found:
            raise PlanError(
                f"{self.graph.name} has no inner features: looked for a linear map or a "
                "convolution whose features can be cut. Use a plan that cuts the batch, such as "
                "data_parallel or zero3; or say find_blocks(graph, features=(('NAME', DIM), ...)), "
                "where NAME is a parameter, with wildcards, whose dim DIM is cut. It has "
                f"{', '.join(list(self.graph.parameters)[:8])}, ..."
            )
        return self._in_order(found)

    @cached_property
    def width(self) -> tuple[DimClass, ...]:
        """The features of the hidden state: the dims over which maps to inner features sum."""
        inner, found = set(self.inner), set[DimClass]()
        for op in filter(is_map, self.graph.ops):
            is_matrix = all(len(tensor.shape) == 2 for tensor in op.parameters)
            if is_matrix and inner & self._made(op):
                found |= self._summed(op)
        return self._in_order(found)

    def _in_order(self, dims: Iterable[DimClass]) -> tuple[DimClass, ...]:
        """The dims, sorted by the first op that has each, independent of parameter names."""
        ops = {dim: [op.index for op in self.dims.sizes(dim).values()] for dim in dims}
        return tuple(sorted(ops, key=lambda dim: (min(ops[dim], default=0), dim)))

    @property
    def _units(self) -> Sequence[OpGroup]:
        """The blocks, or pairs of blocks if each is a single linear map; ``()`` if none."""
        if self.said is None and not self._found:
            return ()
        if any(sum(map(is_map, ops)) > 1 for ops in self.all):
            return self.all
        pairs = [self.all[i : i + 2] for i in range(0, len(self.all), 2)]
        return [tuple(op for ops in pair for op in ops) for pair in pairs]

    def _inner(self, unit: OpGroup) -> set[DimClass]:
        maps = [op for op in unit if is_map(op)]
        if len(maps) == 1:
            return self._made(maps[0])
        stream = self._stream(unit)
        made = {dim for op in maps for dim in self._made(op)} | self._of_pieces(unit)
        found: set[DimClass] = set()
        for op in reversed(maps):
            if not found & self._made(op):
                found |= (self._summed(op) & made) - stream
        return found

    def _of_pieces(self, unit: OpGroup) -> set[DimClass]:
        """The dims of pieces of a map's result, such as queries, keys and values made by one map.

        No map makes these dims. They are heads, along which attentions can be cut, or the features
        of a gate and of the values that it multiplies.
        """
        inside = set(unit)
        found = {dim for op in unit if _is_piece(op) for dim in self.dims.of_tensor(op.outputs[0])}
        attends = (op for op in unit if self._attends(op, inside))
        return found.union(dim for op in attends for dim in self.dims.of_op(op))

    def _stream(self, unit: OpGroup) -> set[DimClass]:
        """The dims of a block's inputs and results, and the dims that some op of it cannot cut.

        A tensor that depends on no linear map is not part of the stream, such as a table of
        positions by heads that all blocks share.
        """
        inside, kept = set(unit), set(self.graph.state.values())
        made = {tensor for op in unit for tensor in op.outputs}
        left = {t for t in made if any(op not in inside for op, _ in self.graph.readers.get(t, ()))}
        left &= self._mapped
        read = {tensor for op in unit for tensor in op.inputs} & self._mapped
        # An op that replaces a buffer gathers the new value, so its fixed dims do not count.
        whole: set[DimClass] = set()
        for op in (op for op in unit if kept.isdisjoint(op.outputs)):
            sides = op.annotation.inputs if _is_piece(op) else op.annotation.operands
            loops = op.annotation.fixed.intersection(chain(*map(loops_of, sides)))
            whole.update(self.dims.of_loop(op, loop) for loop in loops)
        return whole.union(*map(self.dims.of_tensor, left | (read - made)))

    @cached_property
    def _mapped(self) -> set[PTensor]:
        """The activations that depend on the result of a linear map."""
        found: set[PTensor] = set()
        for op in self.graph.ops:
            if is_map(op) or found.intersection(op.inputs):
                found |= set(op.outputs)
        return found

    def _summed(self, op: Op) -> set[DimClass]:
        """The dims of a linear map's parameters over which it sums."""
        return self._of_parameters(op) & {
            self.dims.of_loop(op, i) for i in op.annotation.reductions if op.is_splittable(i)
        }

    def _made(self, op: Op) -> set[DimClass]:
        """The dims of a linear map's parameters that its result has and its input lacks."""
        read = (self.dims.of_tensor(t) for t in op.inputs if t.kind != PARAMETER)
        result = {dim for tensor in op.outputs for dim in self.dims.of_tensor(tensor)}
        return (self._of_parameters(op) & result).difference(self._summed(op), *read)

    def _numbers(self, op: Op) -> set[DimClass]:
        """The dims of a linear map's parameters that input and result have, such as of experts."""
        return self._of_parameters(op) - self._summed(op) - self._made(op)

    def _of_parameters(self, op: Op) -> set[DimClass]:
        return {dim for tensor in op.parameters for dim in self.dims.of_tensor(tensor)}

    # --- words ----------------------------------------------------------------------------------

    @cached_property
    def lookups(self) -> OpGroup:
        """The ops that look up inputs of the model in the embedding.

        Raises:
            PlanError: as in ``embedding``.
        """
        readers = self.graph.readers.get(self.embedding, ())
        return tuple(op for op, _ in readers if not is_map(op))

    @cached_property
    def embedding(self) -> PTensor:
        """The parameter in which words are looked up: the largest that integer inputs index.

        Raises:
            PlanError: integer inputs index no parameter, or no parameter has the given name.
        """
        if self._embedding is None:
            raise PlanError(
                f"{self.graph.name} has no embedding: looked for a parameter whose rows integer "
                "inputs choose; say find_blocks(graph, embedding='NAME')."
            )
        return self._embedding

    @cached_property
    def _embedding(self) -> PTensor | None:
        if self.said_embedding:
            return self.graph.parameter(self.said_embedding)
        lookups = (op for op in self.graph.ops if self._integers.intersection(op.inputs))
        read = (tensor for op in lookups if not is_map(op) for tensor in op.parameters)
        tables = (tensor for tensor in read if len(tensor.shape) == 2)
        return max(tables, key=lambda tensor: tensor.num_bytes, default=None)

    @cached_property
    def _integers(self) -> set[PTensor]:
        """Integer inputs, and the results of ops that only move their elements."""
        found = {tensor for tensor in self.graph.inputs if "int" in tensor.dtype}
        for op in self.graph.ops:
            if found.intersection(op.inputs) and not op.parameters:
                found |= {tensor for tensor in op.outputs if "int" in tensor.dtype}
        return found

    @cached_property
    def head(self) -> OpGroup:
        """The last linear map after the blocks, which scores each word; ``()`` if none.

        If the model has an embedding, the map must have as many results as there are words.
        """
        words = self._embedding
        for op in reversed(self.behind):
            if is_map(op):
                rows = {tensor.shape[0] for tensor in op.parameters}
                return (op,) if words is None or words.shape[0] in rows else ()
        return ()

    @cached_property
    def vocabulary(self) -> tuple[DimClass, ...]:
        """The dims of words in the embedding and in the head, if they exist."""
        tables = [] if self._embedding is None else [self._embedding]
        tables += [tensor for op in self.head for tensor in op.parameters if len(tensor.shape) == 2]
        return tuple(dict.fromkeys(self.dims.of(tensor.name, 0) for tensor in tables))

    @cached_property
    def scored(self) -> int:
        """The index of the last op whose result has a dim of words; the number of ops if none."""
        for op in reversed(self.graph.ops):
            loops = {loop for dim in self.vocabulary for loop in self.dims.ids(op, dim)}
            if loops.difference(op.annotation.reductions):
                return op.index
        return len(self.graph.ops)

    @cached_property
    def tokens(self) -> tuple[DimClass, ...]:
        """The dims of tokens: dim 1 of the inputs, for example of a source and a target.

        Raises:
            PlanError: too few ops have one of these dims, so the inputs are no sequences.
        """
        ops, inputs = self.graph.ops, self.graph.inputs
        dims = dict.fromkeys(self.dims.of(t.name, 1) for t in inputs if len(t.shape) > 1)
        having = {dim: sum(bool(self.dims.ids(op, dim)) for op in ops) for dim in dims}
        # Features of an input end at its first linear map; most ops keep the dim of tokens.
        found = tuple(dim for dim, num in having.items() if 4 * num > len(ops))
        if 2 * sum(having[dim] for dim in found) > len(ops):
            return found
        raise PlanError(
            f"{self.graph.name} has no sequence: an input such as {inputs[0]} should be [batch, "
            "sequence, ...] with a dim 1 that most ops keep; cut the batch instead (data_parallel)."
        )

    # --- experts --------------------------------------------------------------------------------

    @cached_property
    def experts(self) -> OpGroup:
        """The ops of all experts: from the first to the last linear map with a matrix per expert.

        Raises:
            PlanError: the model has no experts.
        """
        if self.said_experts is not None:
            looked, found = f"parameters in {self.said_experts}", self.said_experts.ops(self.graph)
        else:
            looked = "linear maps with a matrix for each expert"
            found = tuple(op for ops in self.all for op in self._of_experts(ops))
        if not any(op.parameters for op in found):
            raise PlanError(
                f"{self.graph.name} has no experts: looked for {looked}; it has to be a mixture of "
                "experts: say find_blocks(graph, experts=Modules('*.experts')), or the option "
                "expert=*.experts of a plan, if they are made otherwise."
            )
        if not any(map(self._cut, found)):
            kinds = ", ".join(sorted({op.kind for op in found}))
            raise PlanError(
                f"{self.graph.name}: {self.said_experts} are {kinds} and have no "
                "loop of experts that can be cut: experts are dealt out if each of "
                "their weights is one tensor [experts, ...], which a linear map or a module called "
                "with tokens, the experts of each token, and their weights reads. If they are "
                "modules in a list, call ss.stack_experts(model) first."
            )
        return found

    @property
    def expert_dims(self) -> tuple[DimClass, ...]:
        """The dims that number the experts."""
        return self._in_order({dim for op in self.experts for dim in self._cut(op)})

    def _cut(self, op: Op) -> set[DimClass]:
        """The first dims of an op's parameters, if it can be cut along them."""
        first = {tensor: self.dims.of(tensor.name, 0) for tensor in op.parameters if tensor.shape}
        if op.modules:
            first = {tensor: dim for tensor, dim in first.items() if dim in self._dealt(op)}
        loops = {dim: self.dims.ids(op, dim) for dim in first.values()}
        return {dim for dim, ids in loops.items() if any(map(op.is_splittable, ids))}

    def _dealt(self, op: Op) -> set[DimClass]:
        """The dims of experts of a module that returns a sum over them."""
        if not op.modules:
            return set()
        found = {self.dims.of_loop(op, i) for i in op.annotation.reductions if op.is_splittable(i)}
        return found & self._of_parameters(op)

    def _of_experts(self, block: OpGroup) -> list[Op]:
        of = {op.index: self._numbers(op) if is_map(op) else self._dealt(op) for op in block}
        numbered = {index: dims for index, dims in of.items() if dims}
        dims = set().union(*numbered.values())
        first, last = min(numbered, default=0), max(numbered, default=-1)
        run = (op for op in block if first <= op.index <= last)
        return [op for op in run if any(self.dims.ids(op, dim) for dim in dims)]


def _is_piece(op: Op) -> bool:
    """Whether an op only slices a piece out of a tensor; readers of the piece may cut the piece."""
    sizes = [prod(t.shape) for t in (*op.inputs, *op.outputs)]
    return op.flops == 0 and not op.parameters and len(sizes) == 2 and sizes[1] < sizes[0]
