"""Reading: what the measured runs are taken to have done, and the cluster they ran on."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

import rvdcomm as rv
import superscaler_core as ss
from bench.truth.megatron import MegatronConfig, MegatronGPT
from bench.truth.rows import Row
from superscaler_core.cost import PROFILES, Collective, DeviceProfile, Reach
from superscaler_core.evaluation import Resizing
from superscaler_core.models.gpt import GPT, GPTConfig
from superscaler_core.plan import Keep
from superscaler_core.plans.hybrid import hybrid

GPUS_PER_HOST = 8

COLLECTIVES: Mapping[int, Collective] = {
    2: Collective(46e-6, 193e9),
    4: Collective(54e-6, 218e9),
    8: Collective(79e-6, 227e9),
}
"""NCCL's all-reduce in a host: least squares of relative errors over the measured tables
(``python -m bench.truth --collectives``)."""


@dataclass(frozen=True)
class Constants:
    """What is fitted, to the first rows of the single-node file alone (``--fit``).

    Attributes:
        issue_us: time of the host for a kernel.
        action_ms: time of the host for a forward or a backward, outside of its kernels.
        memory: share of the peak that passes over memory reach.
        call8_us: time of the host for a collective of 8 GPUs. Rows whose tensor-parallel group has
            8 GPUs take 1.4 times as long as those with 4 however small their kernels are; nothing
            in the data says why.
    """

    issue_us: float = 48.0
    action_ms: float = 1.5
    memory: float = 0.6875
    call8_us: float = 275.0

    def profile(self) -> DeviceProfile:
        """An A100 driven by Megatron-LM 2.x from Python, whose timers wait for the device.

        Source of the waits: NVIDIA/Megatron-LM v2.5, ``megatron/global_vars.py`` (``_Timer``) and
        ``megatron/schedules.py``: a timer is started and stopped around each forward and backward,
        each time with ``torch.cuda.synchronize()``.
        """
        late = COLLECTIVES[8]._replace(issue_secs=1e-6 * self.call8_us)
        return replace(
            PROFILES["a100"],
            memory=Reach(((1.0, self.memory),)),
            issue_secs=1e-6 * self.issue_us,
            action_secs=1e-3 * self.action_ms,
            host_waits=True,
            collectives={**COLLECTIVES, 8: late},
        )


@dataclass(frozen=True)
class Reading:
    """One reading of the settings that the data do not state.

    Attributes:
        recompute: the stages whose layers are recomputed: "all", "all but last", or "none".
        vocabulary: tokens, before they are padded.
        is_fused: whether kernels are fused as Megatron's are; otherwise as in our own GPT.
    """

    recompute: str = "all"
    vocabulary: int = 50257
    is_fused: bool = True


READINGS: Mapping[str, Reading] = {
    "as chosen": Reading(),
    "last stage kept": Reading(recompute="all but last"),
    "nothing recomputed": Reading(recompute="none"),
    "vocabulary of 32,000": Reading(vocabulary=32000),
    "unfused kernels": Reading(is_fused=False),
}


def topology_of(gpus: int) -> rv.Topology:
    """Hosts of 8 A100s on NVSwitch with 4 x 200 Gbit/s InfiniBand each.

    Source: the paper of the data (vTrain, Bang et al., MICRO 2024) and its repository, which has
    800 Gbit/s a node; 0.9 of that is payload.
    """
    intra, inter = rv.Link(3e-6, COLLECTIVES[8].bytes_per_sec), rv.Link(12e-6, 0.9 * 100e9)
    if gpus <= GPUS_PER_HOST:
        return rv.Topology.single_host(gpus, intra.alpha_secs, intra.bytes_per_sec)
    hosts = [range(a, a + GPUS_PER_HOST) for a in range(0, gpus, GPUS_PER_HOST)]
    return rv.Topology.hosts(hosts, intra, inter)


class Programs:
    """Compiles rows under one reading; rows of one model share their graphs.

    Args:
        reading: what the runs are taken to have done.
        all_rows: all rows to come.
    """

    def __init__(self, reading: Reading, all_rows: Iterable[Row]) -> None:
        self._reading, sizes = reading, dict[tuple[int, ...], set[int]]()
        for row in all_rows:
            sizes.setdefault(self._model(row), set()).add(row.micro * row.dp)
        self._graphs: dict[tuple[int, ...], Resizing] = {
            model: Resizing(partial(self._capture, model), sorted(mine))
            for model, mine in sizes.items()
        }

    def compiled(self, row: Row) -> ss.Compiled:
        """The program of a row: Megatron's grid, 1F1B, mixed precision with Adam."""
        plan = ss.Plan(self._graphs[self._model(row)](row.micro * row.dp), devices=range(row.gpus))
        hybrid(plan, tp=row.tp, pp=row.pp, microbatches=row.microbatches, vocabulary=True)
        recomputed = plan.blocks.layers
        if self._reading.recompute == "all but last":
            recomputed = recomputed[: len(recomputed) - row.layers // row.pp]
        if self._reading.recompute != "none" and recomputed:
            plan.keep(Keep.BLOCK_INPUTS, recomputed)
        precision = ss.Precision(master=torch.float32)
        return ss.compile(plan, topology=topology_of(row.gpus), precision=precision)

    def _model(self, row: Row) -> tuple[int, ...]:
        # Megatron-LM pads the vocabulary so that every part has a multiple of 128 words.
        step = 128 * row.tp
        words = -(-self._reading.vocabulary // step) * step
        return row.layers, row.width, row.heads, row.sequence, words

    def _capture(self, model: tuple[int, ...], batch: int) -> ss.Graph:
        layers, width, heads, sequence, words = model
        if self._reading.is_fused:
            return captured(MegatronConfig(layers, width, heads, sequence, words), batch)
        return captured(GPTConfig(words, sequence, layers, width, heads, 0.1, fused=False), batch)


def captured(config: MegatronConfig | GPTConfig, batch: int) -> ss.Graph:
    """The graph of a GPT in half precision for so many sequences."""
    with torch.device("meta"):
        model = MegatronGPT(config) if isinstance(config, MegatronConfig) else GPT(config)
        tokens = torch.empty(batch, config.sequence, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ss.capture(model.half(), (tokens, tokens))
