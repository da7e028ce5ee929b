"""SegmentRunner: what generated code calls to run segments, whoever stands behind it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from superscaler_core.run.tape import SegmentFunction, Tape, Tensors


class SegmentRunner(ABC):
    """Runs segments on a tape; in a turn without gradient it keeps nothing of them.

    A rank is one, and so is a dry run that looks at memory: both run what a file says by the same
    rules. They say which random numbers segments draw (``_rng``) and are told when one begins.

    Args:
        tape: what remembers for the backward.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._with_grad = True

    @abstractmethod
    def _rng(self, mb: int) -> int:
        """The seed of a microbatch: the same on all ranks, and again in a recomputation."""

    def _begin(self, segment: SegmentFunction) -> None:  # noqa: B027 - most are told nothing
        """A segment begins to run, forward or backward."""

    def forward(
        self, segment: SegmentFunction, mb: int, inputs: Tensors, others: Tensors
    ) -> Tensors:
        """Run a segment and keep what its backward needs, if there will be one.

        Args:
            segment: the function.
            mb: the microbatch.
            inputs: what its gradient is wanted of.
            others: inputs, constants and weights.
        """
        if not self._with_grad:
            return self.compute(segment, mb, inputs, others)
        self._begin(segment)
        return self._tape.forward(segment, mb, self._rng(mb), inputs, others)

    def compute(
        self, segment: SegmentFunction, mb: int, inputs: Tensors, others: Tensors
    ) -> Tensors:
        """Run a segment that has no backward."""
        self._begin(segment)
        return self._tape.compute(segment, self._rng(mb), inputs, others)

    def hold(self, segment: SegmentFunction, mb: int, inputs: Tensors, others: Tensors) -> None:
        """Keep what a segment's backward needs that runs its forward again."""
        self._begin(segment)
        self._tape.hold(segment, mb, inputs, others)

    def backward(
        self, segment: SegmentFunction, mb: int, grads: tuple[Tensor | None, ...]
    ) -> Tensors:
        """The gradients of a segment's inputs, given those of its outputs."""
        self._begin(segment)
        return self._tape.backward(segment, mb, self._rng(mb), grads)

    def rerun(self, segment: SegmentFunction, mb: int) -> None:
        """Run the forward again of a segment that kept only what it was given."""
        self._begin(segment)
        self._tape.rerun(segment, mb, self._rng(mb))

    def backward_inputs(
        self, segment: SegmentFunction, mb: int, grads: tuple[Tensor | None, ...]
    ) -> Tensors:
        """As ``backward``, but the gradients of weights are left to ``backward_weights``."""
        self._begin(segment)
        return self._tape.backward_inputs(segment, mb, self._rng(mb), grads)

    def backward_weights(self, segment: SegmentFunction, mb: int) -> None:
        """Add the gradients of a segment's weights to those of their copies."""
        self._begin(segment)
        self._tape.backward_weights(segment, mb)

    # --- what waits on the host; nothing of a turn without gradient does ------------------------

    def swap_out(self, segment: SegmentFunction, mb: int) -> None:
        """Let what a segment keeps go to the host, and wait for it."""
        self.start_swap_out(segment, mb)
        self.wait_swap_out(segment, mb)

    def start_swap_out(self, segment: SegmentFunction, mb: int) -> None:
        """Begin to."""
        if self._with_grad:
            self._tape.parcel(segment, mb).send()

    def wait_swap_out(self, segment: SegmentFunction, mb: int) -> None:
        """Wait until it is there; its memory on the device is free."""
        if self._with_grad:
            self._tape.parcel(segment, mb).leave()

    def swap_in(self, segment: SegmentFunction, mb: int) -> None:
        """Bring it back, and wait for it."""
        self.start_swap_in(segment, mb)
        self.wait_swap_in(segment, mb)

    def start_swap_in(self, segment: SegmentFunction, mb: int) -> None:
        """Begin to."""
        self._tape.parcel(segment, mb).fetch()

    def wait_swap_in(self, segment: SegmentFunction, mb: int) -> None:
        """Wait until it is back."""
        self._tape.parcel(segment, mb).arrive()

    # --- what is run again as a whole -----------------------------------------------------------

    def keep(self, name: str, mb: int, values: Tensors) -> None:
        """Keep what is needed to run a span again, if there will be a backward."""
        if self._with_grad:
            self._tape.keep(name, mb, values)

    def kept(self, name: str, mb: int) -> Tensors:
        """What ``keep`` kept, which is let go."""
        return self._tape.kept(name, mb)
