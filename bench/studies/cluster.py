"""The paper's machines, 4 hosts of 8 V100s, and what is assumed of them."""

from __future__ import annotations

from math import ceil

import rvdcomm as rv
from superscaler_core.simulator import PROFILES, DeviceProfile

GPUS = (4, 8, 16, 32)
"""Sizes that the paper shows; 4 are half a host."""

PER_HOST = 8

RESERVED_BYTES = 1 << 30
"""Of every GPU, for the CUDA context, communicators and what an allocator cannot use: assumed. It
is not more because the paper's public code runs an mBART of 48 + 48 layers on 32 GPUs in 29.64 GB.
"""


def profile() -> DeviceProfile:
    """A V100 with 32 GB."""
    return PROFILES["v100"]


def limit_bytes() -> int:
    """What a program may need of a GPU."""
    return profile().memory_bytes - RESERVED_BYTES


def topology(num_gpus: int) -> rv.Topology:
    """NVLink inside hosts of 8, one NIC of 100 Gbit/s a host between them."""
    hosts = ceil(num_gpus / PER_HOST)
    return rv.Topology.preset("dgx-v100", hosts, min(num_gpus, PER_HOST))


ASSUMPTIONS = (
    "GPUs: V100-32GB, 8 a host, NVLink inside, one 100 Gbit/s InfiniBand NIC a host (the paper's "
    "test bed); NVLink and NIC at 0.8 and 0.88 of their data sheets.",
    f"{RESERVED_BYTES >> 30} GiB of every GPU is kept free, for the CUDA context, communicators "
    "and what an allocator cannot use; with 2 GiB the largest mBART of the paper's public code, "
    "which says that it runs in 29.64 GB, would not fit here under any plan.",
    "Of the peaks are reached, by the size of an op, the shares of a V100's published measurements "
    "(docs/costs.md): of float32 products 0.69 to 0.92, of float16 products 0.25 to 0.78.",
    "Every system communicates by the same rvdcomm plans, so what differs is the parallelization "
    "alone: no system's own overheads are modelled, and no system overlaps reductions of gradients "
    "with its backward.",
    "Replicas of Megatron's and co-shard's stages share master weights and states (ZeRO 1); the "
    "paper's public code needs that too, where it runs 15 B parameters under co-shard on 4 stages "
    "and 4 replicas in 26.73 GB. Tensor parallel is of the paper's time: it cuts words, but no "
    "sequences.",
    "Stages of Megatron's and co-shard's pipelines have blocks that take nearly as long, forward "
    "and backward; those of the interlaced pipeline and of 3F1B have as many blocks each.",
    "A step is a forward and a backward of the whole batch, and the optimizer's (Adam).",
)
