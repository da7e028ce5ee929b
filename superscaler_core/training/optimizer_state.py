"""The state of optimizers by parameter names, so that other plans and single devices can read it.

An optimizer that works element by element keeps, for each parameter, tensors of the parameter's
shape (``exp_avg``) and plain values (``step``). On a rank these tensors have the shape of the box
that the rank stores, so they can be saved in the layout of the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from superscaler_core.errors import PlanError
from superscaler_core.training.plain import text_of

Optimizer = torch.optim.Optimizer

_NO_OPTIONS = ("params", "param_names")
"""Entries of an optimizer's group that are about its parameters."""


@dataclass(frozen=True)
class StateEntry:
    """The state that an optimizer keeps for one parameter.

    Attributes:
        values: plain values, by key.
        tensors: the dtypes of the tensors that have the parameter's shape, by key.
    """

    values: Mapping[str, Any]
    tensors: Mapping[str, str]

    @classmethod
    def of_plain(cls, value: list[Any]) -> Self:
        """An entry of the list of its attributes.

        Raises:
            ValueError, TypeError: the value has another form.
        """
        values, tensors = value
        dtypes = [getattr(torch, dtype, None) for dtype in dict(tensors).values()]
        if not isinstance(values, dict) or not all(isinstance(d, torch.dtype) for d in dtypes):
            raise TypeError(f"a state of an optimizer is {value!r:.80}")
        return cls(values, tensors)


@dataclass(frozen=True)
class ParamGroup:
    """Parameters whose optimizers have the same class and options, with an entry for each."""

    kind: str
    options: Mapping[str, Any]
    entries: Mapping[str, StateEntry]

    @property
    def plain(self) -> list[Any]:
        """The group as a plain value."""
        entries = {name: [e.values, e.tensors] for name, e in self.entries.items()}
        return [self.kind, self.options, entries]

    @classmethod
    def of_plain(cls, value: list[Any]) -> Self:
        """The inverse of ``plain``.

        Raises:
            ValueError, TypeError: the value has another form.
        """
        kind, options, entries = value
        if not isinstance(kind, str) or not isinstance(options, dict):
            raise TypeError(f"a group of an optimizer is {kind!r:.40} with {options!r:.40}")
        return cls(
            kind, options, {name: StateEntry.of_plain(e) for name, e in dict(entries).items()}
        )


def groups_of(optimizers: Iterable[Optimizer], stored: Mapping[str, Tensor]) -> list[ParamGroup]:
    """The groups of optimizers over parameters that are ``stored`` on this rank.

    Raises:
        PlanError: an optimizer updates a tensor that is not stored here, two update one parameter,
            or a tensor of a state is no scalar and has another shape than its parameter.
    """
    groups: list[ParamGroup] = []
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        for group, parameters in _named(optimizer, stored):
            options = {key: value for key, value in group.items() if key not in _NO_OPTIONS}
            entries = {}
            for name, parameter in parameters.items():
                if any(name in other.entries for other in groups):
                    raise PlanError(f"two optimizers update {name}.")
                state = optimizer.state.get(parameter, {})
                _check_shapes(kind, name, parameter, state)
                like = _like(parameter, state)
                entries[name] = StateEntry(
                    {key: value for key, value in state.items() if key not in like},
                    {k: str(v.dtype).removeprefix("torch.") for k, v in like.items()},
                )
            groups.append(ParamGroup(kind, options, entries))
    return groups


