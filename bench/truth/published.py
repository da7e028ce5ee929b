"""Published: steps of Megatron-LM that a paper reports, predicted with the same constants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import rvdcomm as rv
import superscaler_core as ss
from bench.truth.megatron import MegatronConfig
from bench.truth.reading import GPUS_PER_HOST, Constants, captured, topology_of
from superscaler_core.plan import Keep
from superscaler_core.plans.hybrid import hybrid
from superscaler_core.simulator import simulate


@dataclass(frozen=True)
class Published:
    """Two steps of a model: with full recomputation, and with selective recomputation besides
    sequence parallelism.

    Attributes:
        config: the model.
        gpus, pp, chunks, batch: GPUs, of which 8 are tensor parallel; stages; chunks of layers of
            a stage; sequences of a step, one a microbatch.
        full_secs, selective_secs: the published steps.
    """

    config: MegatronConfig
    gpus: int
    pp: int
    chunks: int
    batch: int
    full_secs: float
    selective_secs: float


def _gpt(layers: int, width: int, heads: int) -> MegatronConfig:
    return MegatronConfig(layers, width, heads, sequence=2048, vocabulary=51200)


KORTHIKANTI: Mapping[str, Published] = {
    "22B": Published(_gpt(48, 6144, 64), 8, 1, 1, 4, 1.42, 1.10),
    "175B": Published(_gpt(96, 12288, 96), 64, 8, 3, 64, 18.13, 13.75),
    "530B": Published(_gpt(105, 20480, 128), 280, 35, 3, 280, 49.05, 37.83),
    "1T": Published(_gpt(128, 25600, 160), 512, 64, 1, 512, 94.42, 71.49),
}
"""Tables 3 and 5 of Korthikanti et al. 2022 (arXiv:2205.05198): A100s of 80 GB, 8 a host."""

TP = 8

HOW: Mapping[str, Keep] = {"full": Keep.BLOCK_INPUTS, "selective": Keep.ATTENTION_ONLY}
"""What is kept of a layer."""


def predictions(constants: Constants) -> Iterator[dict[str, Any]]:
    """Both steps of each model, with the share of the step that the second one saves."""
    profile = constants.profile()
    for name, each in KORTHIKANTI.items():
        graph, topology = captured(each.config, 1), selene(each.gpus)
        found = {}
        for how, keep in HOW.items():
            plan = ss.Plan(graph, devices=range(each.gpus))
            hybrid(
                plan, tp=TP, pp=each.pp, microbatches=each.batch, chunks=each.chunks,
                sequence=how == "selective", vocabulary=True, keep=keep,
            )  # fmt: skip
            precision = ss.Precision(master=torch.float32)
            step = simulate(ss.compile(plan, topology=topology, precision=precision), profile)
            found[how] = step.secs, max(step.peak_bytes.values())
        yield {
            "model": name,
            "gpus": each.gpus,
            "full_secs": each.full_secs,
            "selective_secs": each.selective_secs,
            **{f"predicted_{how}_secs": secs for how, (secs, _) in found.items()},
            **{f"{how}_peak_bytes": peak for how, (_, peak) in found.items()},
        }


def selene(gpus: int) -> rv.Topology:
    """Hosts with a 200 Gbit/s NIC for each GPU (section 6 of the paper)."""
    if gpus <= GPUS_PER_HOST:
        return topology_of(gpus)
    return rv.Topology.preset("dgx-a100", gpus // GPUS_PER_HOST, GPUS_PER_HOST)
