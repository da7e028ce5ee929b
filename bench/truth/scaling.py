"""Scaling: the throughputs that Megatron-LM published for growing models, predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

import superscaler_core as ss
from bench.truth.megatron import MegatronConfig
from bench.truth.published import selene
from bench.truth.reading import Constants, captured
from superscaler_core.plan import Keep
from superscaler_core.plans.hybrid import hybrid
from superscaler_core.simulator import simulate

SEQUENCE, VOCABULARY = 2048, 51200

MEMORY_BYTES = 78 << 30
"""Of the 80 GB of an A100; 2 GiB are the context's and the communicators'."""

MICROS, CHUNKS = (1, 2, 4, 8), (1, 2)
"""Samples of a microbatch and replica, and chunks of a stage, which the table does not state."""


@dataclass(frozen=True)
class Scaled:
    """A row of the table.

    Attributes:
        layers, width, heads: of the model.
        tp, pp, gpus, batch: the grid, and the sequences of a step.
        tflops: published TFLOP/s of a GPU.
    """

    layers: int
    width: int
    heads: int
    tp: int
    pp: int
    gpus: int
    batch: int
    tflops: float

    @property
    def step_flops(self) -> float:
        """Operations of a step, with recomputation; equation 3 of the paper."""
        tokens, h = self.batch * SEQUENCE, self.width
        share = 1 + SEQUENCE / (6 * h) + VOCABULARY / (16 * self.layers * h)
        return 96 * tokens * self.layers * h**2 * share

    def tflops_of(self, secs: float) -> float:
        """TFLOP/s of a GPU if a step takes so long."""
        return self.step_flops / secs / self.gpus / 1e12


NARAYANAN: Mapping[str, Scaled] = {
    "1.7B": Scaled(24, 2304, 24, 1, 1, 32, 512, 137),
    "3.6B": Scaled(30, 3072, 32, 2, 1, 64, 512, 138),
    "7.5B": Scaled(36, 4096, 32, 4, 1, 128, 512, 142),
    "18.4B": Scaled(40, 6144, 48, 8, 1, 256, 1024, 135),
    "39.1B": Scaled(48, 8192, 64, 8, 2, 512, 1536, 138),
}
"""Table 1 of Narayanan et al. 2021 (arXiv:2104.04473), up to 512 A100s."""


def predictions(constants: Constants) -> Iterator[dict[str, Any]]:
    """For each model the fastest predicted step over what the table does not state."""
    for name, row in NARAYANAN.items():
        found = {}
        for micro, chunks in product(MICROS, CHUNKS):
            if (chunks == 1 or row.pp > 1) and (secs := _secs(row, micro, chunks, constants)):
                found[micro, chunks] = secs
        if not found:
            raise ValueError(f"{name}: no microbatch of {MICROS} fits {row.gpus} GPUs.")
        (micro, chunks), secs = min(found.items(), key=lambda each: each[1])
        yield {
            "model": name,
            "gpus": row.gpus,
            "tflops": row.tflops,
            "predicted_tflops": row.tflops_of(secs),
            "micro": micro,
            "chunks": chunks,
            "secs": secs,
        }


def _secs(row: Scaled, micro: int, chunks: int, constants: Constants) -> float | None:
    """The predicted step; None if the batch cannot be cut so, or it does not fit."""
    replicas = row.gpus // (row.tp * row.pp)
    microbatches, rest = divmod(row.batch, micro * replicas)
    if rest or (chunks > 1 and microbatches % row.pp):
        return None
    config = MegatronConfig(row.layers, row.width, row.heads, SEQUENCE, VOCABULARY)
    plan = ss.Plan(captured(config, micro * replicas), devices=range(row.gpus))
    hybrid(
        plan, tp=row.tp, pp=row.pp, microbatches=microbatches, chunks=chunks, vocabulary=True,
        keep=Keep.BLOCK_INPUTS,
    )  # fmt: skip
    precision = ss.Precision(master=torch.float32)
    made = ss.compile(plan, topology=selene(row.gpus), precision=precision)
    step = simulate(made, constants.profile())
    return step.secs if max(step.peak_bytes.values()) <= MEMORY_BYTES else None
