"""PlayedTape: replays the memory effects of known segments instead of running them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import _disable_current_modes

from superscaler_core.known import Known
from superscaler_core.memory.moments import Meter
from superscaler_core.memory.segment_trace import (
    BackwardTrace,
    Drop,
    ForwardTrace,
    Layouts,
    Moments,
    Recording,
    Result,
    pieces_of,
    storage_of,
)
from superscaler_core.run.host import Host
from superscaler_core.run.tape import Grads, Saved, SegmentFunction, Tape, Tensors

MAX_TRACES = 1 << 12
"""Bound on cached traces of segments, some kilobytes each. A plan of equal layers has some ten
forwards and backwards; a plan that splits one op differently adds a few more."""

_FORWARDS: Known[Hashable, ForwardTrace] = Known(MAX_TRACES)
_BACKWARDS: Known[Hashable, BackwardTrace] = Known(MAX_TRACES)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Played(Saved):
    """The kept values of a segment that was replayed.

    Attributes:
        key: key of its forward.
        num_inputs, given: as in ``Recording``.
        kept: kept pieces of memory by number.
        weights: the trained weights, by position among ``others``.
        num_pieces: number of pieces that its forward was given or allocated.
        recording: the recording of its forward, if the forward was not known.
    """

    key: Hashable
    num_inputs: int
    given: Layouts
    kept: dict[int, UntypedStorage]
    weights: Mapping[int, Tensor]
    num_pieces: int
    recording: Recording | None


class PlayedTape(Tape):
    """Replays the memory effects of segments; each new segment is run alone once.

    Law (tests/superscaler_core/memory/test_played_tape.py): footprints are the same as if every
    segment were run.

    Args:
        recomputed, swapped, host: as in ``Tape``.
        meter: measures the memory.
        form_of: a key of a segment, equal for segments whose functions do the same; None if the
            segment has to be run.
        add_grad: called with a weight when its gradient is made.
    """

    def __init__(
        self,
        recomputed: Collection[str],
        swapped: Collection[str],
        host: Host,
        meter: Meter,
        form_of: Callable[[SegmentFunction], Hashable],
        add_grad: Callable[[Tensor], None],
    ) -> None:
        super().__init__(recomputed, swapped, host)
        self._meter, self._form_of, self._add_grad = meter, form_of, add_grad
        self._host = host

    def compute(
        self, segment: SegmentFunction, seed: int, inputs: Tensors, others: Tensors
    ) -> Tensors:
        """See ``Tape``."""
        if self._form_of(segment) is None:
            return super().compute(segment, seed, inputs, others)
        return self._play(segment, inputs, others, with_grad=False)[1]

    def _run(
        self, segment: SegmentFunction, seed: int, inputs: Tensors, others: Tensors
    ) -> tuple[Saved, Tensors]:
        if self._form_of(segment) is None:
            return super()._run(segment, seed, inputs, others)
        return self._play(segment, inputs, others, with_grad=True)

    def _play(
        self, segment: SegmentFunction, inputs: Tensors, others: Tensors, *, with_grad: bool
    ) -> tuple[_Played, Tensors]:
        args, meter = (*inputs, *others), self._meter
        # Otherwise access to a tensor would pass through every active mode.
        with torch._C.DisableTorchFunction():
            given = Layouts.of(args)
            key = self._form_of(segment), len(inputs), given, with_grad
            trace = _FORWARDS.get(key)
        recording = None
        if trace is None:
            recording = self._recording(segment, len(inputs), given)
            trace = _FORWARDS[key] = recording.forward(with_grad=with_grad)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            self._pass(Moments(trace.peak_bytes, 0))
            made = list(map(storage_of, trace.made))
            meter.count_pieces(made)
            pieces = [*pieces_of(args), *made]
            outputs = tuple(lying.on(pieces[lying.piece]) for lying in trace.outputs)
            kept = {piece: pieces[piece] for piece in trace.kept}
            weights = {i: x for i, x in enumerate(others) if x.requires_grad}
        saved = _Played(
            (), (), (), key=key, num_inputs=len(inputs), given=given, kept=kept, weights=weights,
            num_pieces=len(pieces), recording=recording,
        )  # fmt: skip
        return saved, outputs

    def backward(self, segment: SegmentFunction, mb: int, seed: int, grads: Grads) -> Tensors:
        """See ``Tape``."""
        if self._form_of(segment) is None:
            return super().backward(segment, mb, seed, grads)
        saved = self._taken(segment, mb, seed)
        assert isinstance(saved, _Played)
        with torch._C.DisableTorchFunction():
            given = Layouts.of(grads)
            trace = _BACKWARDS.get((saved.key, given))
        if trace is None:
            # Many microbatches may be under way, and a recorded forward serves only one backward.
            recording = saved.recording or self._recording(segment, saved.num_inputs, saved.given)
            trace = _BACKWARDS[saved.key, given] = recording.backward(given)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            pieces = saved.kept
            pieces |= {saved.num_pieces + i: piece for i, piece in enumerate(pieces_of(grads))}
            for what in trace.happenings:
                if isinstance(what, Moments):
                    self._pass(what)
                elif isinstance(what, Drop):
                    del pieces[what.piece]
                elif isinstance(what, Result):
                    pieces[what.piece] = storage_of(what.num_bytes)
                    self._meter.count_pieces([pieces[what.piece]])
                else:
                    self._add_grad(saved.weights[what.position])
            return tuple(lying.on(pieces[lying.piece]) for lying in trace.results)

    def _pass(self, moments: Moments) -> None:
        """Account for operators whose results are freed within the segment."""
        meter = self._meter
        if moments.peak_bytes is not None:
            meter.now_bytes += moments.peak_bytes
            meter.look()
            meter.now_bytes -= moments.peak_bytes
        meter.now_bytes += moments.left_bytes

    def _recording(self, segment: Any, num_inputs: int, given: Layouts) -> Recording:
        return Recording(segment, num_inputs, given, self._meter.call, Tape((), (), self._host))
