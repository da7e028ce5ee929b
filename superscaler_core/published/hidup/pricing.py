"""Pricing: the problem of forms of a captured model, and the plan of a strategy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from superscaler_core.errors import PlanError
from superscaler_core.graph.blocks import Blocks, find_blocks
from superscaler_core.graph.graph import Op
from superscaler_core.graph.tensor import ACTIVATION, PARAMETER, PTensor
from superscaler_core.materialize.sharding import shardings_of
from superscaler_core.plan import Device, OpSplit, Overlap, Plan
from superscaler_core.published.hidup.forms import REPLICATE, form_of
from superscaler_core.published.hidup.prices import FormPrices, Reader
from superscaler_core.published.hidup.problem import (
    Form,
    FormCall,
    FormProblem,
    FormStrategy,
    Signature,
)
from superscaler_core.published.hidup.recurrence import DuplexStage
from superscaler_core.space.choices import Choice, choices_of
from superscaler_core.space.groups import OpGroup, groups_of, likeness


@dataclass(frozen=True, slots=True)
class _Way:
    """A signature with the decisions that it stands for.

    Attributes:
        signature: forms and costs of the group.
        choice: the splits of its ops.
        stored: for weights in pieces the splits of their updates, by the place of the op in the
            group and the number of its input.
    """

    signature: Signature
    choice: Choice
    stored: Mapping[tuple[int, int], OpSplit]


@dataclass(frozen=True, eq=False)
class PricedForms:
    """The calls of a model: groups of ops that are cut together, with HiDup's signatures.

    A signature cuts all loops of one class in the group, or none (everything is ``Full``). A batch
    is read in any form for free. A weight that all devices read whole, while each computes a part
    of its gradient, is ``Replicate``; it may be stored as ``Gather``. Communication inside a group,
    such as that of a loss, counts as communication of its stage.

    Attributes:
        prices: prices of the graph, which is captured with half of the batch.
        devices: equal devices in one group.
        stores_pieces: whether weights may be stored as ``Gather``.
    """

    prices: FormPrices
    devices: tuple[Device, ...]
    stores_pieces: bool = True

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks of the model."""
        return find_blocks(self.prices.graph)

    @cached_property
    def groups(self) -> tuple[OpGroup, ...]:
        """All groups, in the order of the data flow; single ops if there is no such order."""
        found = [g for run in self.blocks.groups for g in groups_of(self.prices.graph, run)]
        ordered = _ordered(found, self.prices.graph.producer)
        return ordered or tuple((op,) for op in self.prices.graph.ops)

    # --- the problem ----------------------------------------------------------------------------

    @cached_property
    def problem(self) -> FormProblem:
        """The problem that ``hidup`` solves."""
        calls = tuple(
            FormCall(
                group[0].name,
                tuple(self._numbers[op.inputs[i]] for op, i in self._reads(group)),
                tuple(self._numbers[tensor] for tensor in self._writes(group)),
                tuple(way.signature for way in ways),
            )
            for group, ways in zip(self.groups, self._ways, strict=True)
        )
        return FormProblem(calls, self._reforms)

    def fill(self, plan: Plan, strategy: FormStrategy) -> None:
        """Set the splits, the storage of weights and the overlap of a plan.

        Raises:
            PlanError: the plan is of another graph.
        """
        if plan.graph is not self.prices.graph:
            raise PlanError(f"forms of {self.prices.graph.name}: the plan is of another graph.")
        stored: dict[str, OpSplit] = {}
        for group, ways, number in zip(self.groups, self._ways, strategy.signatures, strict=True):
            for op, split in zip(group, ways[number].choice.splits, strict=True):
                plan.split_as(op, split)
            for (place, i), split in ways[number].stored.items():
                stored[group[place].inputs[i].name] = split
        for name, split in stored.items():
            plan.split_as(plan.update(name), split)
        plan.overlap = Overlap(prefetch=int(bool(stored)), reductions=True, duplex=True)

    def text(self, strategy: FormStrategy) -> str:
        """A strategy, stage by stage: what is communicated, and how every call is run."""
        names = {number: tensor.name for tensor, number in self._numbers.items()}
        lines, calls = [], iter(self.problem.calls)
        for number, stage in enumerate(strategy.stages):
            moves = (f"{names[t]} {before} -> {after}" for t, before, after in stage.reforms)
            lines.append(f"stage {number}: {', '.join(moves) or 'no activation moves'}")
            for which in stage.signatures:
                call = next(calls)
                lines.append(f"  {call.name}: {call.signatures[which].name}")
        return "\n".join(lines)

    # --- calls ----------------------------------------------------------------------------------

    @cached_property
    def _numbers(self) -> Mapping[PTensor, int]:
        """Activations by number."""
        tensors = (t for op in self.prices.graph.ops for t in op.outputs)
        return {tensor: number for number, tensor in enumerate(tensors)}

    def _reads(self, group: OpGroup) -> list[Reader]:
        """Where a group reads activations of other groups."""
        return [
            (op, i)
            for op in group
            for i, tensor in enumerate(op.inputs)
            if tensor.kind == ACTIVATION and self.prices.graph.producer[tensor] not in group
        ]

    def _writes(self, group: OpGroup) -> list[PTensor]:
        """The activations of a group that other groups read."""
        readers = self.prices.graph.readers
        return [
            tensor
            for op in group
            for tensor in op.outputs
            if any(reader not in group for reader, _ in readers.get(tensor, ()))
        ]

    @cached_property
    def _ways(self) -> tuple[tuple[_Way, ...], ...]:
        """The signatures of every group; groups that are alike are priced once."""
        dims, readers = self.blocks.dims, self.prices.graph.readers
        known: dict[object, tuple[_Way, ...]] = {}
        found = []
        for group in self.groups:
            shared = tuple(len(readers[op.inputs[i]]) for op, i in _weights(group))
            key = likeness(dims, group), shared
            if key not in known:
                ways: list[_Way] = []
                for choice in choices_of(dims, group, self.devices, (len(self.devices),)):
                    # Partial sums of overlapping parts give no value: such a choice is skipped.
                    with suppress(PlanError):
                        ways += self._of_choice(group, choice)
                known[key] = tuple(ways)
            found.append(known[key])
        return tuple(found)

    def _of_choice(self, group: OpGroup, choice: Choice) -> list[_Way]:
        """A choice with weights where they are read and, if possible, with weights in pieces."""
        splits = dict(zip(group, choice.splits, strict=True))
        reads = tuple(self._form_read(op, i, splits[op]) for op, i in self._reads(group))
        writes = tuple(
            self._form_written(tensor, splits[self.prices.graph.producer[tensor]])
            for tensor in self._writes(group)
        )
        work = DuplexStage()
        for op, split in splits.items():
            work = work.plus(self.prices.computing(op, split)).plus(self._inside(op, splits))
        pieces = self._pieces(splits) if self.stores_pieces else {}
        found = []
        for stored in ({}, pieces) if pieces else ({},):
            weights = DuplexStage()
            for op, i in _weights(group):
                storage = stored.get((group.index(op), i))
                weights = weights.plus(self.prices.weight((op, i), splits[op], storage))
            name = choice.name + ", weights in pieces" * bool(stored)
            signature = Signature(reads, writes, work.plus(weights), name)
            found.append(_Way(signature, choice, stored))
        return found

    def _inside(self, op: Op, splits: Mapping[Op, OpSplit]) -> DuplexStage:
        """Communication of an op's results inside its group; readers of the same form share it."""
        found = DuplexStage()
        for tensor in op.outputs:
            forms: dict[Form, None] = {self._form_written(tensor, splits[op]): None}
            for reader, i in self.prices.graph.readers.get(tensor, ()):
                form = self._form_read(reader, i, splits[reader]) if reader in splits else None
                if form is not None and form not in forms:
                    forms[form] = None
                    ends = splits[op], splits[reader]
                    found = found.plus(self.prices.moving(tensor, *ends, (reader, i)))
        return found

    def _pieces(self, splits: Mapping[Op, OpSplit]) -> Mapping[tuple[int, int], OpSplit]:
        """Storage of shared weights in pieces, along the first dim that all devices cut evenly."""
        found, num, places = {}, len(self.devices), list(splits)
        for op, i in _weights(splits):
            tensor = op.inputs[i]
            even = [d for d, size in enumerate(tensor.shape) if size % num == 0]
            shared = self._form_read(op, i, splits[op]) == REPLICATE
            if shared and even and len(self.prices.graph.readers[tensor]) == 1:
                sizes = self.prices.graph.updates[tensor.name].sizes
                found[places.index(op), i] = OpSplit.grid(
                    sizes, self.devices, [(f"d{even[0]}", num)]
                )
        return found

    # --- forms ----------------------------------------------------------------------------------

    def _form_read(self, op: Op, position: int, split: OpSplit) -> Form:
        sharding = shardings_of(op.form, split).inputs[position]
        return form_of(sharding, op.inputs[position].shape, is_read=True)

    def _form_written(self, tensor: PTensor, split: OpSplit) -> Form:
        writer = self.prices.graph.producer[tensor]
        sharding = shardings_of(writer.form, split).outputs[writer.outputs.index(tensor)]
        return form_of(sharding, tensor.shape, is_read=False)

    @cached_property
    def _reforms(self) -> Mapping[int, Mapping[tuple[Form, Form], DuplexStage]]:
        """For tensors between groups, the cost of each change from a written to a read form."""
        written: dict[PTensor, dict[Form, OpSplit]] = {}
        read: dict[PTensor, dict[Form, tuple[Reader, OpSplit]]] = {}
        for group, ways in zip(self.groups, self._ways, strict=True):
            for way in ways:
                splits = dict(zip(group, way.choice.splits, strict=True))
                pairs = zip(self._writes(group), way.signature.writes, strict=True)
                for tensor, form in pairs:
                    split = splits[self.prices.graph.producer[tensor]]
                    written.setdefault(tensor, {}).setdefault(form, split)
                for reader, form in zip(self._reads(group), way.signature.reads, strict=True):
                    op, i = reader
                    read.setdefault(op.inputs[i], {}).setdefault(form, (reader, splits[op]))
        found: dict[int, dict[tuple[Form, Form], DuplexStage]] = {}
        for tensor, forms in written.items():
            table = found.setdefault(self._numbers[tensor], {})
            for before, after in product(forms, read[tensor]):
                reader, to_split = read[tensor][after]
                if before != after:
                    with suppress(PlanError):
                        ends = forms[before], to_split
                        table[before, after] = self.prices.moving(tensor, *ends, reader)
        return found


def _weights(ops: Iterable[Op]) -> list[Reader]:
    return [
        (op, i)
        for op in ops
        for i, tensor in enumerate(op.inputs)
        if tensor.kind == PARAMETER and tensor.requires_grad
    ]


def _ordered(
    groups: Sequence[OpGroup], producer: Mapping[PTensor, Op]
) -> tuple[OpGroup, ...] | None:
    """Groups in an order that follows the data flow, near the given order; None if impossible."""
    place = {op: number for number, group in enumerate(groups) for op in group}
    waits = [
        {place[producer[t]] for op in group for t in op.inputs if t in producer} - {number}
        for number, group in enumerate(groups)
    ]
    done: dict[int, None] = {}
    while len(done) < len(groups):
        ready = next(
            (n for n, each in enumerate(waits) if n not in done and each <= set(done)), None
        )
        if ready is None:
            return None
        done[ready] = None
    return tuple(groups[number] for number in done)
