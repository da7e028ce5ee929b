"""``once_per_graph``: results that are cached with their graph."""

from __future__ import annotations

import pickle

from superscaler_core.graph.graph import Graph
from superscaler_core.graph.once import once_per_graph
from tests.superscaler_core.small import two_linears


def test_result_is_computed_once_per_graph_and_arguments() -> None:
    asked: list[tuple[Graph, int]] = []

    @once_per_graph
    def found(graph: Graph, number: int = 0) -> int:
        asked.append((graph, number))
        return number

    first, second = two_linears(), two_linears()
    assert [found(first, 1), found(first, 1), found(first, number=2), found(second, 1)] == [
        1,
        1,
        2,
        1,
    ]
    assert asked == [(first, 1), (first, 2), (second, 1)]


def test_pickled_graph_has_no_cached_results() -> None:
    graph = two_linears()
    once_per_graph(Graph.__str__)(graph)
    assert graph.known
    assert not pickle.loads(pickle.dumps(graph)).known
