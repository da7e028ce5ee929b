"""HiDup's models and clusters, and the systems that it is compared with, as sPrograms and planners.

Source: the public code of HiDup (``exp/``) and its talk. There are 32 samples per device and step,
and two experts per device. The sources do not say whether the V100s had 16 or 32 GB; we assume 32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

import rvdcomm as rv
from bench.cells.cluster import PAPER, Cluster
from bench.cells.workload import Workload
from superscaler_core.evaluation import Candidate, Request, SearchPlanner, Trial
from superscaler_core.plan import Overlap, Plan
from superscaler_core.plans import PLANS
from superscaler_core.published.models.moe_encoder import EncoderConfig

MODELS = ("bert-sgmoe", "bert-switch", "vit-sgmoe", "vit-switch")

SAMPLES = 32
"""Samples per step and device."""

CLUSTERS = {
    "1x4": (1, 4, 0.0),
    "2x4-100gbps": (2, 4, 100e9),
    "2x4-30gbps": (2, 4, 30e9),
    "8x8-10gbps": (8, 8, 9.71e9),
}
"""Hosts, V100s per host, and bits per second between hosts, by the name of the cluster.

The break-down of the talk covers the first three. In the fourth, iperf3 measured 9.71 Gbit/s on
links of 10 Gbit/s.
"""

NVLINK = rv.Link(5e-6, 130e9)
"""A V100's six NVLinks of 25 GB/s each; 130 GB/s is the assumed rate that collectives reach."""

NETWORK_SECS = 2e-5
"""Assumed latency between hosts, in seconds."""


def num_gpus(cluster: str) -> int:
    """The number of GPUs of a cluster."""
    hosts, size, _ = CLUSTERS[cluster]
    return hosts * size


def cluster_of(cluster: str) -> Cluster:
    """A cluster by its name; the devices of a host share one network card."""
    hosts, size, bits_per_sec = CLUSTERS[cluster]
    between = rv.Link(NETWORK_SECS, bits_per_sec / 8) if hosts > 1 else NVLINK
    return replace(PAPER, inside=NVLINK, between=between, per_host=size)


def topology_of(cluster: str) -> rv.Topology:
    """The topology of a cluster."""
    return cluster_of(cluster).topology(num_gpus(cluster))


def workload(model: str, num: int) -> Workload:
    """The workload of a model on ``num`` GPUs."""
    config = replace(EncoderConfig.presets()[model], experts=2 * num)
    sizes = {each.name: getattr(config, each.name) for each in fields(config)}
    return Workload("moe_encoder", sizes, "float32", SAMPLES * num)


# --- systems ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replicated:
    """An sProgram for data parallelism: every device has all experts.

    Attributes:
        bucket_bytes: bytes of gradients per reduction; reductions run during the backward.
    """

    bucket_bytes: int

    def __call__(self, plan: Plan) -> None:
        """Fill a plan."""
        PLANS["data_parallel"](plan)
        plan.overlap = Overlap(reductions=True, bucket_bytes=self.bucket_bytes)


@dataclass(frozen=True)
class DealtOut:
    """An sProgram for expert parallelism; gradients are reduced after the backward.

    Attributes:
        bucket_bytes: bytes of gradients per reduction.
        ep: as in ``expert_parallel``.
    """

    bucket_bytes: int
    ep: int = 0

    def __call__(self, plan: Plan) -> None:
        """Fill a plan."""
        PLANS["expert_parallel"](plan, ep=self.ep)
        plan.overlap = Overlap(bucket_bytes=self.bucket_bytes)


SYSTEMS: Mapping[str, Replicated | DealtOut] = {
    "DDP": Replicated(25 << 20),
    "Horovod": Replicated(64 << 20),
    "FastMoE": DealtOut(1 << 40),
    "DeepSpeed-MoE": DealtOut(4 * 500_000_000),
}
"""The systems by name, with the default bucket sizes of their releases.

DDP has buckets of 25 MiB (PyTorch 1.9), and Horovod a fusion buffer of 64 MiB. FastMoE reduces all
gradients at once (``allreduce_params``), and DeepSpeed 500 million elements at a time (0.5.10).
FastMoE and DeepSpeed both distribute the experts over all devices. Not modelled: FastMoE does not
pad experts, and both have gating kernels of their own. Here they therefore differ only in the
bucket size.
"""


def tuned(system: Replicated | DealtOut) -> SearchPlanner:
    """A system as a planner: for every size of expert groups, the largest microbatch that fits."""

    def propose(request: Request) -> Iterator[Candidate]:
        num = len(request.devices)
        forms: list[Replicated | DealtOut] = [system]
        if isinstance(system, DealtOut):
            forms = [replace(system, ep=num >> i) for i in range(num.bit_length() - 1)]
        for form in forms:
            yield from _candidates(form, request.samples[-1], num)

    return propose


def _candidates(form: Replicated | DealtOut, samples: int, num: int) -> Iterator[Candidate]:
    """A candidate with microbatches of ``samples``; if it lacks memory, one with half follows."""
    if samples < num:
        return
    ep = f" ep={form.ep}" if isinstance(form, DealtOut) else ""

    def follow(trial: Trial) -> Iterator[Candidate]:
        if trial.lacks_memory:
            yield from _candidates(form, samples // 2, num)

    yield Candidate(f"samples={samples}{ep}", samples, form, follow=follow)
