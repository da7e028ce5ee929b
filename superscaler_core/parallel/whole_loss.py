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

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from superscaler_core.errors import PlanError
from superscaler_core.front_end.model_call import ModelCall
from superscaler_core.parallel.batch import Batch, Inputs
from superscaler_core.parallel.returned import returned_by, with_forward

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
        like: zeros of the shape of each feature of the example. What is no tensor of fractions,
            such as labels, gets no gradient.
        dims: the dim of each feature that has the samples; None if it has none, as a parameter.
    """

    function: Loss
    form: pytree.TreeSpec
    like: tuple[Tensor, ...]
    dims: tuple[int | None, ...]

    @classmethod
    def of(cls, model: nn.Module, function: Loss, example: ModelCall, batch: Batch) -> WholeLoss:
        """The features that a model returns for an example; nothing is computed.

        Raises:
            PlanError: it returns something that is no tensor of numbers with a gradient; or samples
                are not one dim of a feature; or the loss has parameters of its own.
        """
        if isinstance(function, nn.Module) and any(p.requires_grad for p in function.parameters()):
            raise PlanError(
                "whole_loss has parameters that are trained, and only those of the model are: let "
                "the model have them and return them beside the features, such as its temperature."
            )
        leaves, form = pytree.tree_flatten(returned_by(model, example))
        odd = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)]
        if odd or not any(map(_has_grad, leaves)):
            raise PlanError(
                "whole_loss is a loss of what the model returns, which has to be tensors, alone or "
                f"in a tuple or dict, with fractions among them, and has {odd or 'none'}."
            )
        inputs = Inputs.of(batch, model, example)
        twice = pytree.tree_leaves(returned_by(model, inputs.repeated(example)))
        num = next(iter(inputs.sizes.values()), 1)
        pairs = enumerate(zip(leaves, twice, strict=True))
        dims = tuple(_dim_of_samples(i, a.shape, b.shape, num) for i, (a, b) in pairs)
        like = tuple(torch.zeros(x.shape, dtype=x.dtype) for x in leaves)
        return cls(function, form, like, dims)

    @property
    def with_grad(self) -> tuple[Tensor, ...]:
        """Zeros of the shapes of the features that have gradients."""
        return tuple(filter(_has_grad, self.like))

    @property
    def grad_dims(self) -> dict[str, int | None]:
        """The dims of samples of the gradients of features, by the names of these inputs."""
        pairs = zip(self.like, self.dims, strict=True)
        dims = [dim for like, dim in pairs if _has_grad(like)]
        return {f"{GRADS}.{number}": dim for number, dim in enumerate(dims)}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the features among the results of a program."""
        return tuple(f"feature {number}" for number in range(len(self.like)))

    def zeros(self, num: int) -> tuple[Tensor, ...]:
        """Gradients of zero for a batch of ``num`` samples."""
        pairs = zip(self.with_grad, self.grad_dims.values(), strict=True)
        return tuple(
            like if dim is None else like.narrow(dim, 0, 1).repeat_interleave(num, dim)
            for like, dim in pairs
        )

    def loss_of(self, features: Sequence[Tensor]) -> Tensor:
        """The loss of the features of a whole batch."""
        return self.function(pytree.tree_unflatten([*features], self.form))

    def grads_of(self, features: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The loss, and its gradients of the features."""
        with torch.enable_grad():
            leaves = [feature.detach().requires_grad_(_has_grad(feature)) for feature in features]
            real = [leaf for leaf in leaves if leaf.requires_grad]
            loss = self.loss_of(leaves)
            grads = torch.autograd.grad(loss, real, allow_unused=True, materialize_grads=True)
        return loss.detach(), tuple(grads)


def prepared(
    model: nn.Module, function: Loss, example: ModelCall, batch: Batch
) -> tuple[nn.Module, WholeLoss, ModelCall, Batch]:
    """A model ``with_grads``, the loss of its features, and the example with gradients of them.

    And what a batch of them is.

    Raises:
        PlanError: the model returns no features, or hooks or another forward are set on it.
    """
    model = getattr(model, "_orig_mod", model)
    hooks = [*model._forward_hooks, *model._forward_pre_hooks]
    if hooks or "forward" in vars(model):
        what = "forward hooks" if hooks else "another forward"
        raise PlanError(
            f"whole_loss: {what} was set on the model itself, where it would see the call of the "
            "loss's gradients: set it on a module in the model."
        )
    args, kwargs = example.arguments
    loss = WholeLoss.of(model, function, example, batch)
    made = with_grads(model, loss)
    given = ModelCall.of(made, args, {**kwargs, GRADS: loss.with_grad})
    return made, loss, given, replace(batch, dims={**batch.dims, **loss.grad_dims})


def _has_grad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _dim_of_samples(number: int, once: Sequence[int], twice: Sequence[int], num: int) -> int | None:
    """The dim of a feature that has the samples, given its shapes of ``num`` and twice as many."""
    dims = [i for i, (a, b) in enumerate(zip(once, twice, strict=True)) if a != b]
    if dims and (len(dims) > 1 or once[dims[0]] != num):
        raise PlanError(
            f"whole_loss: feature {number} of what the model returns is {list(once)} for {num} "
            "samples: return it with a dim of the samples alone, such as [samples, tokens, width], "
            "and let the loss flatten it."
        )
    return dims[0] if dims else None


def with_grads(model: nn.Module, loss: WholeLoss) -> nn.Module:
    """A model with the same parameters, whose loss has given gradients of the features.

    It takes the gradients as ``feature_grads``, and returns the features beside the loss.
    """

    def forward(own: Any, self: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        grads = kwargs.pop(GRADS)
        # A parameter may be a feature; only what an op computes can be a result.
        features = [leaf * 1 for leaf in pytree.tree_leaves(own(self, *args, **kwargs))]
        pairs = zip(filter(_has_grad, features), grads, strict=True)
        terms = [_weighted(feature, grad) for feature, grad in pairs]
        total = sum(terms[1:], terms[0])
        return {"loss": total, **dict(zip(loss.names, features, strict=True))}

    grads = inspect.Parameter(GRADS, inspect.Parameter.KEYWORD_ONLY)
    return with_forward(model, forward, grads)


def _weighted(feature: Tensor, grad: Tensor) -> Tensor:
    """A number whose gradient of the feature is ``grad``, as torch defines it of complex ones."""
    products = feature * grad.conj() if feature.is_complex() else feature * grad
    return products.real.sum() if feature.is_complex() else products.sum()
