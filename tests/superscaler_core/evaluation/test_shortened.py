"""Shortened graphs: graphs with fewer blocks, and estimates of the whole model from them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import Any

import pytest

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.evaluation.evaluate import evaluate
from superscaler_core.evaluation.request import Candidate, Request, Scope
from superscaler_core.evaluation.shortened import NotEvenError, even, repeats_of
from superscaler_core.models import MODELS, build, example_inputs
from superscaler_core.planners import Filling
from superscaler_core.planners.auto import Setting
from superscaler_core.simulator import PROFILES


@cache
def captured(model: str, **sizes: Any) -> ss.Graph:
    inputs = example_inputs(model, 2, **sizes)
    return ss.capture(build(model, **sizes), inputs, recycled=MODELS[model].recycled)


def computed(graph: ss.Graph) -> list[Any]:
    """A graph without names: the form of every op, and the numbers of its inputs and outputs."""
    numbers: dict[str, int] = {}

    def number(tensors: Any) -> list[int]:
        return [numbers.setdefault(tensor.name, len(numbers)) for tensor in tensors]

    inputs = number(graph.inputs)
    ops = [(op.index, op.form, number(op.inputs), number(op.outputs)) for op in graph.ops]
    recycled = [number(pair) for pair in graph.recycled.items()]
    kept = [sorted(number(graph.parameters.values())), len(graph.constants), len(graph.weights)]
    return [inputs, ops, number(graph.losses), recycled, kept[:2]]


DEEP: list[tuple[str, dict[str, Any], dict[str, Any], list[int]]] = [
    ("gpt", {"layers": 5}, {"layers": 2}, [1, 2, 3]),
    ("gpt", {"layers": 4}, {"layers": 3}, [3]),
    ("mbart", {"layers": 4}, {"layers": 3}, [2, 5]),
    ("swin", {"depths": (7, 1)}, {"depths": (3, 1)}, [2, 3, 4, 5]),
    ("evoformer", {"layers": 3}, {"layers": 2}, [1]),
]
"""A model, its sizes with many and with fewer blocks, and the numbers of the blocks to remove."""


@pytest.mark.parametrize(("model", "deep", "shallow", "removed"), DEEP)
def test_shortened_graph_equals_the_graph_of_a_model_with_fewer_layers(
    model: str, deep: dict[str, Any], shallow: dict[str, Any], removed: list[int]
) -> None:
    short = repeats_of(captured(model, **deep)).without(frozenset(removed))
    assert short is not None
    assert computed(short) == computed(captured(model, **shallow))


@pytest.mark.parametrize(
    ("model", "deep", "removed"),
    [
        ("gpt", {"layers": 5}, [0]),  # the first block; no block is before it
        ("gpt", {"layers": 5}, [5]),  # no such block
        ("mbart", {"layers": 4}, [3]),  # the encoder's last, with the norm behind it
        ("swin", {"depths": (7, 1)}, [3]),  # every second block shifts its windows
        ("moe", {"layers": 4}, [3]),  # every second block has experts
        ("mlp", {}, [1]),
    ],
)
def test_blocks_that_differ_from_all_before_them_are_not_removed(
    model: str, deep: dict[str, Any], removed: list[int]
) -> None:
    assert repeats_of(captured(model, **deep)).without(frozenset(removed)) is None


@pytest.mark.parametrize(
    ("sizes", "shorter", "longer"),
    [((24,), (3,), (4,)), ((12, 12), (3, 3), (4, 4)), ((13, 11), (5, 3), (6, 4))],
)
def test_every_stage_is_shortened_by_the_same_number_of_blocks(
    sizes: tuple[int, ...], shorter: tuple[int, ...], longer: tuple[int, ...]
) -> None:
    short = repeats_of(captured("gpt", layers=24)).short(sizes)
    assert short is not None
    assert short.sizes == (shorter, longer)
    assert short.at_whole(*(size[0] for size in short.sizes)) == sizes[0]


def test_shallow_model_is_not_shortened() -> None:
    # Two blocks per stage are too few to extrapolate from. Two graphs with three and four blocks
    # per stage are together as large as one graph with seven.
    for num, stages in ((12, 6), (14, 2)):
        assert repeats_of(captured("gpt", layers=num)).short(even(num, stages)) is None


def test_figure_that_falls_with_more_blocks_is_not_extrapolated() -> None:
    short = repeats_of(captured("gpt", layers=24)).short((24,))
    assert short is not None
    with pytest.raises(NotEvenError):
        short.at_whole(2.0, 1.0)


ALONE = ["dp=2 zero=1", "tp=2 vocabulary", "dp=2 zero=3 prefetch=1 reductions", "tp=2 coshard=2"]


@pytest.mark.parametrize("model, words", [*zip(cycle(["gpt", "moe"]), ALONE), ("moe", ALONE[0])])
def test_estimate_from_fewer_blocks_equals_the_step_of_the_model(model: str, words: str) -> None:
    short, whole = evaluations(model, words)
    assert (short.is_estimate, whole.is_estimate) == (True, False)
    # The simulator rounds the time of each op to whole picoseconds.
    assert short.secs == pytest.approx(whole.secs, rel=1e-6)


@pytest.mark.parametrize("words", ["pp=2", "pp=2 keep=block_inputs", "pp=2 schedule=chimera"])
def test_estimate_from_fewer_blocks_is_near_the_step_of_a_pipeline(words: str) -> None:
    short, whole = evaluations("gpt", words)
    # The slowest stage of the short model may be another one.
    assert short.secs == pytest.approx(whole.secs, rel=0.01)
    assert short.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.01)


def evaluations(model: str, words: str) -> tuple[Any, Any]:
    """The trials of an evaluation of fewer blocks and of all blocks."""
    graph = captured(model, layers=24 if model == "moe" else 12, sequence=16)
    asked = Request(
        lambda samples: graph, (2,), 8, (0, 1), rv.Topology.single_host(2, 5e-6, 20e9),
        PROFILES["v100"], 1 << 34,
    )  # fmt: skip
    setting = Setting.parse(f"hybrid {words}")
    filling = Filling(setting, asked.profile, 0, 4)
    filled = Candidate("", 2, filling)
    short = evaluate(asked, filled, Scope(stages=filling.sizes))
    return short, evaluate(replace(asked), filled)
