"""Competitors: training methods with their options, of which the fastest trains.

All functions are collective over the world.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import nn

from bench.machine.machine import NUM_WARM, STEPS_OF_VISIT
from bench.machine.method import Method, timed
from bench.machine.race import race
from bench.training.ours import FORMS, MESSAGES, Ours
from bench.training.torchs import WAYS
from bench.training.workloads import Batch, Workload


@dataclass(frozen=True)
class Option:
    """A way to make this rank's method, with the start values of the model.

    Attributes:
        make: makes the method.
        prepare: runs before; its memory is not counted.
    """

    make: Callable[[], Method]
    prepare: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Competitor:
    """A training method that is compared: the fastest of its options trains.

    Attributes:
        name: name for people.
        options: its options, by their texts.
    """

    name: str
    options: Mapping[str, Option]

    def tuned(self, batch: Batch) -> tuple[str, str]:
        """The option with the fastest steps in a race of all, and a text about the race."""
        names = [*self.options]
        for option in self.options.values():
            option.prepare()
        if len(names) == 1:
            return names[0], names[0]
        methods = [option.make() for option in self.options.values()]
        for method in methods:
            for _ in range(NUM_WARM):
                timed(method, batch)
        found = race(
            len(names), lambda i: [timed(methods[i], batch).step for _ in range(STEPS_OF_VISIT)]
        )
        best = next(iter(found))
        text = f"{names[best]}, {1e3 * found[best]:.1f} ms in a race of {len(names)}"
        return names[best], text


def competitors(
    workload: Workload, model: nn.Module, ours: Ours, plans: Sequence[str], against: Sequence[str]
) -> Mapping[str, Competitor]:
    """The competitors that can train a workload, by name.

    Args:
        workload: the model and its data.
        model: the model with the start values, which no competitor changes.
        ours: our programs.
        plans: names of ours: ``auto`` or a name of ``FORMS``, with or without ``MESSAGES``.
        against: names of ``WAYS``.
    """
    num, found = dist.get_world_size(), []
    for name in plans:
        executor = "dist" if name.endswith(MESSAGES) else "auto"
        forms = [*FORMS[name.removesuffix(MESSAGES)](num, workload)]
        options = {
            str(form): Option(partial(ours.share, form, executor), partial(ours.prepare, form))
            for form in forms
        }
        found.append(Competitor(name, options))
    for name in against:
        ways = WAYS[name](num, workload)
        options = {str(way): Option(partial(way, workload, model)) for way in ways}
        found.append(Competitor(name, options))
    return {each.name: each for each in found if each.options}


PAIRS: Mapping[str, str] = {
    "data_parallel": "ddp", "zero3": "fsdp2", "pipelined": "pipeline", "megatron": "tensor",
}  # fmt: skip
"""Our plans and the ways of torch that cut a model equally, by the name of ours."""
