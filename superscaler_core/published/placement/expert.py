"""Expert: a placement by hand, as a rule from the names of operations to devices.

Nothing is searched. Source: the baseline of that name in Mirhoseini et al., ICML 2017. There, each
layer of LSTMs has a device of its own, attention and softmax are beside the last layer, and an
Inception is on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from superscaler_core.errors import PlanError
from superscaler_core.published.placement.problem import PlacementProblem
from superscaler_core.space import Solution

Rule = Callable[[str], int]
"""The device of an operation, by its name."""


def expert(problem: PlacementProblem, rule: Rule) -> Solution:
    """Place every group on the device that the rule gives to its first operation.

    Raises:
        PlanError: the rule names a device that does not exist, or the placement does not fit.
    """
    names = [problem.operations[members[0]].name for members in problem.groups]
    devices = [rule(name) for name in names]
    wrong = {
        n: d for n, d in zip(names, devices, strict=True) if d not in range(problem.num_devices)
    }
    if wrong:
        name, device = next(iter(wrong.items()))
        raise PlanError(
            f"expert: {name} on device {device}; the devices are 0 to {problem.num_devices - 1}."
        )
    return problem.solution(devices, "expert")


def by_patterns(devices: Mapping[str, int]) -> Rule:
    """A rule: the device of the first pattern with wildcards that fits a name.

    >>> by_patterns({"encoder.*": 0, "*": 1})("decoder.0")
    1
    """

    def device(name: str) -> int:
        found = [device for pattern, device in devices.items() if fnmatchcase(name, pattern)]
        if not found:
            raise PlanError(f"expert: no pattern of {', '.join(devices)} fits {name}; add '*'.")
        return found[0]

    return device
