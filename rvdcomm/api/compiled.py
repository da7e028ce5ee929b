"""Compiled: a call as one operator of the graph that ``torch.compile`` makes.

The request is known while the graph is traced. It is written into the graph as a text, with the
shape of the result. The gradient is the operator of the adjoint. Ranks compare their requests when
the graph first runs, as in any first call. A call that cannot be one operator breaks the graph and
runs as without ``torch.compile`` (docs/gradients.md says when).

The first traced call imports this module, because its own imports take long. It is given the
function that runs a call and imports none of the modules that import it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._library.effects import EffectType

from rvdcomm.api.gradient import base_of
from rvdcomm.api.options import CallOptions
from rvdcomm.errors import CommError, LayoutError
from rvdcomm.layout import Layout
from rvdcomm.plans.adjoint import adjoint
from rvdcomm.plans.plan import Plan
from rvdcomm.run.process_group import real_group
from rvdcomm.run.request import known_shape, layout_meant
from rvdcomm.run.world import World

Operator = tuple[str, list[int]]
"""The arguments of the operator besides its tensor: the text of an ``Ask``, the result's shape."""


class CompiledPlan(Protocol):
    """A plan that was compiled for one rank, to be called; a ``Redistributor`` is one."""

    plan: Plan
    group: Any
    executor: str
    replica_grads: str

    @property
    def adjoint(self) -> Any:
        """The plan that carries the gradient back; the first read is collective."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the plan; collective; arguments as of ``Redistributor``."""


@dataclass(frozen=True)
class Ask:
    """A request for a transition between layouts of the same ranks, this one among them.

    ``run`` runs the transition, as a function of this rank's tensor; ``run_back`` runs the adjoint.
    """

    src: Layout
    dst: Layout
    group: Any
    options: tuple[Any, ...]
    replica_grads: str
    run: Callable[[Tensor], Tensor]
    run_back: Callable[[Tensor], Tensor]

    def __call__(self, tensor: Tensor) -> Tensor:
        """Run the transition; collective."""
        return base_of(self.run(tensor))

    @property
    def adjoint(self) -> Ask:
        """The request that carries the gradient back."""
        src, dst = adjoint(self.src, self.dst, self.replica_grads)
        return replace(self, src=src, dst=dst, run=self.run_back, run_back=self.run)

    def operator(self) -> Operator:
        """Register this request; returns the arguments with which the operator runs it."""
        text = str(self)
        _ASKS[text] = self
        return text, list(self.dst.cell(World.of(self.group).rank).box.shape)

    def __str__(self) -> str:
        text = f"{self.src} -> {self.dst} on group {World.of(self.group).name!r}"
        return ", ".join([text, self.replica_grads, *map(str, self.options)])


_ASKS: dict[str, Ask] = {}
"""Requests that the graphs of this process may run, by their texts."""


# --- the operator -------------------------------------------------------------------------------


@torch.library.custom_op("rvdcomm::redistribute", mutates_args=())
def _redistribute(tensor: Tensor, ask: str, shape: Sequence[int]) -> Tensor:
    return _ASKS[ask](tensor)


@_redistribute.register_fake
def _(tensor: Tensor, ask: str, shape: Sequence[int]) -> Tensor:
    return tensor.new_empty(shape)


def _remember(ctx: Any, inputs: tuple[Tensor, str, Sequence[int]], output: Tensor) -> None:
    ctx.ask, ctx.shape = inputs[1], inputs[0].shape


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    text, _ = _ASKS[ctx.ask].adjoint.operator()
    return _redistribute(grad, text, ctx.shape), None, None


_redistribute.register_autograd(_backward, setup_context=_remember)
# Ranks have to issue their operators in one order, which a compiler may not change.
_redistribute.register_effect(EffectType.ORDERED)


# --- what is traced -----------------------------------------------------------------------------


