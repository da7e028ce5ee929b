"""Holding: estimate the memory of the fullest device from degrees and bytes alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from superscaler_core.planners.auto.bounds import Bounds
from superscaler_core.planners.auto.flight import Flight, flight_of
from superscaler_core.planners.auto.kept import Kept
from superscaler_core.planners.auto.setting import ROWS, Setting
from superscaler_core.planners.auto.traits import Traits, traits_of
from superscaler_core.planners.auto.uneven import Uneven
from superscaler_core.planners.search.request import Request

FETCHED_BLOCKS, COPIES = 2, 3
"""Blocks whose fetched weights are held at once, and their copies: weights, gradients, buffers."""


@dataclass(frozen=True, eq=False)
class Holding:
    """Estimates (not bounds) for one request, from its two smallest microbatches."""

    request: Request

    def num_bytes(self, setting: Setting) -> float:
        """Bytes on the fullest device."""
        return sum(self._fullest(setting))

    def smaller_bytes(self, setting: Setting, peak_bytes: float, changed: Setting) -> float:
        """Bytes on the fullest device under ``changed``, if ``setting`` needs ``peak_bytes``."""
        (stored, kept), (new_stored, new_kept) = map(self._fullest, (setting, changed))
        return new_stored + max(0.0, peak_bytes - stored) * new_kept / kept

    def _fullest(self, setting: Setting) -> tuple[float, float]:
        """Stored and kept bytes of the stage with the largest sum of the two."""
        stored, kept = self.stored_bytes(setting), self.kept_bytes(setting)
        factors = self._uneven.factors(setting)
        return max(((a * stored, b * kept) for a, b in factors), key=sum)

    # --- weights --------------------------------------------------------------------------------

    def stored_bytes(self, setting: Setting) -> float:
        """Bytes of weights, gradients and states of a mean stage, with all word tables."""
        bounds, held, size = self._bounds, self.held_bytes(setting), replicas(setting)[1]
        pieces = self.shared_bytes(setting) / size + self.own_expert_bytes(setting)
        both, states_per_byte = 1.0, 0.0
        if bounds.weight_bytes:
            both += bounds.gradient_bytes / bounds.weight_bytes
            states_per_byte = bounds.state_bytes / bounds.weight_bytes
        if setting.zero == 3:
            own = 0.0 if setting.offload else (both + states_per_byte) * pieces
            return own + COPIES * self._fetched_bytes(setting)
        # Without windows, weights that are stored on the host are on the device during a step.
        states = 0.0 if setting.offload else states_per_byte
        return both * held + states * (pieces if setting.zero else held)

    def held_bytes(self, setting: Setting) -> float:
        """Bytes of the weights with which a device computes."""
        return self.shared_bytes(setting) + self.own_expert_bytes(setting)

    def shared_bytes(self, setting: Setting) -> float:
        """Bytes of the weights with which a device and its replicas compute."""
        weights, cut = self._bounds.weight_bytes, self._cut(setting)
        if setting.family == "interlaced":
            return weights / cut
        dealt = self._traits.expert_bytes if setting.experts else 0
        return self._words_bytes(setting) + (weights - self._traits.word_bytes - dealt) / cut

    def own_expert_bytes(self, setting: Setting) -> float:
        """Bytes of a device's own experts under expert parallelism; they are never fetched."""
        if not setting.experts:
            return 0.0
        return self._traits.expert_bytes / setting.dp / self._cut(setting)

    def layer_bytes(self, setting: Setting) -> tuple[int, ...]:
        """Bytes of each block's weights that all replicas have, before tensor parallelism."""
        return self._traits.shared_layer_bytes if setting.experts else self._traits.layer_bytes

    def _cut(self, setting: Setting) -> float:
        return replicas(setting)[0] / self._flight(setting).copies

    def _words_bytes(self, setting: Setting) -> float:
        return self._traits.word_bytes / (setting.tp if setting.vocabulary else 1)

    def _fetched_bytes(self, setting: Setting) -> float:
        """Most bytes of fetched weights at once: the word tables, or neighbouring blocks."""
        layers = self.layer_bytes(setting)
        runs = (sum(layers[i : i + FETCHED_BLOCKS]) for i in range(len(layers)))
        return max(self._words_bytes(setting), max(runs) * setting.pp / replicas(setting)[0])

    # --- what backwards need --------------------------------------------------------------------

    def kept_bytes(self, setting: Setting) -> float:
        """Bytes that backwards need if all stages are alike.

        Some, such as masks, do not grow with the microbatch.
        """
        flight, sizes = self._flight(setting), [*self._kept]
        first = self._kept[sizes[0]].num_bytes(setting, flight)
        if len(sizes) == 1:
            return first * setting.samples / sizes[0]
        grown = self._kept[sizes[1]].num_bytes(setting, flight) - first
        return first + grown * (setting.samples - sizes[0]) / (sizes[1] - sizes[0])

    def _flight(self, setting: Setting) -> Flight:
        return flight_of(setting, self.request.microbatches(setting.microbatch))

    @cached_property
    def _kept(self) -> dict[int, Kept]:
        """The estimates for one or two sizes of microbatches, by size in samples."""
        request = self.request
        return {n: Kept(traits_of(request.graph_of(n))) for n in request.samples[:2]}

    @cached_property
    def _traits(self) -> Traits:
        return traits_of(self.request.graph_of(self.request.samples[0]))

    @cached_property
    def _uneven(self) -> Uneven:
        return Uneven(self.request)

    @cached_property
    def _bounds(self) -> Bounds:
        return Bounds(self.request)


def replicas(setting: Setting) -> tuple[int, int, int]:
    """Parts into which weights are cut, devices that hold each part, and these devices' stride."""
    if setting.family in ROWS:
        return setting.pp, setting.dp * setting.tp, 1
    return setting.pp * setting.tp, setting.dp, setting.tp
