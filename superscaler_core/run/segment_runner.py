"""SegmentRunner: the calls of generated code that run segments, on a rank."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from superscaler_core.run.tape import SegmentFunction, Tape, Tensors


class SegmentRunner(ABC):
    """Runs segments on a tape; in a turn without gradient it keeps nothing.

    A subclass chooses the random seed (``_rng``), and is told when a segment begins.

    Args:
        tape: keeps what the backward needs.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._with_grad = True

    @abstractmethod
    def _rng(self, mb: int) -> int:
        """The seed of a microbatch, equal on all ranks and in a recomputation."""

    def _begin(self, segment: SegmentFunction) -> None:  # noqa: B027 - most are told nothing
        """Called when a segment begins to run, forward or backward."""

    def forward(
        self, segment: SegmentFunction, mb: int, inputs: Tensors, others: Tensors
    ) -> Tensors:
        """Run a segment, and keep what its backward needs if it has one.

        Args:
            segment: the function.
            mb: the microbatch.
            inputs: inputs that need gradients.
            others: inputs without gradients, constants and weights.
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
        """Keep the inputs of a segment whose backward recomputes it."""
        self._begin(segment)
        self._tape.hold(segment, mb, inputs, others)

    def backward(
        self, segment: SegmentFunction, mb: int, grads: tuple[Tensor | None, ...]
    ) -> Tensors:
        """The gradients of a segment's inputs, given those of its outputs."""
        self._begin(segment)
        return self._tape.backward(segment, mb, self._rng(mb), grads)

    def rerun(self, segment: SegmentFunction, mb: int) -> None:
        """Recompute a segment that kept only its inputs, before its backward."""
        self._begin(segment)
        self._tape.rerun(segment, mb, self._rng(mb))

    def backward_inputs(
        self, segment: SegmentFunction, mb: int, grads: tuple[Tensor | None, ...]
    ) -> Tensors:
        """Like ``backward``, without the gradients of weights; ``backward_weights`` adds those."""
        self._begin(segment)
        return self._tape.backward_inputs(segment, mb, self._rng(mb), grads)

    def backward_weights(self, segment: SegmentFunction, mb: int) -> None:
        """Add the gradients of a segment's weights to those of their copies."""
        self._begin(segment)
        self._tape.backward_weights(segment, mb)

    # --- swapping to the host; does nothing in a turn without gradient --------------------------

    def swap_out(self, segment: SegmentFunction, mb: int) -> None:
        """Copy the kept values of a segment to the host, and wait for the copy."""
        self.start_swap_out(segment, mb)
        self.wait_swap_out(segment, mb)

    def start_swap_out(self, segment: SegmentFunction, mb: int) -> None:
        """Start to copy the kept values of a segment to the host."""
        if self._with_grad:
            self._tape.parcel(segment, mb).send()

    def wait_swap_out(self, segment: SegmentFunction, mb: int) -> None:
        """Wait for ``start_swap_out``, and free the memory on the device."""
        if self._with_grad:
            self._tape.parcel(segment, mb).leave()

    def swap_in(self, segment: SegmentFunction, mb: int) -> None:
        """Copy the kept values of a segment back, and wait for the copy."""
        self.start_swap_in(segment, mb)
        self.wait_swap_in(segment, mb)

    def start_swap_in(self, segment: SegmentFunction, mb: int) -> None:
        """Start to copy the kept values of a segment back."""
        self._tape.parcel(segment, mb).fetch()

    def wait_swap_in(self, segment: SegmentFunction, mb: int) -> None:
        """Wait for ``start_swap_in``."""
        self._tape.parcel(segment, mb).arrive()

    # --- reruns of spans ------------------------------------------------------------------------

    def keep(self, name: str, mb: int, values: Tensors) -> None:
        """Keep the inputs of a span for its rerun, if there will be a backward."""
        if self._with_grad:
            self._tape.keep(name, mb, values)

    def kept(self, name: str, mb: int) -> Tensors:
        """Return the values of ``keep``, and release them."""
        return self._tape.kept(name, mb)
