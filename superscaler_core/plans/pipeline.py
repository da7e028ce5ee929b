"""Pipeline: stages of blocks on groups of devices, in the order of one schedule.

Every pipeline is this plan with another row of ``SCHEDULES``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from typing import Any

from superscaler_core.plan import Plan
from superscaler_core.plans.pieces.grid_stages import grid_stages
from superscaler_core.schedules import SCHEDULES


@dataclass(frozen=True)
class Pipeline:
    """An sProgram that puts equally many blocks on every stage, and runs them by a schedule.

    A microbatch sends the hidden state from stage to stage, and its gradient back. Memory per
    group: the weights of its stages, and the activations of as many microbatches as the schedule
    holds.

    Attributes:
        schedule: a name of ``SCHEDULES``.
        about: how it differs from other pipelines: communication, memory, and its source.
        microbatches: the default number of microbatches; 0 is ``per_worker`` for every worker.
        per_worker: microbatches per worker.

    >>> Pipeline("interleaved").options["chunks"]
    2
    """

    schedule: str
    about: str = ""
    microbatches: int = 8
    per_worker: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """The options with their defaults: those of all pipelines, and those of the schedule."""
        further = [*signature(SCHEDULES[self.schedule]).parameters.values()][2:]
        own = {p.name: _DEFAULTS.get(p.name, p.default) for p in further}
        first = {"pp": 0, "tp": 1, "microbatches": self.microbatches}
        return {**first, **own, "sizes": ()}

    @property
    def __signature__(self) -> Signature:
        plan = Parameter("plan", Parameter.POSITIONAL_OR_KEYWORD)
        options = self.options.items()
        return Signature(
            [plan, *(Parameter(n, Parameter.KEYWORD_ONLY, default=d) for n, d in options)]
        )

    @property
    def __name__(self) -> str:
        return self.schedule.replace("-", "_")

    def __call__(
        self,
        plan: Plan,
        *,
        pp: int = 0,
        tp: int = 1,
        microbatches: int | None = None,
        sizes: Sequence[int] = (),
        **more: Any,
    ) -> None:
        """Fill a plan.

        Args:
            plan: to fill.
            pp: groups of devices; if 0, as many as there are groups of ``tp`` devices.
            tp: devices of a group that share a stage's inner features; the batch is cut among the
                rest of the group.
            microbatches: number per step, each as large as the captured batch.
            sizes: blocks of every stage, as in ``stages_of_blocks``.
            more: further arguments of the schedule, such as ``chunks``.

        Raises:
            PlanError: ``tp * pp`` does not divide the devices.
            ScheduleError: the schedule does not take these counts.
        """
        workers = pp or len(plan.devices) // tp
        num = self.microbatches if microbatches is None else microbatches
        own = {name: value for name, value in _DEFAULTS.items() if name in self.options}
        order = SCHEDULES[self.schedule](workers, num or self.per_worker * workers, **own | more)
        grid_stages(plan, order, tp, sizes=sizes)


_DEFAULTS = {"chunks": 2}
"""Defaults of options of schedules where a plan's differ: one chunk would be plain 1F1B."""

PIPELINES = {
    "gpipe": Pipeline(
        "gpipe",
        "All forwards run before all backwards. Memory per group: the activations of all "
        "microbatches in its stage. Source: Huang et al., GPipe, 2019.",
    ),
    "one_f_one_b": Pipeline(
        "1f1b",
        "A backward runs as soon as one is ready. Memory per group: activations of at most pp - s "
        "microbatches on stage s. Source: Narayanan et al., PipeDream, 2019 (with a flush after "
        "every step).",
    ),
    "interleaved": Pipeline(
        "interleaved",
        "Stages are dealt out to the groups in turn, chunks to each. The hidden state is sent "
        "chunks times as often as under 1F1B, and devices are idle for 1/chunks as long. Memory "
        "per group: activations of 1 + (pp - 1)/(pp * chunks) times what 1F1B holds on its first "
        "stage. Source: Narayanan et al., Efficient large-scale language model training on GPU "
        "clusters, 2021.",
    ),
    "zero_bubble": Pipeline(
        "zero-bubble",
        "1F1B with backwards in halves; the halves for weights wait (ZB-H1). Devices are idle for "
        "about a third as long. Memory per group: activations of pp microbatches. Source: Qi et "
        "al., Zero Bubble Pipeline Parallelism, 2023.",
    ),
    "zero_bubble_v": Pipeline(
        "zero-bubble-v",
        "Stages go down the groups and come back (ZB-V). If F, I and W take equally long, no group "
        "waits between its first and its last action. Memory per group: activations of 2 pp "
        "microbatches of one of the 2 pp stages. Source: as zero_bubble.",
        microbatches=0,
        per_worker=2,
    ),
    "dualpipe": Pipeline(
        "dualpipe",
        "Half of the microbatches go down an even number of groups, and half of them up, in pairs "
        "of a forward and a backward; with Overlap(pairs=True), one of a pair computes while the "
        "other communicates. Memory per group: 2/pp of the weights, and activations of up to "
        "pp + 1 microbatches. Source: DeepSeek-AI, DeepSeek-V3 technical report, 2024.",
        microbatches=0,
        per_worker=2,
    ),
    "dualpipe_v": Pipeline(
        "dualpipe-v",
        "The stages of zero_bubble_v, in an order that pairs every forward with a backward. Memory "
        "per group: activations of up to 2 pp + 1 microbatches of one of the 2 pp stages. Source: "
        "Sea AI Lab, cut-in-half, 2025; DeepSeek's public code.",
        microbatches=0,
        per_worker=2,
    ),
}
"""The pipelines of this package, by the names of their plans."""
