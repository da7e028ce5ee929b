"""Holding: what the fullest device needs under a setting, by degrees and bytes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from superscaler_core.plan import Keep
from superscaler_core.planners.auto.bounds import Bounds
from superscaler_core.planners.auto.setting import Setting
from superscaler_core.planners.auto.traits import Traits, kept_bytes, kept_sizes

LEFT: Mapping[Keep, float] = {
    Keep.EVERYTHING: 1.0,
    Keep.ATTENTION_ONLY: 0.4,
    Keep.SEGMENT_INPUTS: 0.2,
    Keep.BLOCK_INPUTS: 0.05,
    Keep.STAGE_INPUT: 0.02,
}
"""What is left of what is kept, about the least that models have."""

LEFT_HEAVY = 0.5
"""The same of a model of which the blocks that keep most are in parts."""

FETCHED_BLOCKS, COPIES = 2, 3
"""Blocks whose weights are there at once, if they are fetched, and how often: as weights, as
gradients, and in buffers of communication."""


@dataclass(frozen=True, eq=False)
class Holding:
    """Estimates for one request, in no direction.

    Attributes:
        traits: of the model, with its smallest microbatch.
        bounds: of the request.
    """

    traits: Traits
    bounds: Bounds

    def num_bytes(self, setting: Setting) -> float:
        """All that the fullest device holds."""
        return self.stored_bytes(setting) + self.kept_bytes(setting)

    def smaller_bytes(self, setting: Setting, peak_bytes: float, changed: Setting) -> float:
        """The same of a changed setting, given what was seen without the change."""
        kept = peak_bytes - self.stored_bytes(setting)
        share = self.kept_bytes(changed) / self.kept_bytes(setting)
        return self.stored_bytes(changed) + max(0.0, kept) * share

    # --- weights --------------------------------------------------------------------------------

    def stored_bytes(self, setting: Setting) -> float:
        """Weights, gradients and states of the fullest stage, which has the words of the model."""
        weights, states = self.bounds.trained_bytes
        states_per_byte = states / weights if weights else 0.0
        held, size = self.held_bytes(setting), replicas(setting)[1]
        if setting.zero == 3:
            own = 0.0 if setting.offload else (2 + states_per_byte) * held / size
            return own + COPIES * self._fetched_bytes(setting)
        # Without windows, weights that are stored on the host are on the device during a step.
        states = 0.0 if setting.offload else states_per_byte * held
        return 2 * held + states / (size if setting.zero else 1)

    def held_bytes(self, setting: Setting) -> float:
        """Weights that a device computes with."""
        weights, cut = self.bounds.trained_bytes[0], replicas(setting)[0]
        if setting.family == "interlaced":
            return weights / cut
        dealt = self.traits.expert_bytes if setting.experts else 0
        rest = weights - self.traits.word_bytes - dealt
        return self._words_bytes(setting) + (rest + dealt / setting.dp) / cut

    def _words_bytes(self, setting: Setting) -> float:
        return self.traits.word_bytes / (setting.tp if setting.vocabulary else 1)

    def _fetched_bytes(self, setting: Setting) -> float:
        """Weights that are there at once, if they are fetched: words, or some blocks."""
        blocks = FETCHED_BLOCKS * self.bounds.trained_bytes[0] / self.traits.num_layers
        return max(self._words_bytes(setting), blocks * setting.pp / replicas(setting)[0])

    # --- what backwards need --------------------------------------------------------------------

    def kept_bytes(self, setting: Setting) -> float:
        """What backwards need.

        The first stage of a pipeline of n has n microbatches of an n-th of the blocks.
        """
        left = LEFT[setting.keep]
        if setting.heavy:
            left *= LEFT_HEAVY
        elif setting.coshard > 1:
            left = min(left, LEFT[Keep.BLOCK_INPUTS])
        behind = self._behind_bytes / (setting.tp if setting.vocabulary else 1)
        kept = self._among(setting, left * self._block_bytes) + behind
        if left < 1:
            # One block is computed again at a time, or a part of it.
            kept += self._among(setting, self._largest_bytes) / setting.coshard
        return kept * setting.samples / self.bounds.request.samples[0]

    def _among(self, setting: Setting, num_bytes: float) -> float:
        """What a device has of so many bytes of blocks; those that are whole on it stay longest."""
        if setting.sequence or setting.family in ROWS:
            return num_bytes / setting.tp
        whole = min(num_bytes, self._whole_bytes)
        return whole + (num_bytes - whole) / setting.tp

    @cached_property
    def _block_bytes(self) -> float:
        return self.bounds.kept_bytes - self._behind_bytes

    @cached_property
    def _behind_bytes(self) -> int:
        """What the ops behind all blocks keep, such as scores of words."""
        behind = kept_bytes(self.traits.graph, self.traits.blocks.behind)
        return min(self.bounds.kept_bytes, behind)

    @cached_property
    def _largest_bytes(self) -> int:
        """What the block keeps that keeps most."""
        blocks = self.traits.blocks
        return max(kept_bytes(blocks.graph, ops) for ops in blocks.layers)

    @cached_property
    def _whole_bytes(self) -> float:
        """What has no features that tensor parallel cuts."""
        if not self.traits.has_features:
            return self._block_bytes
        inner, dims = {*self.traits.blocks.inner}, self.traits.blocks.dims
        kept = kept_sizes(self.traits.graph)
        whole = sum(size for tensor, size in kept if not inner & {*dims.of_tensor(tensor)})
        return max(0.0, whole - self._behind_bytes)


ROWS = ("axial", "spatial")
"""Families that cut rows and columns, not features; all of a stage's devices have its weights."""


def replicas(setting: Setting) -> tuple[int, int, int]:
    """Into how many parts weights are cut, how many devices have each, and how far apart."""
    if setting.family in ROWS:
        return setting.pp, setting.dp * setting.tp, 1
    return setting.pp * setting.tp, setting.dp, setting.tp
