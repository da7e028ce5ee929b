"""Token slices: a graph in which every op works on a slice of its sequences at a time.

In a causal model, attention of a slice reads the keys and values of all slices up to it, and every
other op reads its own slice. A sum over the sequence, such as the loss, is the sum over slices.

Source: Li et al., TeraPipe: Token-Level Pipeline Parallelism for Training Large-Scale Language
Models, ICML 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from superscaler_core.errors import PlanError
from superscaler_core.graph.annotation import Annotation, Operand
from superscaler_core.graph.graph import Graph, Op, TokenSlices
from superscaler_core.graph.sliding import SlidingWindow
from superscaler_core.graph.tensor import ACTIVATION, CONSTANT, INPUT, PTensor

LoopOf = Callable[[Op], Sequence[str]]
"""The loops of an op over tokens that can be cut."""


def token_slices(
    graph: Graph, loops_of: LoopOf, ends: Sequence[int], stages: Sequence[Sequence[Op]]
) -> tuple[Graph, tuple[int, ...]]:
    """Cut the sequence of a graph into slices.

    Law (tests/superscaler_core/graph/test_token_slices.py): the slices compute the same loss.

    Args:
        graph: the graph of a causal model.
        loops_of: the loops of an op over tokens that can be cut.
        ends: the index after the last token of each slice, ascending; the last index is the length
            of the sequence.
        stages: the ops of the graph in order, grouped into stages.

    Returns:
        The graph, whose ops are sorted by stage and then by slice; and for each stage and slice,
        in this order, the index of its first op.

    Raises:
        PlanError: a token depends on later tokens, an op's result depends on the position of its
            slice, or the slices do not add up to the length of the sequences.
    """
    lengths = tuple(hi - lo for lo, hi in pairwise((0, *ends)))
    found = sequence_lengths(graph)
    if len(found) != 1 or min(lengths, default=0) < 1 or sum(lengths) not in found:
        raise PlanError(
            f"slices of {list(lengths)} tokens: {graph.name} has sequences of "
            f"{sorted(found)} tokens; slices have at least one each, and add up to the length that "
            "all inputs share."
        )
    if any((graph.results, graph.recycled, graph.state)):
        raise PlanError(
            f"{graph.name} returns results, recycles values or changes buffers: only a model that "
            "returns its loss alone is cut into token slices."
        )
    cutter = _Cutter(graph, loops_of, tuple(pairwise((0, *ends))))
    firsts: list[int] = []
    ops: list[Op] = []
    for stage in stages:
        made: list[list[Op]] = [[] for _ in ends]
        for op in stage:
            cutter.cut(op, made)
        for slice_ in made:
            firsts.append(len(ops))
            ops += slice_
    ops = [replace(op, index=index) for index, op in enumerate(ops)]
    slices = TokenSlices(lengths, tuple(stage[0].name for stage in stages[1:]))
    cut = replace(graph, ops=tuple(ops), loss=cutter.whole(graph.loss), slices=slices)
    return cut, tuple(firsts)


def sequence_lengths(graph: Graph) -> frozenset[int]:
    """The lengths of the sequences among the inputs."""
    return frozenset(t.shape[1] for t in graph.inputs if len(t.shape) > 1)


class _Cutter:
    """Cuts ops one after another, and knows the tensors that replace their results.

    ``bounds`` has for each slice its first token and the token after its last.
    """

    def __init__(self, graph: Graph, loops_of: LoopOf, bounds: tuple[tuple[int, int], ...]) -> None:
        self._graph, self._loops_of, self._bounds = graph, loops_of, bounds
        self._slices: dict[PTensor, list[PTensor]] = {}
        """For an activation that has a dim of tokens, its slices."""
        self._until: dict[PTensor, list[PTensor]] = {}
        """For keys or values, the tensor of all tokens up to the end of each slice."""
        self._sums: dict[PTensor, PTensor] = {}
        """For a result that is summed over tokens, the sum over the slices."""

    def whole(self, tensor: PTensor) -> PTensor:
        """The tensor that replaces a tensor without tokens; itself if nothing does."""
        return self._sums.get(tensor, tensor)

    def cut(self, op: Op, made: Sequence[list[Op]]) -> None:
        """Append the slices of an op to the ops of each slice."""
        loops = self._loops_of(op)
        reads_batch = all(tensor.kind in (INPUT, CONSTANT) for tensor in op.inputs)
        if not loops or (reads_batch and loops[0] in op.annotation.reductions):
            self._keep(op, made)
            return
        loop = loops[0]
        self._check(op, loops)
        results = list(zip(op.outputs, op.annotation.outputs, strict=True))
        slices: dict[PTensor, list[PTensor]] = {tensor: [] for tensor in op.outputs}
        for i, (lo, hi) in enumerate(self._bounds):
            positions = range(len(op.inputs))
            inputs = [self._read(op, position, loop, i, made[i]) for position in positions]
            outputs = [_named(tensor, i, dims, loop, hi - lo) for tensor, dims in results]
            for tensor, output in zip(op.outputs, outputs, strict=True):
                slices[tensor].append(output)
            made[i].append(self._slice(op, loop, i, inputs, outputs))
        for tensor, dims in results:
            if loop in _ids(dims):
                self._slices[tensor] = slices[tensor]
            else:
                self._sums[tensor] = self._add_up(op, slices[tensor], made)

    def _keep(self, op: Op, made: Sequence[list[Op]]) -> None:
        """Put an op without tokens, unchanged, into the first slice."""
        late = [t for t in op.inputs if t in self._slices or t in self._sums]
        if late:
            raise PlanError(
                f"{self._graph.name}: {op.name} reads {late[0]} of all tokens at once, so it "
                "cannot be cut into token slices; only causal models can."
            )
        made[0].append(op)

    def _check(self, op: Op, loops: Sequence[str]) -> None:
        if len(loops) > 1:
            raise PlanError(
                f"{self._graph.name}: {op.name}, {op.annotation}, relates tokens with tokens, and "
                "is no scaled_dot_product_attention(..., is_causal=True), so it cannot be cut into "
                "token slices."
            )
        if any(word in op.code for word in ("{in", "{pad", "{seed}")):
            raise PlanError(
                f"{self._graph.name}: {op.name}, {op.annotation}, depends on the place of its "
                "tokens, as dropout does, and cannot be cut into token slices."
            )

    def _read(self, op: Op, position: int, loop: str, i: int, made: list[Op]) -> PTensor:
        """The input of slice i of an op; ops that make the input are appended to ``made``."""
        tensor, dims = op.inputs[position], op.annotation.inputs[position]
        if loop in _ids(dims):
            slices = self._slices.get(tensor)
            return slices[i] if slices else self._narrowed(tensor, dims, loop, i, made)
        if tensor not in self._slices:
            return self.whole(tensor)
        if op.kind != "attention" or "is_causal=True" not in op.code:
            raise PlanError(
                f"{self._graph.name}: {op.name} reads {tensor} of all tokens, and is no causal "
                "attention, so it cannot be cut into token slices."
            )
        return self._joined(op, tensor, i, made)

    def _joined(self, op: Op, tensor: PTensor, i: int, made: list[Op]) -> PTensor:
        """Keys or values up to the end of slice i: those of earlier slices, and its own."""
        until = self._until.setdefault(tensor, [])
        if len(until) > i:
            return until[i]
        own = self._slices[tensor][i]
        if not until:
            until.append(own)
            return own
        pairs = enumerate(zip(own.shape, tensor.shape, strict=True))
        dim = next(d for d, (a, b) in pairs if a != b)
        shape = (*own.shape[:dim], self._bounds[i][1], *own.shape[dim + 1 :])
        joined = replace(tensor, name=f"{tensor.name}.until{i}", shape=shape)
        sides = [_dims(len(shape), dim, which) for which in ("c", "o", "u")]
        name, text = f"{op.name}.{tensor.name}.until{i}", f"{sides[0]}, {sides[1]} -> {sides[2]}"
        code = f"torch.cat([{{x0}}, {{x1}}], {dim})"
        made.append(_op(name, "cat", op.module, text, (until[-1], own), joined, code))
        until.append(joined)
        return joined

    def _narrowed(
        self, tensor: PTensor, dims: Operand, loop: str, i: int, made: list[Op]
    ) -> PTensor:
        """Slice i of an input, a parameter or a constant."""
        lo, hi = self._bounds[i]
        dim = next(d for d, ids in enumerate(dims) if loop in _ids((ids,)))
        shape = (*tensor.shape[:dim], hi - lo, *tensor.shape[dim + 1 :])
        name = f"{tensor.name}.slice{i}.{len(made)}"
        text = f"{_dims(len(shape), dim, 'c')} -> {_dims(len(shape), dim, 'o')}"
        piece = PTensor(name, shape, tensor.dtype, ACTIVATION, tensor.requires_grad)
        code = f"{{x0}}.narrow({dim}, {lo}, {hi - lo})"
        made.append(_op(f"{name}:narrow", "narrow", "", text, (tensor,), piece, code))
        return piece

    def _slice(
        self, op: Op, loop: str, i: int, inputs: Sequence[PTensor], outputs: Sequence[PTensor]
    ) -> Op:
        lo, hi = self._bounds[i]
        start = f"{{start[{loop}]}}"
        sizes = op.annotation.sizes([t.shape for t in inputs], [t.shape for t in outputs])
        # Of the keys up to its end, a slice sees a share of (lo + hi) / (2 hi) on average. The
        # flops of a causal attention already have a factor of 1 / 2.
        is_causal = any(t in self._until for t in op.inputs)
        return replace(
            op,
            name=f"{op.name}.slice{i}",
            sizes={**op.sizes, **sizes},
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            computes=op.computes.replace(start, f"{lo} + {start}"),
            flops=op.flops * (lo + hi) / hi if is_causal else op.flops,
        )

    def _add_up(self, op: Op, slices: Sequence[PTensor], made: Sequence[list[Op]]) -> PTensor:
        total = slices[0]
        dims = " ".join(f"d{i}" for i in range(len(total.shape))) or "()"
        for i, one in enumerate(slices[1:], 1):
            name = f"{op.name}.sum{i}"
            result = replace(one, name=name.replace(":", "."))
            text = f"{dims}, {dims} -> {dims}"
            made[i].append(_op(name, "add", op.module, text, (total, one), result, "{x0} + {x1}"))
            total = result
        return total


def _op(
    name: str,
    kind: str,
    module: str,
    annotation: str,
    inputs: tuple[PTensor, ...],
    output: PTensor,
    code: str,
) -> Op:
    """An op that the model does not have; the caller sets its index later."""
    made = Annotation.parse(annotation)
    sizes = made.sizes([t.shape for t in inputs], [output.shape])
    return Op(0, name, kind, module, made, sizes, inputs, (output,), code, (), 0.0)


def _ids(dims: Operand) -> set[str]:
    """The loops of an operand's dims."""
    return {i for dim in dims for i in ((dim.loop,) if isinstance(dim, SlidingWindow) else dim)}


def _dims(rank: int, dim: int, name: str) -> str:
    """The text of an operand's dims, of which dim ``dim`` has this name and is fixed."""
    return " ".join(f"{name}^" if i == dim else f"d{i}" for i in range(rank))


def _named(tensor: PTensor, i: int, dims: Operand, loop: str, size: int) -> PTensor:
    """Slice i of a result."""
    lengths = zip(dims, tensor.shape, strict=True)
    shape = tuple(size if loop in _ids((ids,)) else length for ids, length in lengths)
    return replace(tensor, name=f"{tensor.name}.slice{i}", shape=shape)
