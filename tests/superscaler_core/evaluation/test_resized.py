"""Resized graphs: two captured batch sizes give the graphs of the others, if only sizes differ."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import cache
from itertools import cycle

import pytest

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.evaluation.microbatches import Resizing
from superscaler_core.evaluation.request import Candidate, Request
from superscaler_core.evaluation.resized import is_same, resized
from superscaler_core.models import build, example_inputs
from superscaler_core.planners import search_request
from superscaler_core.plans import PLANS
from superscaler_core.simulator import PROFILES

EVEN = ("gpt", "mbart", "swin")
"""Models whose sizes grow linearly with the batch."""


@cache
def captured(model: str, samples: int) -> ss.Graph:
    return ss.capture(build(model), example_inputs(model, samples))


@pytest.mark.parametrize("model, samples", [*zip(EVEN, cycle([3, 12]))])
def test_graphs_of_two_batch_sizes_give_the_graph_of_any_other_size(
    model: str, samples: int
) -> None:
    made = resized(captured(model, 2), captured(model, 4), (2, 4), samples)
    assert made is not None
    assert is_same(made, captured(model, samples))
    assert not is_same(made, captured(model, samples + 1))


def test_models_that_differ_are_not_resized() -> None:
    # The loss of mlp is divided by a number in the code of the op, which depends on the batch.
    assert resized(captured("mlp", 2), captured("mlp", 4), (2, 4), 8) is None
    gpt = captured("gpt", 2)
    assert resized(gpt, captured("mbart", 4), (2, 4), 8) is None
    other = replace(gpt, ops=(replace(gpt.ops[0], kind="other"), *gpt.ops[1:]))
    assert resized(gpt, other, (2, 4), 8) is None


def test_fractional_or_negative_sizes_are_not_resized() -> None:
    # The last two calls give half a sample and a negative number of samples.
    assert resized(captured("gpt", 2), captured("gpt", 4), (4, 8), 6) is not None
    assert resized(captured("gpt", 2), captured("gpt", 4), (4, 8), 5) is None
    assert resized(captured("gpt", 2), captured("gpt", 4), (3, 4), 2) is None


class Rounded:
    """Captures a model; size 8 has far more samples than a resized graph can predict."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, samples: int) -> ss.Graph:
        self.asked.append(samples)
        return captured("gpt", samples if samples < 8 else 64 * samples)


def test_only_one_sample_and_two_more_sizes_are_captured() -> None:
    capture = Rounded()
    graphs = Resizing(capture, (1, 2, 4, 8))
    assert [graphs(n).inputs[0].shape[0] for n in (1, 2, 4, 8, 8)] == [1, 2, 4, 8, 8]
    assert capture.asked == [1, 2, 4]
    assert pickle.loads(pickle.dumps(graphs))(2).name == graphs(2).name


def test_best_plan_is_evaluated_on_the_captured_graph() -> None:
    capture = Rounded()
    graphs = Resizing(capture, (1, 2, 4, 8))
    request = Request(
        graphs, (1, 2, 4, 8), 8, (0, 1), rv.Topology.single_host(2, 5e-6, 20e9),
        PROFILES["v100"], 1 << 34, captured=graphs.as_captured,
    )  # fmt: skip

    def propose(request: Request) -> list[Candidate]:
        return [Candidate(f"{n}", n, PLANS["data_parallel"]) for n in (4, 8)]

    small = search_request(request, lambda _: propose(request)[:1])
    limited = replace(request, memory_bytes=2 * small.peak_bytes)
    # With the resized graph, the one large microbatch fits and is faster.
    assert search_request(replace(limited, captured=None), propose).name == "8"
    found = search_request(limited, propose)
    assert (found.name, found.secs) == ("4", small.secs)
    assert found.plan.graph is captured("gpt", 4)
    assert "needs" in found.tried[-1].problem
