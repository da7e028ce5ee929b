"""Launches: the kernels that an op launches, counted while it runs on torch's meta device."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from superscaler_core.graph.form import MAX_FORMS, OpForm
from superscaler_core.graph.part import Part
from superscaler_core.known import ByKey
from superscaler_core.memory.meta import FusedAttention
from superscaler_core.rules.register import REGISTERED
from superscaler_core.run.evaluate import run_part

NO_KERNELS = frozenset(
    {
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"),
        *("set_", "_unsafe_view", "_reshape_alias", "lift_fresh", "_local_scalar_dense"),
    }
)
"""Operators of torch, besides views, that only make or describe memory."""


class Launches(NamedTuple):
    """Kernels that a host launches for an op."""

    forward: int
    backward: int


def launches_of(part: Part) -> Launches:
    """The kernels of an op's forward, and of its backward without sums of weights' gradients.

    Each operator of torch that computes counts as one kernel. A registered function may state its
    own number (``register_op``). An op that cannot run without values counts as one kernel, and one
    for each gradient. Parts of an op launch as many kernels as the op.
    """
    stated = _stated(part.op.form)
    return _counted(ByKey(part.op.form, part)) if stated is None else Launches(*stated)


@lru_cache(maxsize=MAX_FORMS)
def _counted(of: ByKey[Part]) -> Launches:
    part = of.value
    wanted = sum(form.requires_grad for form in part.op.inputs)
    try:
        with torch.inference_mode(False):
            return _run(part)
    except Exception:
        return Launches(1, wanted)


def _run(part: Part) -> Launches:
    given = [
        torch.empty(view.box.shape, dtype=getattr(torch, form.dtype), device="meta")
        for view, form in zip(part.inputs, part.op.inputs, strict=True)
    ]
    for x, form in zip(given, part.op.inputs, strict=True):
        x.requires_grad_(form.requires_grad)
    wanted = [x for x in given if x.requires_grad]
    is_trained = any(form.requires_grad for form in part.op.outputs)
    with torch.enable_grad(), FusedAttention(), _Counter() as counter:
        outputs = [x for x in run_part(part, given) if x.requires_grad]
        forward, counter.count = counter.count, 0
        if outputs and wanted:
            like = [torch.empty_like(x) for x in outputs]
            torch.autograd.grad(outputs, wanted, like, allow_unused=True)
    # A function that looks at values has results without a graph here.
    lost = len(wanted) if is_trained and not outputs else 0
    return Launches(forward, counter.count + lost)


def _stated(form: OpForm) -> tuple[int, int] | None:
    path = str(form.computes).partition("(")[0]
    # A module that is loaded again registers its functions again.
    known = (each for each in reversed(REGISTERED.values()) if each.path == path)
    return next((each.launches for each in known), None)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that compute."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_kernel = not (func.is_view or func._schema.name.split("::")[1] in NO_KERNELS)
        self.count += is_kernel and any(isinstance(x, Tensor) for x in _flat(result))
        return result


def _flat(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)
