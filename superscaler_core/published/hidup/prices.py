"""Prices of forms: by this engine's cost functions, or by the rules of HiDup's published code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

from superscaler_core.cost import CostModel
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.tensor import PTensor
from superscaler_core.materialize.sharding import shardings_of
from superscaler_core.plan import OpSplit
from superscaler_core.published.hidup.forms import FULL, REDUCE, REPLICATE, form_of, is_gather
from superscaler_core.published.hidup.recurrence import DuplexStage
from superscaler_core.space.groups import decides

Reader = tuple[Op, int]
"""An op, and the position of an input."""


class FormPrices(Protocol):
    """Prices of one half of a microbatch; the graph is captured with the size of a half."""

    @property
    def graph(self) -> Graph:
        """The model."""

    def computing(self, op: Op, split: OpSplit) -> DuplexStage:
        """The price of computing an op."""

    def moving(
        self, tensor: PTensor, from_split: OpSplit, to_split: OpSplit, reader: Reader
    ) -> DuplexStage:
        """The price of moving an activation from the op that writes it to one that reads it."""

    def weight(self, reader: Reader, split: OpSplit, storage: OpSplit | None) -> DuplexStage:
        """The price of a parameter: fetch, gradient, update; no pieces if ``storage`` is None."""


@dataclass(frozen=True, eq=False)
class OurPrices:
    """Prices by the cost functions; work that is done once per step is divided among the halves.

    Attributes:
        costs: the cost functions of the graph.
        num_halves: halves in a step.
    """

    costs: CostModel
    num_halves: int = 2

    @property
    def graph(self) -> Graph:
        """The model."""
        return self.costs.graph

    def computing(self, op: Op, split: OpSplit) -> DuplexStage:
        """By the roofline or measured; every half but the first adds up gradients of weights."""
        cost = self.costs.op_cost(op, split)
        added = cost.accumulate_secs * (1 - 1 / self.num_halves)
        return DuplexStage(0, cost.forward_secs, 0, cost.backward_secs + added)

    def moving(
        self, tensor: PTensor, from_split: OpSplit, to_split: OpSplit, reader: Reader
    ) -> DuplexStage:
        """By the rvdcomm plan of the move."""
        cost = self.costs.edge_cost(tensor, from_split, to_split, reader=reader)
        return DuplexStage(cost.forward_secs, 0, cost.backward_secs, 0)

    def weight(self, reader: Reader, split: OpSplit, storage: OpSplit | None) -> DuplexStage:
        """Without latencies, because the weights of a bucket share them."""
        op, position = reader
        cost = self.costs.sync_cost(op.inputs[position], split, storage=storage, reader=reader)
        fetch, reduce = (
            sum(call.bytes_secs for call in calls) for calls in (cost.fetch, cost.reduce)
        )
        once = DuplexStage(fetch, 0, reduce, cost.update_secs)
        return DuplexStage(*(secs / self.num_halves for secs in once))


# --- the published code ---------------------------------------------------------------------------

COMM_SECS = 1e-4
"""Latency of every communication, in seconds."""

FLOPS_PER_ELEMENT = {"softmax": 5, "log_softmax": 15, "cross_entropy": 15, "layer_norm": 10,
    "dropout": 20}  # fmt: skip
"""Flops of ops that are not products, per element of the result; ops that are not listed cost
nothing."""

FLOPS_PER_PRODUCT = 1.5
"""Flops of a product there over its flops here: 3 for a multiplication and an addition instead of
2, because the speed is measured over forward, backward and update."""

PUBLISHED_RATES: Mapping[str, float] = {
    "all_gather": 1.2246e9,
    "all_reduce": 6.117e8,
    "reduce_scatter": 1.1302e9,
    "all_to_all": 1.0701e10,
}
"""Bytes of a whole tensor per second, from the profile of the published code."""

CONJUGATE = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
"""The communication that moves the gradient; all others are their own conjugates."""


@dataclass(frozen=True, eq=False)
class PublishedPrices:
    """The cost model of the published code: flops over a speed, bytes of whole tensors over rates.

    Attributes:
        graph: the model.
        flops_per_sec: speed of a device, over forward, backward and update.
        bytes_per_sec: the rate of each communication.

    Source: profiler.rs, annotator.py and exp/config.py of the published code.
    """

    graph: Graph
    flops_per_sec: float = 4.139e12
    bytes_per_sec: Mapping[str, float] = field(default_factory=lambda: PUBLISHED_RATES)

    def computing(self, op: Op, split: OpSplit) -> DuplexStage:
        """The whole op's time, divided among devices if it is cut; a backward takes twice that."""
        per_element = FLOPS_PER_ELEMENT.get(op.kind, 0)
        flops = float(per_element * prod(op.outputs[0].shape))
        if decides(op) or op.kind == "attention":
            flops = FLOPS_PER_PRODUCT * op.flops * prod(op.sizes.values())
        cut = any(part.pieces for part in split.parts)
        secs = flops / self.flops_per_sec / (len(split.devices) if cut else 1)
        return DuplexStage(0, secs, 0, 2 * secs)

    def moving(
        self, tensor: PTensor, from_split: OpSplit, to_split: OpSplit, reader: Reader
    ) -> DuplexStage:
        """One communication of the whole tensor; the two forms say which."""
        writer, (op, position) = self.graph.producer[tensor], reader
        src = shardings_of(writer.form, from_split).outputs[writer.outputs.index(tensor)]
        dst = shardings_of(op.form, to_split).inputs[position]
        before = form_of(src, tensor.shape, is_read=False)
        return self._reform(tensor, before, form_of(dst, tensor.shape, is_read=True))

    def weight(self, reader: Reader, split: OpSplit, storage: OpSplit | None) -> DuplexStage:
        """``Full`` (or ``Gather`` if stored in pieces) to ``Replicate``; other forms are free."""
        op, position = reader
        tensor = op.inputs[position]
        form = form_of(shardings_of(op.form, split).inputs[position], tensor.shape, is_read=True)
        if form != REPLICATE:
            return DuplexStage()
        return self._reform(tensor, FULL if storage is None else "Gather", REPLICATE)

    def _reform(self, tensor: PTensor, before: str, after: str) -> DuplexStage:
        if is_gather(before):
            forward = "all_to_all" if is_gather(after) else "all_gather"
        elif before == REDUCE:
            forward = "reduce_scatter" if is_gather(after) else "all_reduce"
        else:
            # Slices are free. The gradient of what is read as ``Replicate`` has to be summed.
            backward = "all_reduce" if after == REPLICATE else ""
            return DuplexStage(0, 0, self._secs(tensor, backward), 0)
        backward = CONJUGATE.get(forward, forward)
        return DuplexStage(self._secs(tensor, forward), 0, self._secs(tensor, backward), 0)

    def _secs(self, tensor: PTensor, communication: str) -> float:
        if not communication:
            return 0.0
        return 4 * prod(tensor.shape) / self.bytes_per_sec[communication] + COMM_SECS
