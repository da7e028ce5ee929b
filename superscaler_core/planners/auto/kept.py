"""Kept: estimate what backwards need of a microbatch, from degrees and bytes alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from superscaler_core.graph.blocks import OpGroup
from superscaler_core.graph.dims import DimClass
from superscaler_core.graph.graph import Op
from superscaler_core.graph.tensor import PTensor
from superscaler_core.plan import Keep
from superscaler_core.planners.auto.flight import Flight
from superscaler_core.planners.auto.setting import ROWS, Setting
from superscaler_core.planners.auto.traits import Traits, heavy_blocks, kept_sizes

SEGMENTS = 2.0
"""Segments per partial sum, with inputs of the same size each, if blocks communicate.

Without communication, a block is one segment.
"""


@dataclass(frozen=True, eq=False)
class Kept:
    """Estimates (not bounds) for the microbatch of one graph.

    Attributes:
        traits: traits of the graph.
    """

    traits: Traits

    def num_bytes(self, setting: Setting, flight: Flight) -> float:
        """Bytes that backwards need, if each replica computes the graph's microbatch.

        The fullest moment is in the backward of the ops behind the blocks, or in that of a block.

        Args:
            setting: the plan's setting.
            flight: what its schedule makes a worker hold.
        """

        def own(whole: float, cut: float) -> float:
            is_spread = setting.sequence or setting.family in ROWS
            return whole / (setting.tp if is_spread else 1) + cut / setting.tp

        whole, cut = self._working
        behind = self._behind_bytes / (setting.tp if setting.vocabulary else 1)
        block = own(*self._computed_again(setting)) + own(whole, cut / setting.coshard)
        waiting = replace(setting, keep=Keep.EVERYTHING, coshard=1, heavy=False)
        held = waiting if flight.is_split else setting
        kept = own(*self._kept(held)) + self._gathered_bytes(held)
        return (flight.microbatches * kept + max(behind, block)) * (2 if setting.duplex else 1)

    def _gathered_bytes(self, setting: Setting) -> float:
        """Bytes of linear maps' inputs that sequence parallelism gathers: they are kept whole."""
        is_kept = setting.keep not in (Keep.BLOCK_INPUTS, Keep.STAGE_INPUT)
        if not (setting.sequence and is_kept and setting.coshard == 1):
            return 0.0
        return self.traits.summed_bytes

    def _kept(self, setting: Setting) -> tuple[float, float]:
        """Bytes kept from forwards to backwards, as in ``_kinds``."""
        whole, cut = self._light if setting.heavy else self._blocks
        if setting.keep is Keep.STAGE_INPUT:
            return setting.pp / self.traits.num_layers * self._input_bytes, 0.0
        if setting.keep in (Keep.SEGMENT_INPUTS, Keep.BLOCK_INPUTS):
            is_whole = setting.keep is Keep.BLOCK_INPUTS or not _communicates(setting)
            sums = len(self.traits.sums) / self.traits.num_layers
            times = 1.0 if is_whole else max(1.0, SEGMENTS * sums)
            return min(times * self._input_bytes, whole + cut / setting.tp), 0.0
        if setting.coshard > 1 and not setting.heavy:
            return whole, 0.0
        if setting.keep is Keep.ATTENTION_ONLY:
            return whole, cut * self._left_by_attentions
        return whole, cut

    def _computed_again(self, setting: Setting) -> tuple[float, float]:
        """Most recomputed bytes at once: a block, a stage or a co-shard part; as in ``_kinds``."""
        whole, cut = self._largest
        if setting.keep is Keep.EVERYTHING:
            return 0.0, cut / setting.coshard if setting.coshard > 1 else 0.0
        if setting.keep is not Keep.STAGE_INPUT:
            return whole, cut / setting.coshard
        inside = self._light if setting.heavy else self._blocks
        stage_whole, stage_cut = (each / setting.pp for each in inside)
        if setting.coshard == 1:
            return stage_whole, stage_cut
        return stage_whole, cut / setting.coshard + (stage_cut if setting.heavy else 0.0)

    @cached_property
    def _left_by_attentions(self) -> float:
        """The share of kept bytes with cut features that ops outside attentions make."""
        attentions = sum(map(self._made_inside, self.traits.attentions))
        return 1 - attentions / max(1, self._kinds()[1])

    def _made_inside(self, ops: OpGroup) -> int:
        """Bytes with cut features that ``ops`` keep of tensors that they make themselves."""
        inside, maker = {*ops}, self.traits.graph.producer
        kept = kept_sizes(self.traits.graph, ops)
        return self._split((tensor, size) for tensor, size in kept if maker[tensor] in inside)[1]

    @cached_property
    def _working(self) -> tuple[int, int]:
        """Most bytes of gradients of one op's activations in a block, as in ``_kinds``."""
        ops = (op for layer in self.traits.blocks.layers for op in layer)
        return max(map(self._gradients, ops), key=sum)

    def _gradients(self, op: Op) -> tuple[int, int]:
        """Bytes of gradients of the activations that an op reads and makes, as in ``_kinds``."""
        tensors = {*op.inputs, *op.outputs} - {*op.parameters}
        return self._split((t, t.num_bytes) for t in tensors if t.requires_grad)

    @cached_property
    def _behind_bytes(self) -> int:
        """Bytes that the ops behind all blocks keep, plus the gradients of the largest op."""
        gradients = (sum(self._gradients(op)) for op in self.traits.blocks.behind)
        return sum(self._behind) + max(gradients, default=0)

    @cached_property
    def _input_bytes(self) -> int:
        """Bytes that blocks read and other ops make; a tensor with many readers counts once."""
        return sum(tensor.num_bytes for tensor in frozenset().union(*self.traits.layer_inputs))

    @cached_property
    def _light(self) -> tuple[int, int]:
        """Bytes that all but the heavy blocks keep, as in ``_kinds``."""
        blocks = self.traits.blocks
        heavy = [self._kinds(blocks.layers[i]) for i in heavy_blocks(blocks)]
        whole, cut = self._blocks
        return whole - sum(each[0] for each in heavy), cut - sum(each[1] for each in heavy)

    @cached_property
    def _blocks(self) -> tuple[int, int]:
        """Bytes that all ops keep that are not behind the blocks, as in ``_kinds``."""
        (whole, cut), (behind_whole, behind_cut) = self._kinds(), self._behind
        return max(0, whole - behind_whole), max(0, cut - behind_cut)

    @cached_property
    def _behind(self) -> tuple[int, int]:
        """Bytes that the ops behind all blocks keep, such as the scores of words."""
        return self._kinds(self.traits.blocks.behind)

    @cached_property
    def _largest(self) -> tuple[int, int]:
        """Bytes that the heaviest block keeps, as in ``_kinds``."""
        return max(map(self._kinds, self.traits.blocks.layers), key=sum)

    def _kinds(self, ops: OpGroup | None = None) -> tuple[int, int]:
        """Bytes that ``ops`` (or all) keep, without and with features that tensor parallel cuts."""
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
