"""Microbatches: the graphs of one model for several microbatch sizes."""

from __future__ import annotations

import fcntl
import pickle
import shutil
import tempfile
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rvdcomm.whole_file import write_whole
from superscaler_core.errors import OpaqueWarning, PlanError
from superscaler_core.evaluation.resized import resized
from superscaler_core.front_end import capture
from superscaler_core.front_end.model_call import ModelCall
from superscaler_core.graph.graph import Graph

GraphOf = Callable[[int], Graph]
"""From the number of samples of a microbatch to the model's graph with this microbatch."""


def graphs_of(
    given: Any,
    inputs: Sequence[Any] | Mapping[str, Any] | ModelCall | None,
    batch: int,
    samples: Sequence[int] = (),
    recycled: Mapping[str, int] | None = None,
) -> tuple[GraphOf, tuple[int, ...]]:
    """A function that makes the graph of a size, and the sizes; arguments as in ``search``.

    Raises:
        PlanError: a model was given without inputs, or a graph with other sizes than its own.
    """
    sizes = tuple(sorted(samples)) or tuple(n for n in range(1, batch + 1) if batch % n == 0)
    if isinstance(given, Graph):
        # Dim 0 of the first input that has dims has the samples of the microbatch.
        own = next((t.shape[0] for t in given.inputs if t.shape), 1)
        if {*samples} - {own}:
            raise PlanError(
                f"samples={tuple(samples)}: a captured graph has one size, {own} samples; give the "
                "model instead, or leave samples out."
            )
        return partial(_same, given), (own,)
    if isinstance(given, nn.Module):
        if inputs is None:
            raise PlanError(f"{type(given).__name__} is captured with inputs: give an example.")
        call = inputs if isinstance(inputs, ModelCall) else ModelCall.of(given, inputs)
        return Captures(given, call, dict(recycled or {})), sizes
    graph_of: GraphOf = given
    return graph_of, sizes


class KeptGraphs(ABC):
    """Makes the graph of a size when it is first asked for, and keeps it in this process."""

    def __init__(self) -> None:
        self._made: dict[int, Graph] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": {}}

    def __call__(self, samples: int) -> Graph:
        """The model with a microbatch of so many samples."""
        if samples not in self._made:
            self._made[samples] = self._make(samples)
        return self._made[samples]

    @abstractmethod
    def _make(self, samples: int) -> Graph:
        """Make the graph of a size."""


class Captured(KeptGraphs):
    """Captured graphs, and the time that a capture takes.

    Args:
        capture: captures a graph of any size.
        first: sizes that are captured in any case, because the graphs of others are made of them.
        secs: seconds of the longest capture, if that is known; an attribute afterwards.
    """

    def __init__(self, capture: GraphOf, first: Sequence[int] = (), secs: float = 0.0) -> None:
        super().__init__()
        self._capture, self._first, self.secs = capture, tuple(first), secs

    @property
    def sizes(self) -> Collection[int]:
        """The sizes that have been captured by this process."""
        return self._made.keys()

    def _make(self, samples: int) -> Graph:
        start = time.monotonic()
        graph = self._capture(samples)
        self.secs = max(self.secs, time.monotonic() - start)
        return graph

    def begin(self, worker: int = 0) -> None:
        """Capture the first sizes; processes of other numbers begin with other sizes."""
        start = worker % max(1, len(self._first))
        for samples in (*self._first[start:], *self._first[:start]):
            self(samples)


class Resizing(KeptGraphs):
    """Makes the graphs of all sizes from two captured graphs, or captures them where this fails.

    Args:
        capture, secs: as in ``Captured``.
        sizes: all sizes that may be asked for, ascending, in samples.
    """

    def __init__(self, capture: GraphOf, sizes: Sequence[int], secs: float = 0.0) -> None:
        super().__init__()
        several = [size for size in sizes if size > 1]
        # With three sizes or more, two are captured and the others follow from them.
        self._ends = (several[0], several[1]) if len(several) > 2 else ()
        self._captured = Captured(capture, self._ends, secs)

    @property
    def as_captured(self) -> Captured | None:
        """The captured graphs of all sizes; None if this object never resizes."""
        return self._captured if self._ends else None

    def _make(self, samples: int) -> Graph:
        found = None
        # A dim of one element cannot be cut, so the graph of one sample differs in form.
        if self._ends and samples not in (1, *self._ends):
            start, end = self._ends
            found = resized(self(start), self(end), (start, end), samples)
        return found or self._captured(samples)


class Captures(KeptGraphs):
    """Captures a model, in the mode and on the device in which it is; it is not run.

    Dim 0 of every tensor of the call that is as long as the first is the batch. Processes that
    receive a pickled copy share the graphs through a folder, because capturing takes seconds. If
    two ask for the same size, one captures it and the other waits.
    """

    def __init__(self, model: nn.Module, call: ModelCall, recycled: Mapping[str, int]) -> None:
        super().__init__()
        self._model, self._call, self._recycled = model, call, recycled
        self._folder: Path | None = None  # created when this object is first pickled

    def __getstate__(self) -> dict[str, Any]:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="superscaler-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            for samples, graph in self._made.items():
                _kept(self._folder / f"{samples}.pickle", partial(_same, graph))
        return super().__getstate__()

    def _make(self, samples: int) -> Graph:
        kept = self._folder and self._folder / f"{samples}.pickle"
        return _kept(kept, partial(self._capture, samples))

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
                # The first capture has warned of the opaque ops.
                warnings.simplefilter("ignore", OpaqueWarning)
            return capture(self._model, *call.arguments, recycled=self._recycled or None)


def _same(graph: Graph, samples: int = 0) -> Graph:
    """A graph that has the only microbatch size that is asked for."""
    return graph


def _kept(path: Path | None, make: Callable[[], Graph]) -> Graph:
    """The graph in a file; if there is no file yet, a new graph that is written there."""
    if path is None:
        return make()
    # The system unlocks the file if this process dies, also in the middle of a capture.
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            graph = pickle.loads(path.read_bytes())
            assert isinstance(graph, Graph)
            return graph
        graph = make()
        write_whole(path, pickle.dumps(graph))
        return graph
