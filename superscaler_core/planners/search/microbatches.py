"""Microbatches: one model captured with microbatches of several sizes."""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from superscaler_core.errors import OpaqueWarning, PlanError
from superscaler_core.front_end import capture
from superscaler_core.front_end.model_call import ModelCall
from superscaler_core.graph.graph import Graph
from superscaler_core.planners.search.resized import resized

GraphOf = Callable[[int], Graph]
"""From the samples of a microbatch to the model captured with it."""


def graphs_of(
    given: Any,
    inputs: Sequence[Any] | Mapping[str, Any] | ModelCall | None,
    batch: int,
    samples: Sequence[int] = (),
    recycled: Mapping[str, int] | None = None,
) -> tuple[GraphOf, tuple[int, ...]]:
    """How to come to a graph of any size, and the sizes; arguments are those of ``search``.

    Raises:
        PlanError: a model without inputs.
    """
    sizes = tuple(sorted(samples)) or tuple(n for n in range(1, batch + 1) if batch % n == 0)
    if isinstance(given, Graph):
        return Same(given), (_samples_of(given),)
    if isinstance(given, nn.Module):
        if inputs is None:
            raise PlanError(f"{type(given).__name__} is captured with inputs: give an example.")
        call = inputs if isinstance(inputs, ModelCall) else ModelCall.of(given, inputs)
        return Captures(given, call, dict(recycled or {})), sizes
    graph_of: GraphOf = given
    return graph_of, sizes


class Resizing:
    """Graphs of all sizes from those of two; where these differ in more than sizes, captured ones.

    Args:
        capture: captures a graph of any size.
        sizes: all that may be asked for, ascending.
    """

    def __init__(self, capture: GraphOf, sizes: Sequence[int]) -> None:
        self._capture = capture
        several = [size for size in sizes if size > 1]
        # Of three sizes one follows from two.
        self._ends = (several[0], several[1]) if len(several) > 2 else None
        self._made: dict[int, Graph] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": {}}

    @property
    def as_captured(self) -> GraphOf | None:
        """What captures every size; None if it always does."""
        return None if self._ends is None else self._capture

    def __call__(self, samples: int) -> Graph:
        """The model with a microbatch of so many samples."""
        if samples not in self._made:
            self._made[samples] = self._resized(samples) or self._capture(samples)
        return self._made[samples]

    def _resized(self, samples: int) -> Graph | None:
        # Dims of one element are not cut, so the graph of one sample is another one.
        if self._ends is None or samples in (1, *self._ends):
            return None
        small, large = map(self, self._ends)
        return resized(small, large, self._ends, samples)


class Same:
    """One graph, of the only size that there is."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def __call__(self, samples: int) -> Graph:
        return self._graph


class Captures:
    """Captures a model when a size is first asked for, and keeps the graph.

    A process to which it is sent shares its graphs through a folder, as capturing takes seconds.

    Args:
        model: in the mode and on the device in which it is captured; nothing of it is run.
        call: an example; dim 0 of the tensors that are as long as the first is the batch.
        recycled: as in ``capture``.
    """

    def __init__(self, model: nn.Module, call: ModelCall, recycled: Mapping[str, int]) -> None:
        self._model, self._call, self._recycled = model, call, recycled
        self._made: dict[int, Graph] = {}
        self._folder: Path | None = None  # there is one as soon as another process shares it

    def __getstate__(self) -> dict[str, Any]:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="superscaler-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            for samples, graph in self._made.items():
                _kept(self._folder / f"{samples}.pickle", partial(_same, graph))
        return {**self.__dict__, "_made": {}}

    def __call__(self, samples: int) -> Graph:
        """The model with a microbatch of so many samples."""
        if samples not in self._made:
            kept = self._folder and self._folder / f"{samples}.pickle"
            self._made[samples] = _kept(kept, partial(self._capture, samples))
        return self._made[samples]

    def _capture(self, samples: int) -> Graph:
        num = next((len(x) for x in self._call.tensors if x.dim()), 0)
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))

        def resized(x: Tensor) -> Tensor:
            if not x.dim() or len(x) != num:
                return x
            shape = samples, *x.shape[1:]
            if device.type == "meta":
                return torch.empty(shape, dtype=x.dtype, device="meta")
            return x[:1].expand(shape)

        call = self._call.map(resized)
        with warnings.catch_warnings():
            if self._made:
                # What is opaque was said of the first.
                warnings.simplefilter("ignore", OpaqueWarning)
            return capture(self._model, call.args, call.kwargs, recycled=self._recycled or None)


def _same(graph: Graph) -> Graph:
    return graph


def _samples_of(graph: Graph) -> int:
    """The samples that a graph was captured with: dim 0 of its first input."""
    return next((t.shape[0] for t in graph.inputs if t.shape), 1)


def _kept(path: Path | None, make: Callable[[], Graph]) -> Graph:
    """The graph in a file, or a new one, which is written there."""
    if path is None:
        return make()
    if path.exists():
        graph = pickle.loads(path.read_bytes())
        assert isinstance(graph, Graph)
        return graph
    graph = make()
    # Renamed when it is whole: another process may look at any time.
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(pickle.dumps(graph))
    part.rename(path)
    return graph
