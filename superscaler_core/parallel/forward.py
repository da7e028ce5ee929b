"""Forward: what a model returns for a batch, without a loss, as results of programs of its own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import rvdcomm as rv
from superscaler_core.compiled import Compiled
from superscaler_core.errors import PlanError
from superscaler_core.front_end.model_call import ModelCall
from superscaler_core.known import Known
from superscaler_core.parallel.batch import Batch
from superscaler_core.parallel.batches import Batches
from superscaler_core.parallel.programs import Programs
from superscaler_core.parallel.returned import with_forward
from superscaler_core.rules.calls import is_literal
from superscaler_core.run.own_samples import OwnSamples

MAX_FORMS = 64
"""Bound on kept structures of what a model returns, by the form of the call."""


Form = tuple[list[Any], pytree.TreeSpec]
"""The leaves of what a model returns, with ``_TENSOR`` for each tensor, and their structure."""

_TENSOR = object()


class Side(NamedTuple):
    """Programs of one model, and what ranks pass to them."""

    programs: Programs
    batches: Batches


@dataclass(frozen=True, eq=False)
class OutputShard:
    """What one rank has of an output.

    Attributes:
        pieces: a tensor for each microbatch, with its box in the output of the whole batch.
    """

    pieces: tuple[tuple[rv.Box, Tensor], ...]

    @classmethod
    def of(cls, held: OwnSamples, size: int | None) -> OutputShard:
        """The shard of an output.

        Args:
            held: its microbatches.
            size: samples of one microbatch; None if the output has none, and is their mean.
        """
        at, num = held.dim, held.tensor.shape[held.dim]
        lo, hi = (ends[:at] + ends[at + 1 :] for ends in (held.box.lo, held.box.hi))
        if size is None:
            return cls(((rv.Box(lo, hi), held.tensor.mean(at) if num > 1 else held.tensor[0]),))
        ends = ((_moved(lo, at, mb * size), _moved(hi, at, mb * size)) for mb in range(num))
        return cls(
            tuple((rv.Box(*each), held.tensor.select(at, mb)) for mb, each in enumerate(ends))
        )


def _moved(end: tuple[int, ...], dim: int, by: int) -> tuple[int, ...]:
    return (*end[:dim], end[dim] + by, *end[dim + 1 :])


class Forward:
    """The forward of a model in ``eval()`` mode.

    The programs store parameters as the one that trains does. Every tensor that the model returns
    is a result of a program, and a loss that nobody reads makes it one.

    Args:
        programs: the programs that train.
        batch: where the samples of the model's inputs are.
        batches_of: makes what ranks pass to programs.
    """

    def __init__(
        self, programs: Programs, batch: Batch, batches_of: Callable[[Programs], Batches]
    ) -> None:
        self._programs, self._batch, self._batches_of = programs, batch, batches_of
        self._model = _returning(programs.model)
        self._forms: Known[Hashable, Form] = Known(MAX_FORMS)
        self._sides: dict[tuple[int, bool], Side] = {}

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ModelCall:
        """A call of the model, as in ``ModelCall.of``."""
        return ModelCall.of(self._model, args, kwargs)

    def side(self, call: ModelCall, *, is_cut: bool = False) -> Side:
        """The programs for what the model returns for a call.

        Args:
            call: the call.
            is_cut: whether outputs stay where they are made, instead of being whole on all ranks.

        Raises:
            PlanError: it returns no tensor.
        """
        num = len(self._names(call))
        if not num:
            raise PlanError(f"{type(self._model).__name__} returns no tensor for this call.")
        key = num, is_cut
        if key not in self._sides:
            names = _names(num)
            carried = dict.fromkeys(names, "") if is_cut else {}
            programs = self._programs.of_model(self._model, self._batch, names, carried)
            self._sides[key] = Side(programs, self._batches_of(programs))
        return self._sides[key]

    @property
    def sides(self) -> list[Side]:
        """The programs so far."""
        return list(self._sides.values())

    def returned(self, call: ModelCall, results: Mapping[str, Any]) -> Any:
        """What the model returns for a call, with the results of its program as tensors."""
        leaves, form = self._form(call)
        tensors = iter(results.get(name) for name in self._names(call))
        filled = [next(tensors) if leaf is _TENSOR else leaf for leaf in leaves]
        return pytree.tree_unflatten(filled, form)

    def shards(self, call: ModelCall, compiled: Compiled, carried: Mapping[str, OwnSamples]) -> Any:
        """What the model returns for a call, with this rank's shards in place of tensors."""
        plan = compiled.plan
        dims = {name: plan.dims.samples_dim(t) for name, t in plan.graph.results.items()}
        shapes = {name: t.shape for name, t in plan.graph.results.items()}
        sizes = {n: None if dim is None else shapes[n][dim] for n, dim in dims.items()}
        found = {name: OutputShard.of(held, sizes[name]) for name, held in carried.items()}
        return self.returned(call, found)

    def _names(self, call: ModelCall) -> tuple[str, ...]:
        leaves, _ = self._form(call)
        return _names(sum(leaf is _TENSOR for leaf in leaves))

    def _form(self, call: ModelCall) -> Form:
        return self._forms.of(call.form, lambda: self._made_form(call))

    def _made_form(self, call: ModelCall) -> Form:
        """What the model returns is known once it is traced."""
        seen: list[Form] = []
        odds: list[Any] = []

        def forward(own: Any, self: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
            leaves, form = pytree.tree_flatten(own(self, *args, **kwargs))
            odds.extend(x for x in leaves if not isinstance(x, Tensor) and not is_literal(x))
            seen.append(([_TENSOR if isinstance(x, Tensor) else x for x in leaves], form))
            outputs = [_computed(x) for x in leaves if isinstance(x, Tensor)]
            return {"loss": _loss(outputs or list(self.parameters())[:1])}

        self._programs.of_model(with_forward(self._model, forward), self._batch).captured(call)
        if odds:
            raise PlanError(
                f"{type(self._model).__name__} returns a {type(odds[0]).__name__} for this call, "
                "and a call of a parallel model returns tensors and plain values: leave out what "
                "asks for it, such as use_cache=True."
            )
        return seen[-1]


def _names(num: int) -> tuple[str, ...]:
    return tuple(f"output {number}" for number in range(num))


def _returning(model: nn.Module) -> nn.Module:
    """A model that returns every tensor of what it returned by a name, and a loss."""

    def forward(own: Any, self: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        leaves = pytree.tree_leaves(own(self, *args, **kwargs))
        # Only what an op computes can be a result.
        outputs = [_computed(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        return {"loss": _loss(outputs), **dict(zip(_names(len(outputs)), outputs, strict=True))}

    return with_forward(model, forward)


def _loss(outputs: Sequence[Tensor]) -> Tensor:
    """A number that depends on all outputs, as programs have a loss."""
    fractions = [x for x in outputs if x.is_floating_point()] or [outputs[0].float()]
    return torch.stack([x.sum().float() for x in fractions]).sum()


def _computed(tensor: Tensor) -> Tensor:
    return tensor | False if tensor.dtype == torch.bool else tensor * 1
