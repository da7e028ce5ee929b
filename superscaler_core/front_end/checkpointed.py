"""Checkpointed: calls of ``torch.utils.checkpoint`` in a model, marked in its traced program.

A checkpointed function computes the same values, and a plan decides when. But what a model asks for
is what a plan recomputes if nothing else is said, so the program tells which ops are in a call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any

import torch
import torch.utils.checkpoint
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import has_side_effect

from superscaler_core.rules.calls import is_tracing

_GENERATOR = "_checkpoint_without_reentrant_generator"


@cache
def mark_checkpoints() -> None:
    """From now on, where a model is traced, calls without reentrant autograd are marked.

    Replaces the function that torch runs around them; it does what it did where nothing is traced.
    """
    own = getattr(torch.utils.checkpoint, _GENERATOR)

    def marked(*args: Any, **kwargs: Any) -> Iterator[None]:
        if is_tracing():
            with checkpointed():
                yield
        else:
            yield from own(*args, **kwargs)

    setattr(torch.utils.checkpoint, _GENERATOR, marked)


@contextmanager
def checkpointed() -> Iterator[None]:
    """Inside this context the traced program is that of a checkpointed function.

    A call inside another one belongs to it.
    """
    depth = getattr(_STATE, "depth", 0)
    _STATE.depth = depth + 1
    if not depth:
        _mark(next(_NUMBERS))
    try:
        yield
    finally:
        _STATE.depth = depth
        if not depth:
            _mark(0)


_STATE = threading.local()
"""The depth of calls on this thread."""

_NUMBERS = count(1)


def _mark(number: int) -> None:
    mode = get_proxy_mode()
    if mode is not None:
        node = mode.tracer.create_node("call_function", CHECKPOINT, (number,), {})
        node.meta["val"] = None


torch.library.define("superscaler::checkpoint", "(int number) -> ()")
CHECKPOINT = torch.ops.superscaler.checkpoint.default
"""An op in a traced program: the calls from here on are in the checkpointed function with this
number; in none if it is 0."""
has_side_effect(CHECKPOINT)
