"""The state of optimizers by parameter names, so that other plans and single devices can read it.

An optimizer that works element by element keeps, for each parameter, tensors of the parameter's
shape (``exp_avg``) and plain values (``step``). On a rank these tensors have the shape of the box
that the rank stores, so they can be saved in the layout of the parameter. One that needs whole
parameters may keep tensors of other shapes (the factors of Shampoo), which ranks that have the
parameter whole have whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
        others: the dtypes and shapes of tensors of other shapes, by key.
    """

    values: Mapping[str, Any]
    tensors: Mapping[str, str]
    others: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    @classmethod
    def of_plain(cls, value: list[Any]) -> Self:
        """An entry of the list of its attributes.

        Raises:
            ValueError, TypeError: the value has another form.
        """
        values, tensors, *rest = value
        others = {key: (name, tuple(shape)) for key, (name, shape) in (rest or [{}])[0].items()}
        names = [*dict(tensors).values(), *(name for name, _ in others.values())]
        dtypes = [getattr(torch, name, None) for name in names]
        if not isinstance(values, dict) or not all(isinstance(d, torch.dtype) for d in dtypes):
            raise TypeError(f"a state of an optimizer is {value!r:.80}")
        return cls(values, tensors, others)

    @property
    def plain(self) -> list[Any]:
        """The entry as a plain value; without others as saves of earlier releases have it."""
        others = {key: [dtype, [*shape]] for key, (dtype, shape) in self.others.items()}
        return [self.values, self.tensors, *([others] if others else [])]


@dataclass(frozen=True)
class ParamGroup:
    """Parameters whose optimizers have the same class and options, with an entry for each."""

    kind: str
    options: Mapping[str, Any]
    entries: Mapping[str, StateEntry]

    @property
    def plain(self) -> list[Any]:
        """The group as a plain value."""
        return [self.kind, self.options, {name: e.plain for name, e in self.entries.items()}]

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


@dataclass(frozen=True)
class Keeper:
    """An optimizer that keeps states, and the tensors for which it does.

    Attributes:
        optimizer: the optimizer.
        tensors: its parameters on this rank, by name.
        is_whole: whether these are whole, wherever the rank stores boxes of them.
        restored: called when the optimizer got another state.
    """

    optimizer: Optimizer
    tensors: Mapping[str, Tensor]
    is_whole: bool = False
    restored: Callable[[], None] = lambda: None


def keepers_of(optimizers: Iterable[Optimizer], stored: Mapping[str, Tensor]) -> list[Keeper]:
    """What keeps the states of optimizers over parameters that are ``stored`` on this rank.

    An optimizer that has whole parameters besides (``optim.whole``) has a ``keeper`` of its own.
    """
    return [getattr(optimizer, "keeper", Keeper(optimizer, stored)) for optimizer in optimizers]


def groups_of(keepers: Iterable[Keeper], cut: Collection[str]) -> list[ParamGroup]:
    """The groups of optimizers.

    Args:
        keepers: what keeps the states.
        cut: names of parameters of which this rank stores a part only.

    Raises:
        PlanError: an optimizer updates a tensor that is not stored here, two update one parameter,
            or a tensor of a state is no scalar and has another shape than its parameter, of which
            this rank has a part only.
    """
    groups: list[ParamGroup] = []
    for keeper in keepers:
        kind = type(keeper.optimizer).__name__
        for group, parameters in _named(keeper):
            options = {key: value for key, value in group.items() if key not in _NO_OPTIONS}
            entries = {}
            for name, parameter in parameters.items():
                if any(name in other.entries for other in groups):
                    raise PlanError(f"two optimizers update {name}.")
                state = keeper.optimizer.state.get(parameter, {})
                like, others = _like(parameter, state), _others(parameter, state)
                if others and name in cut and not keeper.is_whole:
                    raise _shape_error(kind, name, parameter, others)
                entries[name] = StateEntry(
                    {k: v for k, v in state.items() if k not in like and k not in others},
                    {k: _name(v.dtype) for k, v in like.items()},
                    {k: (_name(v.dtype), tuple(v.shape)) for k, v in others.items()},
                )
            groups.append(ParamGroup(kind, options, entries))
    return groups


