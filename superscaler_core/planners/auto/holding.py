"""Holding: what the fullest device needs under a setting, by degrees and bytes alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from superscaler_core.graph.blocks import OpGroup
from superscaler_core.graph.dims import DimClass
from superscaler_core.graph.graph import Op
from superscaler_core.graph.tensor import PTensor
from superscaler_core.plan import Keep
from superscaler_core.planners.auto.bounds import Bounds
from superscaler_core.planners.auto.setting import Setting
from superscaler_core.planners.auto.traits import Traits, heavy_blocks, kept_sizes

SEGMENTS = 4.0
"""How often the bytes of all inputs of blocks are kept, if segments between communications are
computed again; without communication in a block it is one segment."""

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
        both = 1 + (self.bounds.gradient_bytes / weights if weights else 0.0)
        if setting.zero == 3:
            own = 0.0 if setting.offload else (both + states_per_byte) * held / size
            return own + COPIES * self._fetched_bytes(setting)
        # Without windows, weights that are stored on the host are on the device during a step.
        states = 0.0 if setting.offload else states_per_byte * held
        return both * held + states / (size if setting.zero else 1)

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

        The first stage of a pipeline of n has n microbatches of an n-th of the blocks. The fullest
        moment is either in the backward of what is behind the blocks, or in that of a block.
        """

        def own(whole: float, cut: float) -> float:
            is_spread = setting.sequence or setting.family in ROWS
            return whole / (setting.tp if is_spread else 1) + cut / setting.tp

        whole, cut = self._working
        behind = self._behind_bytes / (setting.tp if setting.vocabulary else 1)
        block = own(*self._computed_again(setting)) + own(whole, cut / setting.coshard)
        kept = own(*self._kept(setting)) + self._gathered_bytes(setting) + max(behind, block)
        return kept * setting.samples / self.bounds.request.samples[0]

    def _gathered_bytes(self, setting: Setting) -> float:
        """What maps read of which every device has some tokens: it is gathered and kept so."""
        is_kept = setting.keep not in (Keep.BLOCK_INPUTS, Keep.STAGE_INPUT)
        if not (setting.sequence and is_kept and setting.coshard == 1):
            return 0.0
        return self.traits.summed_bytes

    def _kept(self, setting: Setting) -> tuple[float, float]:
        """What is kept from forwards, as ``_kinds``."""
        whole, cut = self._light if setting.heavy else self._blocks
        if setting.keep is Keep.STAGE_INPUT:
            return setting.pp / self.traits.num_layers * self._input_bytes, 0.0
        if setting.keep in (Keep.SEGMENT_INPUTS, Keep.BLOCK_INPUTS):
            is_whole = setting.keep is Keep.BLOCK_INPUTS or not _communicates(setting)
            times = 1.0 if is_whole else SEGMENTS
            return min(times * self._input_bytes, float(whole + cut)), 0.0
        if setting.coshard > 1 and not setting.heavy:
            return whole, 0.0
        if setting.keep is Keep.ATTENTION_ONLY:
            return whole, cut * self._left_by_attentions
        return whole, cut

    def _computed_again(self, setting: Setting) -> tuple[float, float]:
        """What is there at once of what is computed again: a block, or a stage, or a part."""
        whole, cut = self._largest
        if setting.keep is Keep.EVERYTHING:
            return 0.0, cut / setting.coshard if setting.coshard > 1 else 0.0
        if setting.keep is not Keep.STAGE_INPUT:
            return whole, cut / setting.coshard
        stage_whole, stage_cut = (each / setting.pp for each in self._blocks)
        return stage_whole, cut / setting.coshard if setting.coshard > 1 else stage_cut

    @cached_property
    def _left_by_attentions(self) -> float:
        """The share of what has features that is not made and kept by ops of attentions."""
        attentions = sum(map(self._made_inside, self.traits.attentions))
        return 1 - attentions / max(1, self._kinds()[1])

    def _made_inside(self, ops: OpGroup) -> int:
        """Bytes with features that some ops keep of what they make."""
        inside, maker = {*ops}, self.traits.graph.producer
        kept = kept_sizes(self.traits.graph, ops)
        return self._split((tensor, size) for tensor, size in kept if maker[tensor] in inside)[1]

    @cached_property
    def _working(self) -> tuple[int, int]:
        """The most gradients that are there at once in a block, as ``_kinds``."""
        ops = (op for layer in self.traits.blocks.layers for op in layer)
        return max(map(self._gradients, ops), key=sum)

    def _gradients(self, op: Op) -> tuple[int, int]:
        """Those of what an op reads and makes, as ``_kinds``."""
        tensors = {*op.inputs, *op.outputs} - {*op.parameters}
        return self._split((t, t.num_bytes) for t in tensors if t.requires_grad)

    @cached_property
    def _behind_bytes(self) -> int:
        """What the ops behind all blocks keep, and the most of their gradients at once."""
        gradients = (sum(self._gradients(op)) for op in self.traits.blocks.behind)
        return sum(self._behind) + max(gradients, default=0)

    @cached_property
    def _input_bytes(self) -> int:
        """What all blocks read that others make; what many read is kept once."""
        found = set()
        for ops in self.traits.blocks.layers:
            inside = {*ops}
            read = {tensor for op in ops for tensor in op.inputs}
            maker = self.traits.graph.producer
            found |= {tensor for tensor in read if tensor in maker and maker[tensor] not in inside}
        return sum(tensor.num_bytes for tensor in found)

    @cached_property
    def _light(self) -> tuple[int, int]:
        """What blocks keep but those that keep most, as ``_kinds``."""
        blocks = self.traits.blocks
        heavy = [self._kinds(blocks.layers[i]) for i in heavy_blocks(blocks)]
        whole, cut = self._blocks
        return whole - sum(each[0] for each in heavy), cut - sum(each[1] for each in heavy)

    @cached_property
    def _blocks(self) -> tuple[int, int]:
        """What all ops keep that are not behind the blocks, as ``_kinds``."""
        (whole, cut), (behind_whole, behind_cut) = self._kinds(), self._behind
        return max(0, whole - behind_whole), max(0, cut - behind_cut)

    @cached_property
    def _behind(self) -> tuple[int, int]:
        """The same of the ops behind all blocks, such as those with the scores of words."""
        return self._kinds(self.traits.blocks.behind)

    @cached_property
    def _largest(self) -> tuple[int, int]:
        """The same of the block that keeps most."""
        return max(map(self._kinds, self.traits.blocks.layers), key=sum)

    def _kinds(self, ops: OpGroup | None = None) -> tuple[int, int]:
        """Bytes that some ops, or all, keep without and with features that tensor parallel cuts."""
        return self._split(kept_sizes(self.traits.graph, ops))

    @cached_property
    def _inner(self) -> frozenset[DimClass]:
        return frozenset(self.traits.blocks.inner if self.traits.has_features else ())

    def _split(self, sizes: Iterable[tuple[PTensor, int]]) -> tuple[int, int]:
        """Bytes of tensors without and with features that tensor parallel cuts."""
        inner, dims = self._inner, self.traits.blocks.dims
        whole = cut = 0
        for tensor, size in sizes:
            if not inner.isdisjoint(dims.of_tensor(tensor)):
                cut += size
            else:
                whole += size
        return whole, cut


def _communicates(setting: Setting) -> bool:
    """Whether devices communicate inside blocks."""
    return setting.tp > 1 or setting.experts


ROWS = ("axial", "spatial")
"""Families that cut rows and columns, not features; all of a stage's devices have its weights."""


def replicas(setting: Setting) -> tuple[int, int, int]:
    """Into how many parts weights are cut, how many devices have each, and how far apart."""
    if setting.family in ROWS:
        return setting.pp, setting.dp * setting.tp, 1
    return setting.pp * setting.tp, setting.dp, setting.tp
