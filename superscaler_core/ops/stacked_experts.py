"""Stacked experts: experts that are modules of their own, with their weights in one parameter each.

``stack_experts`` puts them in the place of a ``ModuleList``; the code around them stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree


class StackedExperts(nn.Module):
    """Experts that are alike, of which some or all are here.

    It is called as the list that it stands for: ``experts[i](x)``, or over all of them. What an
    expert that is elsewhere returns is zero.

    Law (tests/superscaler_core/ops/test_stacked_experts.py): ``experts[i](x)`` is what the i-th
    module of the list returned; a state dict of the list can be loaded.

    Args:
        experts: a list or a dict of modules with parameters of the same names and shapes.

    Attributes:
        num: experts of the whole mixture.
        first: number of the first expert that is here.
    """

    def __init__(self, experts: nn.ModuleList | nn.ModuleDict) -> None:
        super().__init__()
        self.keys_of = tuple(experts.keys()) if isinstance(experts, nn.ModuleDict) else None
        modules = list(experts.children())
        self.num, self.first = len(modules), 0
        # Not a module of this one, whose parameters are those of all experts.
        self.__dict__["template"] = copy.deepcopy(modules[0]).to("meta")
        for name, parameter in modules[0].named_parameters():
            owner: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            whole = torch.stack([module.get_parameter(name).detach() for module in modules])
            owner.register_parameter(last, nn.Parameter(whole, parameter.requires_grad))
        self.register_load_state_dict_pre_hook(_stacked_on_load)  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, key: Any) -> Callable[..., Any]:
        """The expert of a number, or of a key of the dict."""
        number = int(key) if self.keys_of is None else self.keys_of.index(key)
        return _Expert(self, number % self.num)

    def __iter__(self) -> Iterator[Any]:
        return iter(
            map(self.__getitem__, range(self.num)) if self.keys_of is None else self.keys_of
        )

    def keys(self) -> tuple[str, ...]:
        """The keys of the dict."""
        return self.keys_of or ()

    def values(self) -> list[Callable[..., Any]]:
        """All experts, in order."""
        return [_Expert(self, number) for number in range(self.num)]

    def items(self) -> list[tuple[str, Callable[..., Any]]]:
        """All experts with their keys."""
        return list(zip(self.keys(), self.values(), strict=True))

    def run(self, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What an expert returns."""
        state = dict(self.named_parameters())
        num_here = len(next(iter(state.values())))
        template: nn.Module = self.__dict__["template"].train(self.training)
        at = number - self.first
        if 0 <= at < num_here:
            own = {name: value[at] for name, value in state.items()}
            return functional_call(template, own, args, dict(kwargs))
        device = next((x.device for x in pytree.tree_leaves(args) if isinstance(x, Tensor)), None)
        given, named = pytree.tree_map_only(Tensor, lambda x: x.detach().to("meta"), (args, kwargs))
        with torch.no_grad():
            found = template(*given, **named)
        return pytree.tree_map_only(
            Tensor, lambda x: torch.zeros(x.shape, dtype=x.dtype, device=device), found
        )


class _Expert:
    """One of the experts, as a module that is called."""

    def __init__(self, experts: StackedExperts, number: int) -> None:
        self._experts, self._number = experts, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._experts.run(self._number, args, kwargs)

    forward = __call__


def _stacked_on_load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Make stacked tensors of those of a list, if a state dict has these."""
    assert isinstance(module, StackedExperts)
    keys = module.keys_of or tuple(map(str, range(module.num)))
    for name, _parameter in module.named_parameters():
        parts = [f"{prefix}{key}.{name}" for key in keys]
        if all(part in state for part in parts):
            state[f"{prefix}{name}"] = torch.stack([state.pop(part) for part in parts])


def stack_experts(model: nn.Module) -> nn.Module:
    """Stack the experts of a model that are modules of their own, so that plans can deal them out.

    Lists and dicts of modules are experts if these are alike, and the module that has the list also
    has a matrix with a row for each of them, which scores them. The model computes the same, also
    on one device. Its state dict has a stacked tensor in place of those of each expert, under the
    same name without the number, and loads one of the model as it was.

    Args:
        model: changed in place.

    Returns:
        The model.

    >>> block = nn.Module()
    >>> block.gate = nn.Linear(4, 2)
    >>> block.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    >>> [(name, list(p.shape)) for name, p in stack_experts(block).named_parameters()][-2:]
    [('experts.weight', [2, 4, 4]), ('experts.bias', [2, 4])]
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.ModuleList | nn.ModuleDict) and _are_experts(parent, child):
                setattr(parent, name, StackedExperts(child))
    return model


def _are_experts(parent: nn.Module, experts: nn.ModuleList | nn.ModuleDict) -> bool:
    modules = list(experts.children())
    shapes = [{n: p.shape for n, p in module.named_parameters()} for module in modules]
    if len(modules) < 2 or not shapes[0] or any(each != shapes[0] for each in shapes):
        return False
    if any(buffer is not None for module in modules for buffer in module.buffers()):
        return False
    others = (c for c in parent.children() if c is not experts)
    scores = [p for c in others for p in c.parameters()] + list(parent.parameters(recurse=False))
    return any(p.dim() == 2 and p.shape[0] == len(modules) for p in scores)
