"""Parameter groups by names: what each rank was given of them, and together what all were given."""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import prod
from typing import Any

from torch import Tensor

from superscaler_core.errors import PlanError
from superscaler_core.training.trainer import Trainer

Parameters = Iterable[Any] | None
"""Parameters, pairs of a name and a parameter, names, or groups of these as dicts with options."""

Group = tuple[list[str], dict[str, Any]]
"""The names of a group's parameters, and its further options."""


def named_groups(params: Parameters, trainer: Trainer) -> list[Group]:
    """The groups that this rank was given; one of all parameters for None.

    Raises:
        PlanError: something is no parameter of the model.
    """
    if params is None:
        return [([*trainer.entries], {})]
    given = [params] if isinstance(params, dict) else list(params)
    dicts = given if any(isinstance(one, dict) for one in given) else [{"params": given}]
    stored = {id(parameter): name for name, parameter in trainer.named_parameters()}
    found = []
    for group in dicts:
        if not isinstance(group, dict):
            raise PlanError(f"whole takes parameters or groups, not both: {group!r:.80}.")
        more = {key: value for key, value in group.items() if key != "params"}
        listed = group["params"]
        listed = [listed] if isinstance(listed, Tensor | str) else listed
        found.append(([_name(one, stored, trainer) for one in listed], more))
    return found


def _name(one: Any, stored: dict[int, str], trainer: Trainer) -> str:
    """The name of a parameter that was given by itself, by name, or as a pair."""
    one = one[0] if isinstance(one, tuple) else one
    name = one if isinstance(one, str) else stored.get(id(one), "")
    name = trainer.aliases.get(name, name)
    if name not in trainer.entries:
        raise PlanError(
            f"whole steps {one if isinstance(one, str) else 'a tensor'!r:.80}, which is no "
            "parameter of the model: give parameters() of what parallelize returned, or names."
        )
    return name


def united(mine: list[Group], trainer: Trainer, call: str) -> list[Group]:
    """The groups with the parameters of all ranks, in the order of the model; collective.

    Raises:
        PlanError: ranks give other numbers of groups, or a parameter is in two of them.
    """
    texts = trainer.calls.texts(json.dumps([names for names, _ in mine])).values()
    said = [json.loads(text) for text in texts]
    with trainer.calls.prepared(call) as request:
        request.equal["the number of groups"] = str(len(mine))
    together = [set().union(*by_rank) for by_rank in zip(*said, strict=True)]
    # A parameter without elements needs no step.
    kept = [name for name, entry in trainer.entries.items() if prod(entry.shape)]
    if twice := [n for n in kept if sum(n in names for names in together) > 1]:
        raise PlanError(f"{call}: {twice[0]!r} is in two groups of parameters.")
    pairs = zip(together, mine, strict=True)
    return [([name for name in kept if name in names], more) for names, (_, more) in pairs]
