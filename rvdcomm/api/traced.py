"""Traced: how ``torch.compile`` treats the functions that people call."""

from __future__ import annotations

from functools import wraps
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch.compiler import is_dynamo_compiling

Function = TypeVar("Function", bound=Any)


def runs_whole(function: Function) -> Function:
    """Keep ``torch.compile`` from tracing into a function and what it calls.

    Without it, ``torch.compile`` would trace the body of a call that breaks the graph. Unlike
    ``torch.compiler.disable``, it adds no time to a call outside of a compiled function.
    """
    strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, strategy)
    return function


def breaks_graph(function: Function) -> Function:
    """Let a function that ``torch.compile`` meets break the graph, and run as without it.

    Unlike ``torch.compiler.disable``, it adds little time to a call outside of a compiled function.
    """
    runs_whole(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            from rvdcomm.api import compiled  # Its imports take long.

            return compiled.eager(function, *args, **kwargs)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
