"""Whole loss: a loss of all samples together, such as a contrastive one, under any plan.

A model returns features, and a function makes the loss of those of the whole batch, whatever the
number of microbatches. A step is two runs of a program: the first computes the features of all
microbatches without gradients. Every rank then computes the loss, and its gradients of the
features. The second run computes the features again, and the gradients of their sum, weighted by
these. So the memory is that of one microbatch, at the price of a second forward.

Source of the idea: Gao et al., Scaling deep contrastive learning batch size under memory limited
setup, 2021 (GradCache).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from superscaler_core.errors import PlanError
from superscaler_core.front_end.model_call import ModelCall

GRADS = "feature_grads"
"""The argument that has the gradients of the features."""

Loss = Callable[..., Tensor]
"""From what the model returns, for the whole batch, to a loss."""


@dataclass(frozen=True)
class WholeLoss:
    """A loss of the features of a whole batch.

    Attributes:
        function: takes what the model returns.
        form: the structure of what the model returns.
        like: zeros of the shape of each feature of the example. What is no tensor of real numbers,
            such as labels, gets no gradient.
    """

    function: Loss
    form: pytree.TreeSpec
    like: tuple[Tensor, ...]

    @classmethod
    def of(
        cls, model: nn.Module, function: Loss, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> WholeLoss:
        """The features that a model returns for an example; nothing is computed.

        Raises:
            PlanError: it returns something that is no tensor of numbers with a gradient.
        """
        state = dict([*model.named_parameters(), *model.named_buffers()])
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():
            held, given, named = pytree.tree_map_only(
                Tensor, fake.from_tensor, (state, tuple(args), dict(kwargs))
            )
            found = torch.func.functional_call(model, held, given, named)
        leaves, form = pytree.tree_flatten(found)
        odd = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)]
        if odd or not any(leaf.is_floating_point() for leaf in leaves):
            raise PlanError(
                "whole_loss is a loss of what the model returns, which has to be tensors, alone or "
                f"in a tuple or dict, with real numbers among them, and has {odd or 'none'}."
            )
        like = tuple(torch.zeros(x.shape, dtype=x.dtype) for x in leaves)
        return cls(function, form, like)

    @property
    def with_grad(self) -> tuple[Tensor, ...]:
        """Zeros of the shapes of the features that have gradients."""
        return tuple(like for like in self.like if like.is_floating_point())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the features among the results of a program."""
        return tuple(f"feature {number}" for number in range(len(self.like)))

    def zeros(self, before: int, now: int) -> tuple[Tensor, ...]:
        """Gradients of zero for a batch of ``now`` samples, if the example has ``before``."""
        shapes = [
            [now if i == 0 and size == before else size for i, size in enumerate(like.shape)]
            for like in self.with_grad
        ]
        pairs = zip(shapes, self.with_grad, strict=True)
        return tuple(torch.zeros(shape, dtype=like.dtype) for shape, like in pairs)

    def loss_of(self, features: Sequence[Tensor]) -> Tensor:
        """The loss of the features of a whole batch."""
        return self.function(pytree.tree_unflatten([*features], self.form))

    def grads_of(self, features: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The loss, and its gradients of the features."""
        with torch.enable_grad():
            leaves = [
                feature.detach().requires_grad_(feature.is_floating_point()) for feature in features
            ]
            real = [leaf for leaf in leaves if leaf.requires_grad]
            loss = self.loss_of(leaves)
            grads = torch.autograd.grad(loss, real, allow_unused=True, materialize_grads=True)
        return loss.detach(), tuple(grads)


def prepared(
    model: nn.Module, function: Loss, example: ModelCall
) -> tuple[nn.Module, WholeLoss, ModelCall]:
    """A model ``with_grads``, the loss of its features, and the example with gradients of them.

    Raises:
        PlanError: the model returns no features.
    """
    args, kwargs = example.arguments
    loss = WholeLoss.of(model, function, args, kwargs)
    made = with_grads(model, loss)
    return made, loss, ModelCall.of(made, args, {**kwargs, GRADS: loss.with_grad})


def with_grads(model: nn.Module, loss: WholeLoss) -> nn.Module:
    """A model with the same parameters, whose loss has given gradients of the features.

    It takes the gradients as ``feature_grads``, and returns the features beside the loss.
    """
    kind = type(model)

    def forward(self: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        grads = kwargs.pop(GRADS)
        # A parameter may be a feature; only what an op computes can be a result.
        features = [leaf * 1 for leaf in pytree.tree_leaves(kind.forward(self, *args, **kwargs))]
        real = [feature for feature in features if feature.is_floating_point()]
        terms = [(feature * grad).sum() for feature, grad in zip(real, grads, strict=True)]
        total = sum(terms[1:], terms[0])
        return {"loss": total, **dict(zip(loss.names, features, strict=True))}

    said = inspect.signature(model.forward)
    # Behind the model's own arguments, and before a catch-all of keywords.
    own = [p for p in said.parameters.values() if p.kind is not p.VAR_KEYWORD]
    rest = [p for p in said.parameters.values() if p.kind is p.VAR_KEYWORD]
    grads = inspect.Parameter(GRADS, inspect.Parameter.KEYWORD_ONLY)
    given = said.replace(parameters=[*own, grads, *rest], return_annotation=dict)
    made = copy.copy(model)
    made.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY), *given.parameters.values()]
    )
    return made
