"""Uneven: how the stages of a pipeline differ in weights and in kept activations.

The blocks of one model differ, and stages of equal time hold different amounts. The first blocks of
an image model keep most, where 1F1B has most microbatches in flight. An encoder's blocks keep less
than a decoder's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from superscaler_core.plan import Keep
from superscaler_core.planners.auto.families import Filling
from superscaler_core.planners.auto.setting import Setting
from superscaler_core.planners.auto.traits import Traits, kept_bytes, traits_of
from superscaler_core.planners.search.request import Request

EVEN = ((1.0, 1.0),)
"""The factors of stages that are all alike, or of which a worker has early and late ones."""

KEPT_INSIDE = (Keep.EVERYTHING, Keep.ATTENTION_ONLY, Keep.SEGMENT_INPUTS)
"""Levels of recomputation under which blocks keep more than their inputs."""

IN_ORDER = ("interleaved", "zero-bubble", "zero-bubble-h2")
"""Schedules under which worker i has stage i, if each has one, and most in flight at worker 0."""


@dataclass(frozen=True, eq=False)
class Uneven:
    """Estimates (not bounds) for one request, from its smallest microbatch."""

    request: Request

    def factors(self, setting: Setting) -> Sequence[tuple[float, float]]:
        """For each stage, its weights and its activations in flight.

        Weights are relative to the mean of all stages, and activations to those of the first
        worker, if all stages were alike.
        """
        num, is_interlaced = setting.pp, setting.family == "interlaced"
        if num == 1 or setting.chunks > 1 or setting.schedule not in IN_ORDER:
            return EVEN
        if is_interlaced and not self._traits.has_lookups:
            return EVEN
        key = num, is_interlaced, setting.keep in KEPT_INSIDE
        if key not in self._known:
            self._known[key] = self._factors(setting)
        return self._known[key]

    def _factors(self, setting: Setting) -> Sequence[tuple[float, float]]:
        num, profile = setting.pp, self.request.profile
        sizes = Filling(setting, profile, self.request.recycle, num).sizes(self._traits.blocks)
        if sum(sizes) != len(self._weights):
            return EVEN
        kept = self._kept if setting.keep in KEPT_INSIDE else self._read
        weights, held = _shares(self._weights, sizes), _shares(kept, sizes)
        flights = ((num - i) / num for i in range(num))
        return [(a, b * c) for a, b, c in zip(weights, held, flights, strict=True)]

    @cached_property
    def _known(self) -> dict[tuple[int, bool, bool], Sequence[tuple[float, float]]]:
        return {}

    @cached_property
    def _traits(self) -> Traits:
        return traits_of(self.request.graph_of(self.request.samples[0]))

    @cached_property
    def _weights(self) -> list[int]:
        """Bytes of every block's weights; a decoder's first block may look up words as well."""
        traits = self._traits
        tables = {*traits.word_tables}
        held = [{t for op in layer for t in op.parameters} for layer in traits.blocks.layers]
        return [sum(t.num_bytes for t in weights - tables) for weights in held]

    @cached_property
    def _kept(self) -> list[int]:
        blocks = self._traits.blocks
        return [kept_bytes(blocks.graph, layer) for layer in blocks.layers]

    @cached_property
    def _read(self) -> list[int]:
        return [sum(t.num_bytes for t in read) for read in self._traits.layer_inputs]


def _shares(blocks: Sequence[int], sizes: Sequence[int]) -> list[float]:
    """What stages of ``sizes`` blocks have, relative to their mean."""
    ends = accumulate(sizes, initial=0)
    mean = sum(blocks) / len(sizes) or 1.0
    return [sum(blocks[a:b]) / mean for a, b in pairwise(ends)]