def tensors_of(
    optimizers: Iterable[Optimizer], stored: Mapping[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """By parameter and key, the state's tensors for this rank's box of the parameter."""
    return {
        name: _like(parameter, optimizer.state.get(parameter, {}))
        for optimizer in optimizers
        for _, parameters in _named(optimizer, stored)
        for name, parameter in parameters.items()
    }


def merged(groups: Iterable[ParamGroup]) -> list[ParamGroup]:
    """Groups of several ranks as one list; groups of equal class and options become one.

    Raises:
        PlanError: ranks disagree about a parameter.
    """
    found: dict[str, ParamGroup] = {}
    known: dict[str, str] = {}
    for group in groups:
        key = text_of([group.kind, group.options], f"an option of {group.kind}")
        for name, entry in group.entries.items():
            text = key + text_of([entry.values, entry.tensors], f"the state of {name}")
            if known.setdefault(name, text) != text:
                raise PlanError(
                    f"the ranks that store {name} have different optimizers, options or values "
                    "for it; each of them has to make the same optimizer and the same steps."
                )
        entries = {**(found[key].entries if key in found else {}), **group.entries}
        found[key] = ParamGroup(group.kind, group.options, entries)
    return list(found.values())


def check_fits(
    optimizer: Optimizer, groups: Sequence[ParamGroup], stored: Mapping[str, Tensor]
) -> None:
    """Check that an optimizer can take a saved state.

    Raises:
        PlanError: the state has another class of optimizer, lacks a parameter, or has different
            options for parameters that are now in one group.
    """
    home = {name: group for group in groups for name in group.entries}
    kind = type(optimizer).__name__
    for _, parameters in _named(optimizer, stored):
        for name in parameters:
            if name not in home:
                raise PlanError(
                    f"the saved state has nothing of {name}, which this {kind} updates; it has "
                    f"{len(home)} parameters: {', '.join([*home][:5])}."
                )
            if home[name].kind != kind:
                raise PlanError(
                    f"the saved state of {name} is of {home[name].kind}, and the optimizer is "
                    f"{kind}: make a {home[name].kind}, or load without optimizer."
                )
        options = {text_of(home[name].options, "options"): name for name in parameters}
        if len(options) > 1:
            a, b, *_ = options.values()
            raise PlanError(
                f"{a} and {b} are in one group of {kind}, and were saved with different options: "
                f"{_difference(home[a].options, home[b].options)}."
            )


def restore(
    optimizer: Optimizer,
    groups: Sequence[ParamGroup],
    tensors: Mapping[str, Mapping[str, Tensor]],
    stored: Mapping[str, Tensor],
) -> None:
    """Let an optimizer continue from a state that fits it.

    Args:
        optimizer: an optimizer over parameters that are stored here.
        groups: the saved groups, of all parameters.
        tensors: the saved tensors, as ``tensors_of`` returns them.
        stored: this rank's boxes of parameters, by name.
    """
    home = {name: group for group in groups for name in group.entries}
    fresh, state = [], {}
    own = optimizer.state_dict()["param_groups"]
    for group, (_, parameters) in zip(own, _named(optimizer, stored), strict=True):
        options = home[next(iter(parameters))].options if parameters else {}
        fresh.append({**group, **options})
        for number, name in zip(group["params"], parameters, strict=True):
            entry = home[name].entries[name]
            if entry.values or entry.tensors:
                state[number] = {**entry.values, **{k: tensors[name][k] for k in entry.tensors}}
    optimizer.load_state_dict({"state": state, "param_groups": fresh})
    # torch casts all tensors of a state to the parameter's dtype. Scalars of another dtype are
    # restored in their own: NAdam's running products would otherwise round differently.
    for _, parameters in _named(optimizer, stored):
        for name, parameter in parameters.items():
            held = optimizer.state.get(parameter, {})
            for key, value in home[name].entries[name].values.items():
                if isinstance(value, Tensor):
                    held[key] = value.to(held[key].device)


def _named(
    optimizer: Optimizer, stored: Mapping[str, Tensor]
) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    """The groups of an optimizer, each with its parameters by name."""
    names = {id(parameter): name for name, parameter in stored.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise PlanError(
                    f"{type(optimizer).__name__} updates a tensor of shape "
                    f"{list(parameter.shape)} that is none of trainer.parameters()."
                )
    return [
        (group, {names[id(parameter)]: parameter for parameter in group["params"]})
        for group in optimizer.param_groups
    ]


def _like(parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state with the parameter's shape; for a scalar parameter, also its dtype."""
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor)
        and value.shape == parameter.shape
        and (value.ndim or value.dtype == parameter.dtype)
    }


def _check_shapes(kind: str, name: str, parameter: Tensor, state: Mapping[str, Any]) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
            raise PlanError(
                f"{kind} keeps {key} {list(value.shape)} for {name} {list(parameter.shape)}: a "
                "state of another shape than its parameter cannot be saved in the parameter's "
                "layout; use an optimizer that works element by element."
            )


def _difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    keys = [key for key in a if key not in b or text_of(a[key], key) != text_of(b[key], key)]
    return ", ".join(f"{key}={a[key]} and {b.get(key)}" for key in keys)
