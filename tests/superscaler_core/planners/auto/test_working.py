"""Laws of guessed computing: comparison with the times of all ops of the microbatch."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.cost.op_time import OpTimes
from superscaler_core.planners.auto.bounds import Bounds
from superscaler_core.planners.auto.working import PASSES, Working
from superscaler_core.planners.search.request import Request
from superscaler_core.simulator import PROFILES

TOKENS, HEADS, WIDTH, BATCH = 512, 16, 64, 32


class Biased(nn.Module):
    """Scores with a bias for every two tokens, computed once per microbatch, as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.empty(TOKENS, HEADS, WIDTH))
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.einsum("thw,shw->hts", self.places, self.places).tanh()
        mapped = self.map(x)
        scores = torch.einsum("bhtw,bhsw->bhts", mapped, mapped) + bias
        return scores.mean()


@cache
def graph(samples: int) -> ss.Graph:
    with torch.device("meta"):
        return ss.capture(Biased(), (torch.empty(samples, HEADS, TOKENS, WIDTH),))


REQUEST = Request(
    graph, (1, 2, 4, 8, 16, 32), BATCH, (0,), rv.Topology.single_host(1, 5e-6, 20e9),
    PROFILES["v100"], 1 << 34,
)  # fmt: skip


def secs_of(samples: int) -> float:
    """Seconds of all ops of a microbatch, without launches."""
    times, ops = OpTimes(REQUEST.profile), graph(samples).ops
    secs = sum(times.forward_secs(part) + times.backward_secs(part) for part in map(ss.Part, ops))
    return secs - PASSES * len(ops) * REQUEST.profile.launch_secs


@pytest.mark.parametrize("samples", REQUEST.samples)
def test_guess_counts_work_that_is_done_once_per_microbatch_once(samples: int) -> None:
    guessed = samples * Working(REQUEST).sample_secs(samples, 1)
    assert guessed == pytest.approx(secs_of(samples), rel=0.1)


def test_bound_holds_with_work_that_is_done_once_per_microbatch() -> None:
    least = min(BATCH // samples * secs_of(samples) for samples in REQUEST.samples)
    once = secs_of(1) - (secs_of(2) - secs_of(1))
    assert once > 0.3 * secs_of(1)
    assert 0 < Bounds(REQUEST).secs <= least
