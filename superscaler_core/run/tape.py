"""Tape: runs segments under autograd, and keeps what each backward needs from its forward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from superscaler_core.run.backward_halves import SplitBackward
from superscaler_core.run.host import ActivationOffload, Host, Offloaded, emptied
from superscaler_core.run.ranges import inner_range

SegmentFunction = Callable[..., tuple[Tensor, ...]]
"""A function of a generated file; its arguments are the seed of its dropout, and tensors."""

Tensors = tuple[Tensor, ...]

Grads = tuple[Tensor | None, ...]
"""Gradients of results; None for results without one."""


def like(function: SegmentFunction, name: str, *, shift: int = 0) -> SegmentFunction:
    """A segment that does the same as another one, under its own name.

    Args:
        function: the other segment.
        name: the name.
        shift: the distance between the seeds of the two segments' random numbers.
    """

    def segment(rng: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return function(rng + shift, *tensors)

    segment.__name__ = name
    return segment


@dataclass(frozen=True, slots=True)
class SavedSegment:
    """The values that the backward of a segment needs.

    Gradients of its results enter at ``roots``; None if the backward recomputes the forward. For a
    offloaded segment ``offloaded`` holds the values, and the leaves are empty (or packed, if
    recomputed).
    """

    leaves: tuple[Any, ...]
    others: Tensors
    roots: tuple[GradientEdge | None, ...] | None
    offloaded: Offloaded | None = None


class Tape:
    """Runs segments on autograd leaves of their own, so that all communication is between graphs.

    Args:
        recomputed: names of segments whose backward recomputes their forward.
        offloaded: names of segments whose kept values are moved to the host.
        host: the host memory.
    """

    def __init__(self, recomputed: Collection[str], offloaded: Collection[str], host: Host) -> None:
        self._recomputed, self._offloaded = recomputed, offloaded
        self._offload = ActivationOffload(host)
        self._saved: dict[tuple[str, int], SavedSegment] = {}
        self._split: dict[tuple[str, int], SplitBackward] = {}
        self._kept: dict[tuple[str, int], Tensors] = {}

    def forward(
        self, segment: SegmentFunction, mb: int, seed: int, inputs: Tensors, others: Tensors
    ) -> Tensors:
        """Run a segment and keep what its backward needs.

        Args:
            segment: the function.
            mb: the microbatch.
            seed: seed of its dropout, the same in its backward.
            inputs: inputs that need gradients.
            others: inputs without gradients, constants and weights.
        """
        name = segment.__name__
        if name in self._offloaded:
            return self._forward_swapped(segment, mb, seed, inputs, others)
        if name in self._recomputed:
            self.hold(segment, mb, inputs, others)
            return self.compute(segment, seed, inputs, others)
        self._saved[name, mb], outputs = self._run(segment, seed, inputs, others)
        return outputs

    def compute(
        self, segment: SegmentFunction, seed: int, inputs: Tensors, others: Tensors
    ) -> Tensors:
        """Run a segment without keeping anything."""
        with torch.no_grad():
            return segment(seed, *inputs, *others)

    def _run(
        self, segment: SegmentFunction, seed: int, inputs: Tensors, others: Tensors
    ) -> tuple[SavedSegment, Tensors]:
        """Run a segment under autograd; return what its backward needs, and its results."""
        leaves = tuple(x.detach().requires_grad_() for x in inputs)
        # Autograd saves a leaf as the object itself, whose memory ``emptied`` drops below. A view
        # holds its memory, and autograd saves it only if the backward reads it.
        outputs = segment(seed, *(leaf.view_as(leaf) for leaf in leaves), *others)
        saved = SavedSegment(tuple(map(emptied, leaves)), (), _roots(outputs))
        return saved, tuple(x.detach() for x in outputs)

    def hold(self, segment: SegmentFunction, mb: int, inputs: Tensors, others: Tensors) -> None:
        """Keep the inputs of a segment whose backward recomputes it."""
        self._saved[segment.__name__, mb] = SavedSegment(inputs, others, None)

    def _forward_swapped(
        self, segment: SegmentFunction, mb: int, seed: int, inputs: Tensors, others: Tensors
    ) -> Tensors:
        """Like ``forward``, but kept values are packed so that they can go to the host."""
        name, offloaded = segment.__name__, self._offload.offloaded(others)
        if name in self._recomputed:
            outputs = self.compute(segment, seed, inputs, others)
            self._saved[name, mb] = SavedSegment(
                tuple(map(offloaded.pack, inputs)), others, None, offloaded
            )
            return outputs
        leaves = tuple(x.detach().requires_grad_() for x in inputs)
        with offloaded.packing():
            outputs = segment(seed, *leaves, *others)
        self._saved[name, mb] = SavedSegment(
            tuple(map(emptied, leaves)), (), _roots(outputs), offloaded
        )
        return tuple(x.detach() for x in outputs)

    def recompute(self, segment: SegmentFunction, mb: int, seed: int) -> None:
        """Recompute a segment that kept only its inputs, so that its backward need not do it.

        From then on the tape keeps the same values as for a segment that is not recomputed.
        """
        key = segment.__name__, mb
        saved = self._saved[key]
        self._saved[key] = self._with_graph(saved, segment, seed)

    def _with_graph(self, saved: SavedSegment, segment: SegmentFunction, seed: int) -> SavedSegment:
        """The values that a backward starts from; recomputes the forward if still needed."""
        if saved.roots is not None:
            return saved
        offloaded = saved.offloaded
        inputs = saved.leaves if offloaded is None else tuple(map(offloaded.unpack, saved.leaves))
        return self._run(segment, seed, inputs, saved.others)[0]

    def backward(self, segment: SegmentFunction, mb: int, seed: int, grads: Grads) -> Tensors:
        """The gradients of a segment's inputs, given those of its outputs.

        Gradients of weights are added to those of their copies.
        """
        leaves, given = self._begun(segment, mb, seed, grads)
        if given:
            torch.autograd.backward(tuple(given), tuple(given.values()))
        return tuple(x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves)

    def backward_inputs(
        self, segment: SegmentFunction, mb: int, seed: int, grads: Grads
    ) -> Tensors:
        """The first half of ``backward``: gradients of inputs; keep what the second half needs."""
        leaves, given = self._begun(segment, mb, seed, grads)
        split = self._split[segment.__name__, mb] = SplitBackward(given, leaves)
        found = split.inputs()
        return tuple(
            torch.zeros_like(x) if grad is None else grad
            for x, grad in zip(leaves, found, strict=True)
        )

    def backward_weights(self, segment: SegmentFunction, mb: int) -> None:
        """The second half: add the gradients of weights to those of their copies."""
        self._split.pop((segment.__name__, mb)).weights()

    def _begun(
        self, segment: SegmentFunction, mb: int, seed: int, grads: Grads
    ) -> tuple[tuple[Any, ...], dict[GradientEdge, Tensor]]:
        """The leaves of a graph, and the gradients by the edges at which they enter it."""
        saved = self._taken(segment, mb, seed)
        assert saved.roots is not None
        # Results with gradients come first.
        pairs = zip(saved.roots, grads, strict=False)
        given: dict[GradientEdge, Tensor] = {}
        for root, grad in pairs:
            if root is not None and grad is not None:
                given[root] = given[root] + grad if root in given else grad
        return saved.leaves, given

    def _taken(self, segment: SegmentFunction, mb: int, seed: int) -> SavedSegment:
        """The values that a backward starts from; the tape releases them."""
        saved = self._saved.pop((segment.__name__, mb))
        if saved.roots is not None:
            return saved
        with inner_range("recompute", segment, mb):
            return self._with_graph(saved, segment, seed)

    def offloaded_bytes(self, mb: int) -> Mapping[str, int]:
        """The bytes on the host for each offloaded segment of a microbatch."""
        return {
            name: saved.offloaded.num_bytes
            for (name, other), saved in self._saved.items()
            if other == mb and saved.offloaded is not None
        }

    def offloaded(self, segment: SegmentFunction, mb: int) -> Offloaded:
        """The kept values of an offloaded segment."""
        offloaded = self._saved[segment.__name__, mb].offloaded
        assert offloaded is not None, "it is of a segment that is offloaded"
        return offloaded

    # --- recomputations of regions
    # ------------------------------------------------------------------------

    def keep(self, name: str, mb: int, values: Tensors) -> None:
        """Keep the inputs of a region for its recomputation."""
        self._kept[name, mb] = values

    def kept(self, name: str, mb: int) -> Tensors:
        """Return the values of ``keep``, and release them."""
        return self._kept.pop((name, mb))

    def check_done(self) -> None:
        """Check that a step ran the backward of every forward."""
        assert not self._saved, "every forward had its backward"
        assert not self._split, "every gradient of inputs had those of weights after it"
        assert not self._kept, "every region was run again"

    def forget(self) -> None:
        """The step has failed: drop what backwards and recomputations would have needed."""
        self._saved.clear()
        self._split.clear()
        self._kept.clear()


def _roots(outputs: Tensors) -> tuple[GradientEdge | None, ...]:
    """The edges at which gradients of results enter, so that the results need not be kept."""
    return tuple(get_gradient_edge(out) if out.requires_grad else None for out in outputs)
