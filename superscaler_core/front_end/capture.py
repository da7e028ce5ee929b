"""Capture: traces a model, and turns the traced program into a graph."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from rvdcomm.collector import paused_collector
from superscaler_core.errors import CaptureError, OpaqueWarning
from superscaler_core.front_end.autocast import no_autocast
from superscaler_core.front_end.convert import graph_of
from superscaler_core.front_end.dense import check_dense
from superscaler_core.front_end.effects import check_model
from superscaler_core.front_end.export import trace
from superscaler_core.front_end.model_call import ModelCall
from superscaler_core.front_end.recorded_outputs import install_recorders
from superscaler_core.front_end.state import State
from superscaler_core.graph.graph import Graph
from superscaler_core.graph.opaque import opaque_notes
from superscaler_core.rules.records import TracedProgram


@paused_collector()
def capture(
    model: nn.Module,
    args: Sequence[Any] | Mapping[str, Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    recycled: Mapping[str, int] | None = None,
    results: Sequence[str | int] = (),
    changing: Collection[str] = (),
) -> Graph:
    """Capture a model's forward pass on one microbatch as a graph, which determines its gradients.

    The model is traced, not run: it may be on the meta device. It is captured in its present mode,
    ``train()`` or ``eval()``, and with the casts of ``torch.autocast`` where that is on. A mean
    cross entropy is over the labels that are not ignored, as in torch; devices that share a
    microbatch add up their numbers of labels before its backward.

    Args:
        model: its ``forward`` returns a scalar loss, alone, first in a tuple, or by the name
            ``loss`` (``output.loss`` or ``output["loss"]``).
        args, kwargs: example arguments, by position and by name (``args`` may be a mapping too);
            only shapes and dtypes of tensors matter. Sizes are those of one microbatch, and are
            fixed in the graph. Caches that only generation uses are switched off.
        name: name of the graph; the class of the model if None.
        recycled: names of arguments whose value is a result of the previous pass (zeros in the
            first pass), each with the number of the result, counted from 1. ``forward`` then
            returns ``(loss, result 1, ...)``, and a schedule says how many recycling passes
            come before the pass that is trained.
        results: further values of the output to keep beside the loss: names of keys or fields, or
            positions in a tuple. A program returns them whole on every rank (``Trainer.results``).
        changing: names of buffers that get other values later, though this forward may not change
            them: what depends on them is computed in every step, and not once at the capture.

    Raises:
        CaptureError: tracing cannot follow the model, an op cannot be part of a graph, or the model
            has an effect that a graph would silently lose, such as a hook on a gradient. The
            message names the cause, its module and a remedy.

    >>> import torch
    >>> class Line(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.line = nn.Linear(3, 5, bias=False)
    ...
    ...     def forward(self, x):
    ...         return self.line(x).sum()
    >>> print(capture(Line(), (torch.ones(2, 3),)))
    Line: 2 ops
    line:linear: x[2, 3], line.weight[5, 3] -> line.linear[2, 5]  (b k+, n k+ -> b n)
    sum: line.linear[2, 5] -> sum[]  (b+ s+ -> ())
    """
    title = name or type(model).__name__
    check_model(model)
    num_results = max((recycled or {}).values(), default=0)
    kept = tuple(dict.fromkeys(results))
    called = ModelCall.of(model, args, kwargs, num_results=num_results, results=kept)
    check_dense("input", called.named)
    learned = tuple(tensor.requires_grad for tensor in called.tensors)
    called = called.copied(model)
    install_recorders(model, called)

    def call() -> tuple[TracedProgram, Graph]:
        try:
            program = trace(model, called)
            names = tuple(map(str, kept))
            made = graph_of(program, model, title, recycled or {}, names, changing, learned)
            return program, made
        except CaptureError as error:
            if not error.node:
                raise
            refused = error
        # If tracing itself failed, it fails again here, now with the user's line in the message.
        again = trace(model, called, lines=True)
        line = next((n.line for n in again.nodes if n.name == refused.node), "")
        raise CaptureError(f"{refused}{line}")

    state = State(model)
    # Tracing enters the autocasts of `called`; constants that are computed here are not cast.
    with no_autocast():
        with state.watched():
            program, graph = call()
        if state.changed:
            state.check(program, graph, lambda: call()[1])
    if notes := opaque_notes(graph):
        head = (
            f"{title}: every device that needs these computes all of them, as no rule splits them:"
        )
        # The stack level skips the frames of this function and of its decorator.
        warnings.warn("\n  ".join([head, *notes]), OpaqueWarning, stacklevel=3)
    return graph
