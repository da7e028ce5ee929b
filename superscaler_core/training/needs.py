"""Needs: which optimizers need more than the elements of a parameter, by the names of classes."""

from __future__ import annotations

import re

import torch

from superscaler_core.training.optimizer_state import Keeper

_PER_TENSOR = (
    *("muon", "shampoo", "adafactor", "galore", "novograd", "adammini", "kfac", "adalomo"),
    *("ranger", "psgd", "scion", "splus"),
)
"""Parts of names of optimizers that need whole tensors: their products, norms or means."""

_PER_TENSOR_EXACTLY = ("soap", "lamb", "fusedlamb", "lars", "came", "sm3", "kron", "apolloadamw")
"""Names of such optimizers that are parts of other words too."""

_OVER_ALL = ("lbfgs", "prodigy", "dadapt")
_OVER_ALL_EXACTLY = ("sam", "asam", "gsam", "wsam", "looksam", "adai", "lomo")
"""Names of optimizers that need products or norms over all parameters together."""

_PER_ELEMENT_EXACTLY = (
    *("lion", "adabelief", "adan", "tiger", "signum"),
    *("fusedadam", "fusedsgd", "deepspeedcpuadam"),
)
"""Names of optimizers, besides torch's, that are known to work element by element."""

_DRESS = re.compile(r"_|\d+bit$")
"""What names of the same optimizer have more, as ``LAMB8bit``."""

_OF_SAM = {"rho", "adaptive"}
"""Options that SAM leaves in the groups which it shares with the optimizer that it wraps."""


def needs_of(optimizer: torch.optim.Optimizer) -> tuple[str | None, bool]:
    """The class of an optimizer that needs whole tensors, and whether it needs all of them.

    One that has whole tensors besides the boxes in its groups (``optim.whole``) needs no more.
    """
    if isinstance(getattr(optimizer, "keeper", None), Keeper):
        return None, False
    kind, needs_all = needs_of_class(type(optimizer))
    if kind is None and any(group.keys() >= _OF_SAM for group in optimizer.param_groups):
        return "SAM", True
    return kind, needs_all


def needs_of_class(of: type) -> tuple[str | None, bool]:
    """As ``needs_of``, of a class."""
    for kind in of.__mro__:
        name = _DRESS.sub("", kind.__name__.lower())
        if name in _OVER_ALL_EXACTLY or any(part in name for part in _OVER_ALL):
            return kind.__name__, True
        if name in _PER_TENSOR_EXACTLY or any(part in name for part in _PER_TENSOR):
            return kind.__name__, False
    return None, False


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is known what an optimizer needs: torch's own, and those by these names."""
    of = type(optimizer)
    if needs_of(optimizer)[0] is not None or isinstance(getattr(optimizer, "keeper", None), Keeper):
        return True
    steps = next(kind for kind in of.__mro__ if "step" in vars(kind))
    name = _DRESS.sub("", of.__name__.lower())
    return steps.__module__.startswith("torch.optim.") or name in _PER_ELEMENT_EXACTLY
