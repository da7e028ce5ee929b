"""Traced: how ``torch.compile`` treats the functions that people call."""

from __future__ import annotations

from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)

Function = TypeVar("Function", bound=Any)


def runs_whole(function: Function) -> Function:
    """Mark a function that is either put into a graph or run as it is, with all that it calls.

    Else, where a call breaks the graph, ``torch.compile`` would try its luck with what the call
    does inside. It costs nothing where nothing is compiled, as ``torch.compiler.disable`` would.
    """
    strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, strategy)
    return function