def tensors_of(keeper: Keeper) -> dict[str, dict[str, Tensor]]:
    """By parameter and key, the state's tensors that have dims or the parameter's shape."""
    found = {}
    for _, parameters in _named(keeper):
        for name, parameter in parameters.items():
            state = keeper.optimizer.state.get(parameter, {})
            found[name] = {**_like(parameter, state), **_others(parameter, state)}
    return found


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
            text = key + text_of(entry.plain, f"the state of {name}")
            if known.setdefault(name, text) != text:
                raise PlanError(
                    f"the ranks that store {name} have different optimizers, options or values "
                    "for it; each of them has to make the same optimizer and the same steps."
                )
        entries = {**(found[key].entries if key in found else {}), **group.entries}
        found[key] = ParamGroup(group.kind, group.options, entries)
    return list(found.values())


def check_fits(keeper: Keeper, groups: Sequence[ParamGroup], cut: Collection[str] = ()) -> None:
    """Check that an optimizer can take a saved state.

    Args:
        keeper: the optimizer.
        groups: the saved groups, of all parameters.
        cut: names of parameters of which this rank stores a part only.

    Raises:
        PlanError: the state has another class of optimizer, lacks a parameter, has different
            options for parameters that are now in one group, or has tensors of other shapes of
            parameters that are cut.
    """
    home = {name: group for group in groups for name in group.entries}
    kind = type(keeper.optimizer).__name__
    for _, parameters in _named(keeper):
        for name, parameter in parameters.items():
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
            others = home[name].entries[name].others
            if others and name in cut and not keeper.is_whole:
                raise _shape_error(kind, name, parameter, others)
        options = {text_of(home[name].options, "options"): name for name in parameters}
        if len(options) > 1:
            a, b, *_ = options.values()
            raise PlanError(
                f"{a} and {b} are in one group of {kind}, and were saved with different options: "
                f"{_difference(home[a].options, home[b].options)}."
            )


def restore(
    keeper: Keeper,
    groups: Sequence[ParamGroup],
    tensors: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Let an optimizer continue from a state that fits it.

    Args:
        keeper: the optimizer.
        groups: the saved groups, of all parameters.
        tensors: the saved tensors, as ``tensors_of`` returns them.
    """
    optimizer = keeper.optimizer
    home = {name: group for group in groups for name in group.entries}
    fresh, state = [], {}
    own = optimizer.state_dict()["param_groups"]
    for group, (_, parameters) in zip(own, _named(keeper), strict=True):
        options = home[next(iter(parameters))].options if parameters else {}
        fresh.append({**group, **options})
        for number, name in zip(group["params"], parameters, strict=True):
            entry = home[name].entries[name]
            if entry.values or entry.tensors or entry.others:
                keys = (*entry.tensors, *entry.others)
                state[number] = {**entry.values, **{key: tensors[name][key] for key in keys}}
    optimizer.load_state_dict({"state": state, "param_groups": fresh})
    # torch casts all tensors of a state to the parameter's dtype. Scalars of another dtype are
    # restored in their own: NAdam's running products would otherwise round differently.
    for _, parameters in _named(keeper):
        for name, parameter in parameters.items():
            held = optimizer.state.get(parameter, {})
            for key, value in home[name].entries[name].values.items():
                if isinstance(value, Tensor):
                    held[key] = value.to(held[key].device)
    keeper.restored()


def _named(keeper: Keeper) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    """The groups of an optimizer, each with its parameters by name."""
    optimizer, stored = keeper.optimizer, keeper.tensors
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


def _others(parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state with dims and another shape than the parameter's."""
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape_error(kind: str, name: str, parameter: Tensor, others: Mapping[str, Any]) -> PlanError:
    key, value = next(iter(others.items()))
    shape = [*(value.shape if isinstance(value, Tensor) else value[1])]
    return PlanError(
        f"{kind} keeps {key} {shape} for {name}, of which this rank stores {list(parameter.shape)}:"
        " a state of another shape than its parameter belongs to the whole parameter; wrap the "
        "optimizer, optim.whole(CLASS, model, OPTIONS), or use a plan that stores it whole."
    )


def _difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    keys = [key for key in a if key not in b or text_of(a[key], key) != text_of(b[key], key)]
    return ", ".join(f"{key}={a[key]} and {b.get(key)}" for key in keys)
