"""Tape: segments under autograd, and what each backward needs of its forward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from superscaler_core.run.host import Host
from superscaler_core.run.split_backward import SplitBackward
from superscaler_core.run.swap import Parcel, Swap, emptied

SegmentFunction = Callable[..., tuple[Tensor, ...]]
"""A function of a generated file: of the seed of its dropout, and tensors."""

Tensors = tuple[Tensor, ...]

Grads = tuple[Tensor | None, ...]
"""Gradients of results; None where nobody asks for one."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What the backward of a segment needs.

    Gradients of its results enter at ``roots``; None if it runs the forward again. Of a swapped
    segment ``parcel`` has the values, and leaves are empty (or packed, if the forward runs again).
    """

    leaves: tuple[Any, ...]
    others: Tensors
    roots: tuple[GradientEdge | None, ...] | None
    parcel: Parcel | None = None


class Tape:
    """Runs segments on leaves of their own, so that all communication lies between them.

    Args:
        recomputed: names of segments whose backward runs their forward again.
        swapped: names of those whose backward needs what has been on the host.
        host: where.
    """

    def __init__(self, recomputed: Collection[str], swapped: Collection[str], host: Host) -> None:
        self._recomputed, self._swapped = recomputed, swapped
        self._swap = Swap(host)
        self._saved: dict[tuple[str, int], Saved] = {}
        self._split: dict[tuple[str, int], SplitBackward] = {}
        self._kept: dict[tuple[str, int], Tensors] = {}

    def forward(
        self, segment: SegmentFunction, mb: int, seed: int, inputs: Tensors, others: Tensors
    ) -> Tensors:
        """Run a segment and keep what its backward needs.

        Args:
            segment: the function.
            mb: the microbatch.
            seed: of its dropout, the same in its backward.
            inputs: what its gradient is wanted of.
            others: inputs, constants and weights.
        """
        name = segment.__name__
        if name in self._swapped:
            return self._forward_swapped(segment, mb, seed, inputs, others)
        if name in self._recomputed:
            self.hold(segment, mb, inputs, others)
            return self.compute(segment, seed, inputs, others)
        self._saved[name, mb], outputs = self._run(segment, seed, inputs, others)
        return outputs

    def compute(
        self, segment: SegmentFunction, seed: int, inputs: Tensors, others: Tensors
    ) -> Tensors:
        """Run a segment of which nothing is kept."""
        with torch.no_grad():
            return segment(seed, *inputs, *others)

    def _run(
        self, segment: SegmentFunction, seed: int, inputs: Tensors, others: Tensors
    ) -> tuple[Saved, Tensors]:
        """Run a segment under autograd; what its backward needs, and its results."""
        leaves = tuple(x.detach().requires_grad_() for x in inputs)
        # Autograd keeps what it needs of a view; a leaf it would keep as it is, which is emptied.
        outputs = segment(seed, *(leaf.view_as(leaf) for leaf in leaves), *others)
        saved = Saved(tuple(map(emptied, leaves)), (), _roots(outputs))
        return saved, tuple(x.detach() for x in outputs)

    def hold(self, segment: SegmentFunction, mb: int, inputs: Tensors, others: Tensors) -> None:
        """Keep what a backward needs that runs the forward again."""
        self._saved[segment.__name__, mb] = Saved(inputs, others, None)

    def _forward_swapped(
        self, segment: SegmentFunction, mb: int, seed: int, inputs: Tensors, others: Tensors
    ) -> Tensors:
        """As ``forward``; what the backward needs is packed, so that it can go to the host."""
        name, parcel = segment.__name__, self._swap.parcel(others)
        if name in self._recomputed:
            outputs = self.compute(segment, seed, inputs, others)
            self._saved[name, mb] = Saved(tuple(map(parcel.pack, inputs)), others, None, parcel)
            return outputs
        leaves = tuple(x.detach().requires_grad_() for x in inputs)
        with parcel.packing():
            outputs = segment(seed, *leaves, *others)
        self._saved[name, mb] = Saved(tuple(map(emptied, leaves)), (), _roots(outputs), parcel)
        return tuple(x.detach() for x in outputs)

    def rerun(self, segment: SegmentFunction, mb: int, seed: int) -> None:
        """Run a forward again that kept only what it was given; the backward then need not.

        What is kept from here on is what ``forward`` keeps of a segment that is not recomputed.
        """
        key = segment.__name__, mb
        saved = self._saved[key]
        self._saved[key] = self._with_graph(saved, segment, seed)

    def _with_graph(self, saved: Saved, segment: SegmentFunction, seed: int) -> Saved:
        """What a backward starts from; the forward runs again if it has not."""
        if saved.roots is not None:
            return saved
        parcel = saved.parcel
        inputs = saved.leaves if parcel is None else tuple(map(parcel.unpack, saved.leaves))
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
        """The first half of ``backward``: gradients of inputs; what weights need is kept."""
        leaves, given = self._begun(segment, mb, seed, grads)
        split = self._split[segment.__name__, mb] = SplitBackward(given, leaves)
        found = split.inputs()
        return tuple(
            torch.zeros_like(x) if grad is None else grad
            for x, grad in zip(leaves, found, strict=True)
        )

    def backward_weights(self, segment: SegmentFunction, mb: int) -> None:
        """The second half: gradients of weights are added to those of their copies."""
        self._split.pop((segment.__name__, mb)).weights()

    def _begun(
        self, segment: SegmentFunction, mb: int, seed: int, grads: Grads
    ) -> tuple[tuple[Any, ...], dict[GradientEdge, Tensor]]:
        """The leaves of a graph, and gradients by where they enter it."""
        saved = self._taken(segment, mb, seed)
        assert saved.roots is not None
        # Results that have gradients come first.
        pairs = zip(saved.roots, grads, strict=False)
        given: dict[GradientEdge, Tensor] = {}
        for root, grad in pairs:
            if root is not None and grad is not None:
                given[root] = given[root] + grad if root in given else grad
        return saved.leaves, given

    def _taken(self, segment: SegmentFunction, mb: int, seed: int) -> Saved:
        """What a backward starts from, which is let go."""
        saved = self._saved.pop((segment.__name__, mb))
        return self._with_graph(saved, segment, seed)

    def parcel_bytes(self, mb: int) -> Mapping[str, int]:
        """What waits on the host for the backward of each swapped segment of a microbatch."""
        return {
            name: saved.parcel.num_bytes
            for (name, other), saved in self._saved.items()
            if other == mb and saved.parcel is not None
        }

    def parcel(self, segment: SegmentFunction, mb: int) -> Parcel:
        """What a swapped segment keeps, which goes to the host and comes back."""
        parcel = self._saved[segment.__name__, mb].parcel
        assert parcel is not None, "it is of a segment that is swapped"
        return parcel

    # --- what is run again as a whole -----------------------------------------------------------

    def keep(self, name: str, mb: int, values: Tensors) -> None:
        """Keep what is needed to run a span again."""
        self._kept[name, mb] = values

    def kept(self, name: str, mb: int) -> Tensors:
        """What ``keep`` kept, which is let go."""
        return self._kept.pop((name, mb))

    def check_done(self) -> None:
        """A step has run backward all that it ran forward."""
        assert not self._saved, "every forward had its backward"
        assert not self._split, "every gradient of inputs had those of weights after it"
        assert not self._kept, "every span was run again"


def _roots(outputs: Tensors) -> tuple[GradientEdge | None, ...]:
    """Where gradients of results enter, by which a backward starts without the results."""
    return tuple(get_gradient_edge(out) if out.requires_grad else None for out in outputs)
