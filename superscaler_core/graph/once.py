"""Once: results that depend on a graph alone are computed once, and kept as long as the graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from superscaler_core.graph.graph import Graph

P = ParamSpec("P")
R = TypeVar("R")


def once_per_graph(find: Callable[Concatenate[Graph, P], R]) -> Callable[Concatenate[Graph, P], R]:
    """Let a function of a graph, and of further hashable values, remember its results.

    All callers share a result, so nobody may change it. A graph that is copied or sent to another
    process arrives without results.
    """

    @wraps(find)
    def remembering(graph: Graph, /, *args: P.args, **kwargs: P.kwargs) -> R:
        key = find, args, *kwargs.items()
        if key not in graph.known:
            graph.known[key] = find(graph, *args, **kwargs)
        found: R = graph.known[key]
        return found

    return remembering
