"""Experts: some of the experts of a mixture; what the parts of a mixture return adds up."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from superscaler_core.ops.modules import ModuleCall, module_call
from superscaler_core.ops.stacked_experts import StackedExperts


def call_experts(
    key: str,
    tensors: Sequence[Tensor],
    shapes: Sequence[Sequence[int]],
    *,
    first: int,
    num_here: int,
    num_experts: int,
) -> Tensor:
    """Run the experts of a mixture that are here, for the tokens that chose them.

    On CUDA, the host waits for the number of these tokens if some experts are elsewhere.

    Args:
        key: the call of the module, as for ``call_module``.
        tensors: tokens ``[T, H]``; the numbers of each token's experts ``[T, k]``, integers; the
            weight of each ``[T, k]``; then the module's state, in which tensors that number the
            experts begin with expert ``first``.
        shapes: the shape of the result.
        first: number of the first expert here.
        num_here: experts here.
        num_experts: experts of the whole mixture.

    Returns:
        ``[T, H]``. Zeros for tokens that chose no expert here.
    """
    call = module_call(key)
    if num_here == num_experts:
        return call(tensors, shapes)[0]
    x, ids, weights, *state = tensors
    tokens, choices = _chosen(ids, first, num_here, num_experts)
    local, weight = ids[tokens, choices] - first, weights[tokens, choices]
    # Numbers beyond all experts, such as that of "no expert", stay beyond those here.
    local = torch.where(local < num_here, local, local - (num_experts - num_here))
    if not len(tokens):
        # Also a result that no token chose is computed from all tensors, for the backward.
        tokens, local, weight = tokens.new_zeros(1), local.new_zeros(1), weights[:1, 0] * 0
    rows = [x[tokens], local[:, None], weight[:, None], *state]
    part = part_of(call, num_here, num_experts, ids.shape[1])
    (found,) = part(rows, [(len(tokens), *shapes[0][1:])])
    return found.new_zeros(tuple(shapes[0])).index_add(0, tokens, found)


def _chosen(ids: Tensor, first: int, num_here: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """The tokens that chose an expert here, with the places of their choices.

    A choice beyond all experts belongs to the part with the first expert.
    """
    if ids.is_meta:
        num = max(ids.numel() * num_here // num_experts, 1)
        return (ids.new_empty(num, dtype=torch.int64),) * 2
    is_here = (ids >= first) & (ids < first + num_here)
    if first == 0:
        is_here |= ids >= num_experts
    tokens, choices = is_here.nonzero(as_tuple=True)
    return tokens, choices


def call_listed(
    key: str,
    tensors: Sequence[Tensor],
    shapes: Sequence[Sequence[int]],
    *,
    first: int,
    num_here: int,
    num_experts: int,
) -> Tensor | tuple[Tensor, ...]:
    """Run a module around ``StackedExperts``, with those that are here.

    What the module adds to its experts, such as a shared expert, counts in the first part alone.

    Args:
        key, tensors, shapes: as for ``call_module``; stacked tensors begin with expert ``first``.
        first, num_here, num_experts: as in ``call_experts``.

    Returns:
        Its results, whose parts add up.
    """
    call = module_call(key)
    if any(x.is_meta for x in tensors):
        call = replace(call, kept_bytes=call.kept_bytes * num_here / num_experts)
        found = call(tensors, shapes)
    elif num_here == num_experts:
        found = call(tensors, shapes)
    else:
        found = listed_from(call, first)(tensors, shapes)
    if first and not tensors[0].is_meta:
        names = stacked_names(call.skeleton)
        start = len(tensors) - len(call.names)
        none = [
            x[:0] if i >= start and call.names[i - start] in names else x
            for i, x in enumerate(tensors)
        ]
        pairs = zip(found, listed_from(call, num_experts)(none, shapes), strict=True)
        found = tuple(one - other for one, other in pairs)
    return found[0] if len(found) == 1 else found


@lru_cache(maxsize=256)
def listed_from(call: ModuleCall, first: int) -> ModuleCall:
    """The call of a module whose stacked experts begin with number ``first``."""
    memo = {id(x): x for x in (*call.skeleton.parameters(), *call.skeleton.buffers())}
    skeleton: nn.Module = copy.deepcopy(call.skeleton, memo)
    for module in skeleton.modules():
        if isinstance(module, StackedExperts):
            module.first = first
    return replace(call, skeleton=skeleton)


def stacked_names(module: nn.Module) -> frozenset[str]:
    """The names of the parameters of its ``StackedExperts``."""
    return frozenset(
        f"{path}.{name}"
        for path, child in module.named_children()
        if isinstance(child, StackedExperts)
        for name, _ in child.named_parameters()
    )


@lru_cache(maxsize=256)
def part_of(call: ModuleCall, num_here: int, num_experts: int, top: int) -> ModuleCall:
    """The call of a mixture's module for some of its experts, each token with one choice.

    Args:
        call: the call for all experts.
        num_here: experts of the part.
        num_experts: experts of the mixture.
        top: choices of each token in ``call``.
    """
    memo = {id(x): x for x in (*call.skeleton.parameters(), *call.skeleton.buffers())}
    skeleton: nn.Module = copy.deepcopy(call.skeleton, memo)
    for name, value in vars(skeleton).items():
        if type(value) is int and value == num_experts and "expert" in name:
            setattr(skeleton, name, num_here)
    return replace(call, skeleton=skeleton, kept_bytes=call.kept_bytes / top)