def call(
    redistribute: Callable[..., Any],
    tensor: Tensor | None,
    src: Layout | str,
    dst: Layout | str,
    out: Tensor | None,
    async_op: bool,
    asked: CallOptions,
) -> Any:
    """A call of ``redistribute``: one operator if it can be, else a call that breaks the graph."""
    operator = None
    if _fits(tensor, out, async_op, asked.requires_grad):
        # A named tuple is no constant of a trace; its fields are.
        operator = _operator_of(redistribute, src, dst, *asked)
    if operator is not None:
        return _placed(tensor, operator, asked.requires_grad)
    return eager(redistribute, tensor, src, dst, out=out, async_op=async_op, options=asked)


def call_redistributor(
    redistributor: CompiledPlan,
    tensor: Tensor | None,
    out: Tensor | None,
    async_op: bool,
    requires_grad: bool | None,
) -> Any:
    """A call of a ``Redistributor``, as in ``call``."""
    operator = None
    if _fits(tensor, out, async_op, requires_grad):
        operator = _operator_of_redistributor(redistributor)
    if operator is not None:
        return _placed(tensor, operator, requires_grad)
    return eager(redistributor, tensor, out=out, async_op=async_op, requires_grad=requires_grad)


def _fits(
    tensor: Tensor | None, out: Tensor | None, async_op: bool, requires_grad: bool | None
) -> bool:
    """Whether the operator can take these arguments."""
    if tensor is None or out is not None or async_op:
        return False
    return tensor.requires_grad or not requires_grad


def _placed(tensor: Any, operator: Operator, requires_grad: bool | None) -> Tensor:
    """Call the operator, which puts it into the graph."""
    tensor = tensor.detach() if requires_grad is False else tensor
    result: Tensor = _redistribute(tensor, *operator)
    return result


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _operator_of(
    redistribute: Callable[..., Any], src: Layout | str, dst: Layout | str, *fields: Any
) -> Operator | None:
    """The arguments of the operator, from what this rank knows; None if the call cannot be one."""
    asked = CallOptions(*fields)
    try:
        group = real_group(asked.group)
        size = World.of(group).size
        known = known_shape(src, dst, asked.shape)
        if known is None:
            return None
        src, dst = layout_meant(src, known, size), layout_meant(dst, known, size)
        named = asked.topology, asked.executor, asked.memory_limit
        options = CallOptions(group, *named, requires_grad=False)
        run = partial(_run, redistribute, src, dst, options)
        run_back = partial(_run, redistribute, *adjoint(src, dst, asked.replica_grads), options)
        return _known(Ask(src, dst, group, named, asked.replica_grads, run, run_back))
    except (CommError, LayoutError):
        return None  # The call itself raises it, on every rank.


def _run(
    redistribute: Callable[..., Any],
    src: Layout,
    dst: Layout,
    options: CallOptions,
    tensor: Tensor,
) -> Tensor:
    result: Tensor = redistribute(tensor, src, dst, dtype=tensor.dtype, options=options)
    return result


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _operator_of_redistributor(redistributor: CompiledPlan) -> Operator | None:
    plan = redistributor.plan
    options = plan.identity, redistributor.executor, plan.memory_limit
    run = partial(redistributor, requires_grad=False)

    def run_back(grad: Tensor) -> Tensor:
        # Making the adjoint is collective, so it is made only in the first backward pass.
        result: Tensor = redistributor.adjoint(grad, requires_grad=False)
        return result

    grads = redistributor.replica_grads
    return _known(Ask(plan.src, plan.dst, redistributor.group, options, grads, run, run_back))


def _known(ask: Ask) -> Operator | None:
    """The arguments of the operator; None unless every rank has a tensor on both sides."""
    if set(ask.src.ranks) != set(ask.dst.ranks) or World.of(ask.group).rank not in ask.dst:
        return None
    return ask.operator()


@torch.compiler.disable(reason="a call of rvdcomm that is not one operator")  # type: ignore
def eager(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function that breaks the graph."""
    return function(*args, **kwargs)
