"""Sample flow: from the inputs to the loss, how every tensor of a microbatch depends on samples.

Annotations say which dims belong together; where they say nothing, ``probe`` runs the op. A number
that Python computed from the size of the batch, such as the divisor of ``x.sum() / len(x)``, is
found by comparing two graphs, of one and of two microbatches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import log2

from torch import Tensor

from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.tensor import INPUT, PARAMETER, PTensor
from superscaler_core.parallel.backward_probe import backward_fault
from superscaler_core.parallel.extent import (
    SAME,
    UNKNOWN,
    BatchExtent,
    Kind,
    Place,
    mixed,
    place_in_dim,
    place_in_loop,
)
from superscaler_core.parallel.probe import probed
from superscaler_core.parallel.twins import twins_of

Reader = tuple[str, int]
"""The name of an op, and the position of an input."""

_PRODUCTS = {"mul", "linear", "matmul", "mm", "bmm", "einsum", "dot", "mv", "addmm", "baddbmm"}
"""Ops that are linear in each input by itself."""

_SUMS = {"add", "sub", "rsub", "neg", "to", "sum", "mean", "where"}
"""Ops that are linear in all inputs together, besides those that only move elements."""

_WITH_NUMBER = {"add", "sub", "rsub", "where"}
"""Ops of two summands, of which one is a number in their code if they have one input."""

_AVERAGES = {"mean_of_labels"}
"""Ops that divide the sum of their first input by the second one."""

_ROUTERS = {"topk", "one_hot", "argmax", "sort", "top_gating"}
"""Ops by which tokens choose experts."""

_NORMS = {"batch_norm", "instance_norm"}
"""Ops that read running statistics, which a forward replaces, only to replace them."""

_INEXACT = ("float", "bfloat", "complex")
"""Beginnings of the names of dtypes of fractions."""

_NUMBER = re.compile(r"(?<![\w.{])\d+\.?\d*(?:e[-+]?\d+)?(?![\w}])")


@dataclass
class SampleFlow:
    """What was found about a graph.

    Attributes:
        loss: the extent of the loss.
        results: those of the results beside it, by name.
        known: tensors whose value for the whole batch is found before the step, with their extents.
        shares: readers that divide a sum by one of these, and so read 1/n of its value.
        scaled: readers whose input, a sum, is multiplied by n to add it to means.
        notes: what is computed for each microbatch by itself, though it depends on many samples.
    """

    loss: BatchExtent = SAME
    results: dict[str, BatchExtent] = field(default_factory=dict)
    known: dict[str, BatchExtent] = field(default_factory=dict)
    shares: set[Reader] = field(default_factory=set)
    scaled: set[Reader] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def flow_of(
    narrow: Graph,
    wide: Graph,
    num: int,
    note_of: Callable[[Op], str],
    has_experts: Callable[[str], bool],
) -> SampleFlow:
    """Follow the samples through a graph.

    Args:
        narrow, wide, num: the graph of a microbatch, and that of two, of ``num`` samples.
        note_of: a note, if an op may compute something for each microbatch by itself that depends
            on several samples; "" if it may not.
        has_experts: whether a module, by its path, has experts among which its tokens choose.
    """
    known: dict[str, BatchExtent] = {}
    while True:
        flow = SampleFlow(known=dict(known))
        _Pass(narrow, wide, num, note_of, has_experts, flow).run()
        if flow.known.keys() == known.keys():
            return flow
        known = flow.known


@dataclass
class _Pass:
    """One pass over all ops; ``flow`` has at first what is known before the step."""

    narrow: Graph
    wide: Graph
    num: int
    note_of: Callable[[Op], str]
    has_experts: Callable[[str], bool]
    flow: SampleFlow
    extents: dict[PTensor, BatchExtent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.twins = twins_of(self.narrow, self.wide, self.num)
        self.names = {  # in the graph of a microbatch
            tensor: twin.name
            for op, other in self.twins.items() if other is not None
            for tensor, twin in zip(op.outputs, other.outputs, strict=False)
        }  # fmt: skip

    def run(self) -> None:
        for op in self.wide.ops:
            inputs = [self._given(t) for t in op.inputs]
            if op.kind in _NORMS:
                # What they keep of a batch is for evaluation.
                pairs = zip(op.inputs, inputs, strict=True)
                inputs = [UNKNOWN if t in self.wide.state else x for t, x in pairs]
            found = self._outputs(op, inputs)
            routed = frozenset[str]().union(*(x.routed for x in inputs))
            given = frozenset[str]().union(*(x.given for x in inputs if not x.is_mixed))
            is_known = all(x.is_known for x in inputs) and "{seed}" not in op.code
            if op.kind in _ROUTERS and not is_known:
                routed |= {op.module}
            for tensor, extent in zip(op.outputs, found, strict=True):
                is_new = not (extent.is_mixed and extent.given)
                made = replace(
                    extent,
                    is_known=is_known and not extent.is_mixed,
                    given=given if is_new else extent.given,
                    routed=routed,
                )
                if (name := self.names.get(tensor)) in self.flow.known:
                    self.flow.known[name] = made
                    made = replace(SAME, is_whole=True, routed=routed)
                self.extents[tensor] = made
        self.flow.loss = self.extents[self.wide.loss]
        self.flow.results = {name: self.extents[t] for name, t in self.wide.results.items()}

    # --- inputs ---------------------------------------------------------------------------------

    def _given(self, tensor: PTensor) -> BatchExtent:
        """The extent of an input of an op."""
        if tensor not in self.extents:
            self.extents[tensor] = self._leaf(tensor)
        return self.extents[tensor]

    def _leaf(self, tensor: PTensor) -> BatchExtent:
        if tensor.kind == INPUT and tensor not in self.wide.recycled:
            dim = self.wide.samples_dim(tensor)
            given = frozenset({tensor.name})
            return SAME if dim is None else BatchExtent(Kind.ROWS, dim=dim, given=given)
        if tensor in self.wide.state:
            return mixed(f"{tensor.name} is changed by the forward, so by every microbatch")
        if tensor.kind in (PARAMETER, INPUT):
            return UNKNOWN
        # A constant: the number of samples may be in its value.
        narrow, wide = (graph.constants.get(tensor.name) for graph in (self.narrow, self.wide))
        if narrow is None or wide is None or narrow.is_meta or wide.is_meta:
            return SAME
        degree = _degree_of_tensors(narrow, wide)
        if degree is None:
            return mixed(f"{tensor.name} has other values for another number of samples")
        return replace(SAME, degree=degree)

    # --- ops ------------------------------------------------------------------------------------

    def _outputs(self, op: Op, inputs: Sequence[BatchExtent]) -> list[BatchExtent]:
        """The extents of an op's results."""
        fault = next((x for x in inputs if x.is_mixed), None)
        if fault is not None:
            return [fault] * len(op.outputs)
        if op not in self.twins:
            why = f"other numbers of samples are computed by other ops, without {op.name}"
            return [mixed(why)] * len(op.outputs)
        if op.kind == "batch_norm" and len(op.outputs) > 1:
            self._add_note(self.note_of(op))
        has_rows = any(x.is_rows for x in inputs)
        made = self._of_rows(op, inputs) if has_rows else self._of_totals(op, list(inputs))
        found = [made] * len(op.outputs) if isinstance(made, BatchExtent) else made
        is_mixed = self.twins[op] is not None and any(x.is_mixed for x in found)
        if is_mixed and (note := self._note(op, inputs)):
            self._add_note(note)
            found = self._apart(op, inputs)
        return found

    def _add_note(self, note: str) -> None:
        self.flow.notes += [note] if note and note not in self.flow.notes else []

    def _note(self, op: Op, inputs: Sequence[BatchExtent]) -> str:
        """A note, if the op may compute each microbatch by itself."""
        above = {module.rpartition(".")[0] for x in inputs for module in x.routed}
        inside = (m for m in above if not m or f"{op.module}.".startswith(f"{m}."))
        if any(map(self.has_experts, inside)):
            where = op.module or "the model itself"
            return f"experts in {where}: capacity and balancing loss are those of each microbatch"
        return self.note_of(op)

    def _apart(self, op: Op, inputs: Sequence[BatchExtent]) -> list[BatchExtent]:
        """The extents of results that are computed for each microbatch by itself.

        Statistics of a microbatch count as the same for all samples, and a result that grows with
        the number of samples has them along the dim that grows.
        """
        twin = self.twins[op]
        assert twin is not None, "it computes something"
        inner = next((x.place.inner for x in inputs if x.is_rows), 1)
        found = []
        for tensor, narrow in zip(op.outputs, twin.outputs, strict=True):
            pairs = enumerate(zip(tensor.shape, narrow.shape, strict=False))
            dim = next((i for i, (size, half) in pairs if size != half), None)
            if dim is None:
                found.append(UNKNOWN)
                continue
            size = tensor.shape[dim]
            inner = inner if size % (inner * self.num) == 0 else 1
            place = Place(max(1, size // (inner * self.num)), inner)
            found.append(BatchExtent(Kind.ROWS, dim=dim, place=place))
        return found

    def _shift(self, op: Op, is_summed: bool) -> int | None:
        """The power of the number of samples by which the op's code scales; None if it does not.

        If the op sums over samples, a number that grows is a divisor.
        """
        twin = self.twins[op]
        if twin is None or twin.code == op.code:
            return 0
        codes = twin.code, op.code
        texts = {_NUMBER.sub("#", code) for code in codes}
        numbers = [[*map(float, _NUMBER.findall(code))] for code in codes]
        degree = _degree_of(zip(*numbers, strict=True)) if len(texts) == 1 else None
        if degree is not None and op.kind == "mul":
            return degree
        if degree is not None and op.kind == "div" and op.code.startswith("{x0}"):
            return -degree
        if is_summed and degree == 1:
            return -1
        # Numbers in these are sizes of tensors.
        return 0 if op.flops == 0 or "shape=" in op.code or op.hint else None

    def _of_rows(self, op: Op, inputs: Sequence[BatchExtent]) -> BatchExtent | list[BatchExtent]:
        """The results of an op that reads samples; one extent if all have it."""
        found = self._places(op, inputs)
        if isinstance(found, BatchExtent):
            return found
        if op.kind in _AVERAGES:
            return self._average(op, inputs)
        for position, extent in enumerate(inputs):
            if extent.is_total and not self._learns(op, position, extent):
                name = op.inputs[position].name
                return mixed(
                    f"{op.name} computes single samples with {name}, a sum over all samples"
                )
        is_summed = found is not None and any(
            not place_in_dim(operand, *found, op.sizes) for operand in op.annotation.outputs
        )
        shift = self._shift(op, is_summed)
        degree = self._degree(op, [0 if x.is_total else x.degree for x in inputs])
        if shift is None or degree is None or (found is None and (shift or degree)):
            return mixed(f"{op.name} computes with the number of samples")
        if found is None:
            return self._probed(op, inputs)
        return [
            BatchExtent(Kind.ROWS, degree + shift, *dims[0]) if dims
            else BatchExtent(Kind.TOTAL, degree + shift)
            for operand in op.annotation.outputs
            for dims in [place_in_dim(operand, *found, op.sizes)]
        ]  # fmt: skip

    def _probed(self, op: Op, inputs: Sequence[BatchExtent]) -> list[BatchExtent]:
        """The results of an op whose annotation has no loop of samples."""
        values, twin = self.wide.constants, self.twins[op]
        found = probed(op, inputs, self.num, values)
        # Ops with rules go back as they go forward.
        if op.hint and twin is not None and not any(x.is_mixed for x in found):
            fault = backward_fault(op, twin, inputs, found, self.num, values)
            found = [mixed(fault)] * len(found) if fault else found
        return found

    def _places(
        self, op: Op, inputs: Sequence[BatchExtent]
    ) -> tuple[str, Place] | BatchExtent | None:
        """The loop of the samples; None if the annotation has none; or Mixed if it has two."""
        places: dict[str, Place] = {}
        for operand, extent in zip(op.annotation.inputs, inputs, strict=True):
            if not extent.is_rows:
                continue
            found = place_in_loop(operand, extent, op.sizes, self.num)
            if found is None or found[0] in op.annotation.fixed:
                return None
            loop, place = found
            if places.setdefault(loop, place) != place or len(places) > 1:
                return mixed(f"{op.name} computes with pairs of samples")
        return next(iter(places.items()))

    def _degree(self, op: Op, degrees: Sequence[int]) -> int | None:
        """The degree of an op's result, before the shift; None if it has none."""
        if op.kind in _PRODUCTS:
            return sum(degrees)
        if op.kind == "div":
            return degrees[0] - sum(degrees[1:])
        if not any(degrees) or (_is_sum(op) and len({*degrees}) == 1):
            return degrees[0] if degrees else 0
        return None

    def _average(self, op: Op, inputs: Sequence[BatchExtent]) -> BatchExtent:
        """The result of an op that divides a sum over samples by another one."""
        if not (inputs[1].is_total or inputs[1].is_whole):
            return BatchExtent(Kind.TOTAL, inputs[0].degree - inputs[1].degree)
        divides = inputs[0].degree == 0
        if not self._learns(op, 1, inputs[1], divides=divides):
            return mixed(f"{op.name} divides by {op.inputs[1].name}, which parameters change")
        return BatchExtent(Kind.TOTAL, inputs[0].degree - int(divides))

    def _of_totals(self, op: Op, inputs: list[BatchExtent]) -> BatchExtent:
        """The result of an op that reads sums over samples, and what is the same for all."""
        if op.kind == "div" and len(inputs) == 2 and (inputs[1].is_total or inputs[1].is_whole):
            # A sum that is divided by 1/n of another one is a mean.
            divides = inputs[0].is_total and inputs[0].degree == 0
            if not self._learns(op, 1, inputs[1], divides=divides):
                return mixed(f"{op.name} divides by {op.inputs[1].name}, which parameters change")
            inputs[1] = replace(SAME, degree=int(divides))
        is_product, is_sum = op.kind in _PRODUCTS or op.kind == "div", _is_sum(op)
        totals = [i for i, x in enumerate(inputs) if x.is_total]
        if (is_product and len(totals) > 1) or (totals and not is_product and not is_sum):
            for position in list(totals):
                if self._learns(op, position, inputs[position]):
                    inputs[position] = SAME
                    totals.remove(position)
            if len(totals) > int(is_product):
                names = " and ".join(op.inputs[i].name for i in totals)
                return mixed(f"{op.name} is not linear in {names}: sums over all samples")
        shift = self._shift(op, False)
        if shift is not None and totals and is_sum:
            return self._sum(op, inputs, shift)
        degree = self._degree(op, [x.degree for x in inputs])
        if degree is None or shift is None:
            return mixed(f"{op.name} computes with the number of samples")
        return BatchExtent(Kind.TOTAL if totals else Kind.SAME, degree + shift)

    def _sum(self, op: Op, inputs: Sequence[BatchExtent], shift: int) -> BatchExtent:
        """A sum of sums, of means, and of what is the same for all; as a mean, if they differ.

        What is the same for all microbatches is the mean of itself.
        """
        degrees = {x.degree if x.is_total else x.degree - 1 for x in inputs}
        if len(inputs) == 1 and op.kind in _WITH_NUMBER:
            degrees.add(-1)
        if len(degrees) == 1:
            return BatchExtent(Kind.TOTAL, degrees.pop() + shift)
        if not degrees <= {0, -1} or any(x.kind is Kind.SAME and x.degree for x in inputs):
            return mixed(f"{op.name} adds values that grow differently with the number of samples")
        sums = (i for i, x in enumerate(inputs) if x.is_total and x.degree == 0)
        self.flow.scaled |= {(self._name(op), i) for i in sums}
        return BatchExtent(Kind.TOTAL, -1 + shift)

    def _learns(self, op: Op, position: int, extent: BatchExtent, *, divides: bool = False) -> bool:
        """Find the whole value of an input before the step; whether that is possible."""
        tensor = op.inputs[position]
        if not extent.is_whole and (not extent.is_known or tensor.requires_grad):
            return False
        if tensor not in self.names:
            return False
        self.flow.known.setdefault(self.names[tensor], extent)
        if divides:
            self.flow.shares.add((self._name(op), position))
        return True

    def _name(self, op: Op) -> str:
        """The name of an op in the graph of a microbatch."""
        twin = self.twins[op]
        return op.name if twin is None else twin.name


def _is_sum(op: Op) -> bool:
    """Whether an op is linear in all its inputs together."""
    dst = op.outputs[0].dtype
    if op.kind == "to" and not dst.startswith(_INEXACT):
        return dst != "bool" and not op.inputs[0].dtype.startswith(_INEXACT)
    return op.kind in _SUMS or (op.flops == 0 and not op.hint)


def _degree_of(pairs: Iterable[tuple[float, float]]) -> int | None:
    """The power of two by which numbers grow, if all that grow do so alike; else None."""
    ratios = {large / small if small else -1.0 for small, large in pairs if small != large}
    if not ratios:
        return 0
    ratio = ratios.pop()
    degree = log2(ratio) if ratio > 0 else 0.5
    return int(degree) if not ratios and degree == int(degree) else None


def _degree_of_tensors(narrow: Tensor, wide: Tensor) -> int | None:
    """``_degree_of`` of a constant; 0 if it is as long as the samples and equal for all of them."""
    if narrow.dim() != wide.dim():
        return None
    for dim, (small, large) in enumerate(zip(narrow.shape, wide.shape, strict=True)):
        if small != large:
            first = wide.narrow(dim, 0, 1)
            if not bool((wide == first).all()) or not small:
                return None
            narrow, wide = narrow.narrow(dim, 0, 1), first
    if narrow.equal(wide):
        return 0
    if narrow.is_complex():
        return None
    pairs = zip(narrow.double().flatten().tolist(), wide.double().flatten().tolist(), strict=True)
    return _degree_of(pairs)
