"""Way: how a shard goes along the legs of an edge, which may take a region of it each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import rvdcomm as rv
from superscaler_core.run.tables import Leg
from superscaler_core.run.transport import Call, Transport

Wait = Callable[[], Tensor | None]


@dataclass(frozen=True, slots=True)
class _LegHere:
    """A leg as one rank sees it.

    Attributes:
        call: what moves it; None if everyone holds what it wants.
        is_brought: whether this rank brings something.
        cut: which part of its shard; None for all of it.
        box: what it takes away; None if nothing.
    """

    call: Call | None
    is_brought: bool
    cut: tuple[slice, ...] | None
    box: rv.Box | None

    def piece(self, shard: Tensor | None) -> Tensor | None:
        """What the rank brings."""
        if shard is None or not self.is_brought:
            return None
        return shard if self.cut is None else shard[self.cut]


class Way:
    """All legs between the two ends of an edge, worked out once for one rank.

    Args:
        transport: moves them.
        legs: in the order of all ranks.
        src, dst: what this rank has at either end; None if nothing.
    """

    def __init__(
        self, transport: Transport, legs: Sequence[Leg], src: rv.Box | None, dst: rv.Box | None
    ) -> None:
        self._legs = [_leg_here(transport, leg, src) for leg in legs]
        self._dst = dst
        # To all calls this rank brings nothing, so nothing has to be ready first.
        self._receiving = [] if src is not None else [c for leg in self._legs if (c := leg.call)]
        found = [leg.box for leg in self._legs if leg.box is not None]
        # The one leg that brings all of what this rank takes away.
        self._is_whole = dst is not None and found == [dst] and len(self._legs) == 1

    def move(self, shard: Tensor | None) -> Tensor | None:
        """Move a shard; this rank's shard at the dst end, or None if it gets none."""
        return self._assembled([
            leg.piece(shard) if leg.call is None else leg.call.move(leg.piece(shard))
            for leg in self._legs
        ])  # fmt: skip

    def start(self, shard: Tensor | None) -> Wait:
        """As ``move``, in the background; what is returned waits for it."""
        waits = [self._started(leg, leg.piece(shard)) for leg in self._legs]
        if self._is_whole:
            return waits[0]
        return lambda: self._assembled([wait() for wait in waits])

    def expect(self) -> None:
        """Begin to receive what the next ``start`` brings; only of a way that will be started."""
        for call in self._receiving:
            call.expect()

    def forget(self) -> None:
        """What is expected will not be started."""
        for call in self._receiving:
            call.forget()

    def _started(self, leg: _LegHere, piece: Tensor | None) -> Wait:
        return (lambda: piece) if leg.call is None else leg.call.start(piece).wait

    def _assembled(self, results: Sequence[Tensor | None]) -> Tensor | None:
        """This rank's shard, put together from what legs brought."""
        if self._is_whole:
            return results[0]
        if self._dst is None:
            return None
        pairs = zip(self._legs, results, strict=True)
        found = [(leg.box, result) for leg, result in pairs if leg.box and result is not None]
        assert found, "a leg brings every reader what it reads"
        if len(found) == 1 and found[0][0] == self._dst:
            return found[0][1]
        shard = torch.zeros(self._dst.shape, dtype=found[0][1].dtype, device=found[0][1].device)
        for box, result in found:
            shard[box.slices_within(self._dst)] = result
        return shard


def _leg_here(transport: Transport, leg: Leg, held: rv.Box | None) -> _LegHere:
    box = leg.src_box(transport.rank)
    is_brought = held is not None and box is not None
    cut = None
    if held is not None and box is not None and box != held:
        cut = box.slices_within(held)
    call = None if leg.is_idle else transport.call(leg)
    return _LegHere(call, is_brought, cut, leg.dst_box(transport.rank))
