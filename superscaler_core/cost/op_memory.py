"""Op memory: the memory of one part of an op, from running it alone on torch's meta device.

As for a segment (``memory.trace``), autograd itself determines what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import lru_cache, partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from superscaler_core.cost.memory_cost import MemoryCost
from superscaler_core.graph.form import MAX_PART_FORMS
from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import ACTIVATION, PARAMETER
from superscaler_core.known import ByKey
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


def op_memory(part: Part) -> MemoryCost:
    """The memory of a part on its device in one microbatch, without that of its weights.

    Parts of the same sizes and numbers in their calls are run once. What autograd keeps are saved
    inputs and results, and tensors that exist only for the backward, such as masks.
    """
    form = part.form
    call = form.call if form.op.says_where else ()
    key = form.op, form.extents, tuple(box.shape for box, _ in form.inputs), call
    return _measured(ByKey(key, part))


@lru_cache(maxsize=MAX_PART_FORMS)
def _measured(of: ByKey[Part]) -> MemoryCost:
    part, meter = of.value, _PeakMeter()
    operands = [_operand(meter, part, position) for position in range(len(part.op.inputs))]
    mine = [x for x, of in zip(operands, part.op.inputs, strict=True) if of.kind == ACTIVATION]
    input_bytes, activations = meter.now_bytes, {*map(id, mine)}
    with torch.enable_grad(), FusedAttention(), meter:
        # As on the tape: autograd saves what it needs of a view, and the leaf's memory is freed.
        given = [x.view_as(x) if x.requires_grad and id(x) in activations else x for x in operands]
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
        kept_bytes, forward_bytes = meter.now_bytes, meter.most_bytes
        meter.most_bytes = meter.first_bytes = 0
        if roots:
            grads = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in like]
            torch.autograd.backward(roots, grads)
            meter.measure()
        del leaves
    ends = meter.most_bytes, meter.first_bytes
    return MemoryCost(0, 0, 0, kept_bytes, input_bytes, forward_bytes, *ends, saved, views)


class _PeakMeter(MetaMeter):  # type: ignore[no-untyped-call]
    """Measures peaks: without the accumulated ``grads`` of weights, and with them (``first``)."""

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
    meter.grads[name] = weight.numel() * weight.element_size()
    weight.grad = None
