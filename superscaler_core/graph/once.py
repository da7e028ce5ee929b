"""Once: results that depend on a graph alone are computed once, and kept as long as the graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from superscaler_core.graph.graph import Graph
from superscaler_core.known import Known

P = ParamSpec("P")
R = TypeVar("R")


def known_of(graph: Graph, kind: str, most: int) -> Known[Any, Any]:
    """Results of one kind about a graph, at most ``most``, which live as long as it does."""
    found: Known[Any, Any] | None = graph.known.get(kind)
    return graph.known.setdefault(kind, Known(most)) if found is None else found


def once_per_graph(find: Callable[Concatenate[Graph, P], R]) -> Callable[Concatenate[Graph, P], R]:
    """Let a function of a graph, and of further hashable values, remember its results.

    All callers share a result, so nobody may change it. A graph that is copied or sent to another
    process arrives without results.
    """

    @wraps(find)
    def remembering(graph: Graph, /, *args: P.args, **kwargs: P.kwargs) -> R:
        key = find, args, *kwargs.items()
        if key not in graph.known:
            graph.known.setdefault(key, find(graph, *args, **kwargs))
        found: R = graph.known[key]
        return found

    return remembering
