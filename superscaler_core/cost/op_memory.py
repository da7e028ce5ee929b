"""Op memory: the memory of one part of an op, measured by running it alone without data.

As for a segment (``memory.trace``), the part runs on torch's meta device, forward and backward, so
autograd itself determines what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache, partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from superscaler_core.graph.form import MAX_PART_FORMS
from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import ACTIVATION, PARAMETER
from superscaler_core.memory.meta import FusedAttention, MetaMeter
from superscaler_core.run.evaluate import run_part
from superscaler_core.run.host import emptied


class Kept(Enum):
    """What an op keeps from its forward to its backward."""

    SAVED = "saved"
    """Keep what autograd saves."""
    INPUTS = "inputs"
    """Keep only its inputs, as the first op of a recomputed group."""
    NOTHING = "nothing"
    """Keep nothing, as the other ops of such a group."""


@dataclass(frozen=True, slots=True)
class OpMemory:
    """Bytes of one part of an op on its device, in one microbatch.

    Attributes:
        saved_bytes: what autograd keeps: saved inputs and results, and tensors that exist only
            for the backward, such as masks.
        input_bytes: the activations that it reads.
        forward_bytes: the peak in its forward, including its inputs and results.
        backward_bytes: the peak in its backward, including saved tensors, the gradients of its
            results, and gradients of weights until they are accumulated.
        first_backward_bytes: the same if the backward allocates the accumulated gradients.
        saved: the operands in ``saved_bytes``, with their bytes: inputs, then outputs, by number.
        views: for every output the number of the input whose memory it shares; None if it shares
            none.
    """

    saved_bytes: int
    input_bytes: int
    forward_bytes: int
    backward_bytes: int
    first_backward_bytes: int
    saved: tuple[tuple[int, int], ...]
    views: tuple[int | None, ...]


def op_memory(part: Part) -> OpMemory:
    """The memory of a part; parts of the same form are run once."""
    return _measured(_PartOfForm(part))


@dataclass(frozen=True, eq=False)
class _PartOfForm:
    """A part as a cache key, compared by everything that decides its memory.

    This is its sizes, the shapes of its inputs, and the numbers in its call.
    """

    part: Part

    @cached_property
    def key(self) -> tuple[object, ...]:
        """The values that are compared."""
        form = self.part.form
        call = form.call if form.op.says_where else ()
        return form.op, form.extents, tuple(box.shape for box, _ in form.inputs), call

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _PartOfForm) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@lru_cache(maxsize=MAX_PART_FORMS)
def _measured(of: _PartOfForm) -> OpMemory:
    part, meter = of.part, _PeakMeter()
    operands = [_operand(meter, part, position) for position in range(len(part.op.inputs))]
    mine = [x for x, of in zip(operands, part.op.inputs, strict=True) if of.kind == ACTIVATION]
    input_bytes = meter.now_bytes
    with torch.enable_grad(), FusedAttention(), meter:
        # As on the tape: autograd saves what it needs of a view, and the leaf's memory is freed.
        given = [x.view_as(x) if x.requires_grad and _is_in(x, mine) else x for x in operands]
        outputs = run_part(part, given)
        roots = [get_gradient_edge(out) for out in outputs if out.requires_grad]
        like = [(out.shape, out.dtype) for out in outputs if out.requires_grad]
        memory = [ref(x.untyped_storage()) for x in (*operands, *outputs)]
        views = tuple(_viewed(out, operands) for out in outputs)
        meter.is_paused = True
        leaves = [emptied(x) for x in mine if x.requires_grad]
        meter.is_paused = False
        del given, outputs, operands, mine
        saved = _alive(meter, memory)
        saved_bytes = meter.now_bytes
        forward_bytes = meter.most_bytes
        if not roots:
            return OpMemory(saved_bytes, input_bytes, forward_bytes, 0, 0, saved, views)
        meter.most_bytes = meter.first_bytes = 0
        grads = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in like]
        torch.autograd.backward(roots, grads)
        meter.measure()
        del leaves
    ends = meter.most_bytes, meter.first_bytes
    return OpMemory(saved_bytes, input_bytes, forward_bytes, *ends, saved, views)


class _PeakMeter(MetaMeter):  # type: ignore[no-untyped-call]
    """Measures peaks.

    Attributes:
        grads: bytes of the accumulated gradients of weights, by weight.
        most_bytes, first_bytes: the peaks without these gradients, and with them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.grads: dict[str, int] = {}
        self.most_bytes = self.first_bytes = 0

    def measure(self) -> None:
        self.most_bytes = max(self.most_bytes, self.now_bytes)
        self.first_bytes = max(self.first_bytes, self.now_bytes + sum(self.grads.values()))


def _viewed(out: Tensor, operands: Sequence[Tensor]) -> int | None:
    """The operand whose memory a result shares."""
    storages = [x.untyped_storage() for x in operands]
    found = (i for i, storage in enumerate(storages) if storage is out.untyped_storage())
    return next(found, None)


def _alive(meter: _PeakMeter, memory: Sequence[ref[Any]]) -> tuple[tuple[int, int], ...]:
    """The pieces of memory that autograd keeps, each once, with their counted bytes."""
    found: dict[int, tuple[int, int]] = {}
    for number, one in enumerate(memory):
        storage = one()
        if storage is not None and (size := meter.counted(storage)):
            found.setdefault(id(storage), (number, size))
    return tuple(found.values())


def _is_in(x: Tensor, tensors: Sequence[Tensor]) -> bool:
    return any(x is other for other in tensors)


def _operand(meter: _PeakMeter, part: Part, position: int) -> Tensor:
    """An input of a part, without data; weights and the batch are counted elsewhere."""
    view, of = part.inputs[position], part.op.inputs[position]
    made = torch.empty(view.box.shape, dtype=getattr(torch, of.dtype), device="meta")
    if of.requires_grad:
        made.requires_grad_()
    if of.kind == ACTIVATION:
        meter.count([made])
        return made
    meter.ignore([made])
    if of.kind == PARAMETER and of.requires_grad:
        hook: Any = partial(_add_grad, meter, of.name)
        made.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return made


def _add_grad(meter: _PeakMeter, name: str, weight: Tensor) -> None:
    """Accumulate a gradient of a weight."""
    meter.grads[name] = weight.numel() * weight.element_size()
    weight.grad = None
