"""Definitions: functions that, while a model is traced, replace those of torch that read values.

They have the same names and arguments; checks of values are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor
from torch.distributions import Dirichlet, Distribution, Gamma
from torch.nn.modules import transformer

from superscaler_core.rules.register import register_op


@contextmanager
def definitions() -> Iterator[None]:
    """Inside this context, the functions of this module replace those of torch."""
    with ExitStack() as stack:
        for function in (ctc_loss, gaussian_nll_loss):
            stack.enter_context(patch.object(F, function.__name__, function))
        stack.enter_context(patch.object(transformer, "_detect_is_causal_mask", _is_causal))
        stack.enter_context(patch.object(torch, "from_numpy", _from_numpy))
        stack.enter_context(patch.object(Distribution, "_validate_args", False))
        stack.enter_context(patch.object(Gamma, "rsample", _rsample_of_gamma))
        stack.enter_context(patch.object(Dirichlet, "rsample", _rsample_of_dirichlet))
        yield


def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """The negative log likelihood of a normal distribution of each element."""
    var = torch.full_like(input, var) if isinstance(var, float) else var
    if var.dim() < input.dim() and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    # Where the variance is raised to eps, it keeps its gradient.
    var = var + (var.clamp(min=eps) - var).detach()
    losses = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    losses = losses + 0.5 * math.log(2 * math.pi) if full else losses
    return _reduced(losses, reduction)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """The negative log likelihood of a text, summed over the ways to align it to the scores."""
    inputs, lengths = (torch.as_tensor(n) for n in (input_lengths, target_lengths))
    is_batch = log_probs.dim() == 3
    if not is_batch:
        log_probs, targets = log_probs.unsqueeze(1), targets.unsqueeze(0)
        inputs, lengths = inputs.reshape(1), lengths.reshape(1)
    one: Callable[..., Tensor] = ctc_losses if targets.dim() == 2 else ctc_losses_of_one_list
    losses = one(log_probs, targets, inputs, lengths, blank=blank, zero_infinity=zero_infinity)
    if reduction == "mean":
        losses = losses / lengths.clamp(min=1).to(losses.dtype)
    return _reduced(losses if is_batch else losses[0], reduction)


_torchs: Any = F.ctc_loss


@register_op("t^ b c^, b s^, b, b -> b")
def ctc_losses(
    log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, *,
    blank: int, zero_infinity: bool,
) -> Tensor:  # fmt: skip
    """The CTC losses of texts in the rows of a matrix."""
    made: Tensor = _torchs(log_probs, targets, inputs, lengths, blank, "none", zero_infinity)
    return made


@register_op("t^ b^ c^, n^, b^, b^ -> b^")
def ctc_losses_of_one_list(
    log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, *,
    blank: int, zero_infinity: bool,
) -> Tensor:  # fmt: skip
    """The CTC losses of texts that follow one another in a vector."""
    made: Tensor = _torchs(log_probs, targets, inputs, lengths, blank, "none", zero_infinity)
    return made


def _is_causal(mask: Tensor | None, is_causal: bool | None = None, *_: Any, **__: Any) -> bool:
    """Whether a mask is said to be causal: a hint, without which attention reads the mask."""
    return bool(is_causal)


_of_numpy = torch.from_numpy


def _from_numpy(array: Any) -> Tensor:
    """``torch.from_numpy``; arrays among the arguments of the model are tensors already."""
    return array if isinstance(array, Tensor) else _of_numpy(array)


def _rsample_of_gamma(self: Gamma, sample_shape: Sequence[int] = ()) -> Tensor:
    """``Gamma.rsample``, which raises what is rounded to 0 without a change of the gradient."""
    shape = self._extended_shape(torch.Size(sample_shape))
    drawn = torch._standard_gamma(self.concentration.expand(shape)) / self.rate.expand(shape)
    raised = drawn.clamp(min=torch.finfo(drawn.dtype).tiny)
    return drawn + (raised - drawn).detach()


def _rsample_of_dirichlet(self: Dirichlet, sample_shape: Sequence[int] = ()) -> Tensor:
    """``Dirichlet.rsample``, from gammas: also a path to the parameters, of the same mean."""
    shape = self._extended_shape(torch.Size(sample_shape))
    concentration = self.concentration.expand(shape)
    drawn = Gamma(concentration, torch.ones_like(concentration)).rsample()
    made: Tensor = drawn / drawn.sum(-1, keepdim=True)
    return made


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" else losses.sum()
