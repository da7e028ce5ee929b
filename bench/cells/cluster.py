"""Cluster: the machines of a cell and the assumptions about them; by default the paper's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

import rvdcomm as rv
from superscaler_core.cost import PROFILES, DeviceProfile

GPUS = (4, 8, 16, 32)
"""Numbers of GPUs in the paper; 4 GPUs are half a host."""


@dataclass(frozen=True)
class Cluster:
    """Hosts of equal GPUs.

    Attributes:
        profile: profile of every GPU.
        inside: link of a GPU to the other GPUs of its host.
        between: link of a host to the other hosts; the GPUs of the host share it.
        reserved_bytes: memory per GPU for the CUDA context, the communicators and the loss to
            fragmentation in the allocator.
        per_host: GPUs per host.
    """

    profile: DeviceProfile
    inside: rv.Link
    between: rv.Link
    reserved_bytes: int = 2 << 30
    per_host: int = 8

    @property
    def limit_bytes(self) -> int:
        """Memory per GPU that a program may use."""
        return self.profile.memory_bytes - self.reserved_bytes

    def topology(self, num_gpus: int) -> rv.Topology:
        """The topology of the first ``num_gpus`` GPUs."""
        if num_gpus <= self.per_host:
            return rv.Topology.single_host(
                num_gpus, self.inside.alpha_secs, self.inside.bytes_per_sec
            )
        hosts = [
            range(host * self.per_host, min((host + 1) * self.per_host, num_gpus))
            for host in range(ceil(num_gpus / self.per_host))
        ]
        return rv.Topology.hosts(hosts, intra=self.inside, inter=self.between)


PAPER = Cluster(PROFILES["v100"], rv.Link(5e-6, 120e9), rv.Link(15e-6, 11e9))
"""The paper's test bed: 4 hosts of 8 V100s with NVLink, and one NIC of 100 Gbit/s per host.

``docs/costs.md`` gives the sources of the reserved memory.
"""

EAGER = replace(PAPER, profile=PROFILES["v100-eager"])
"""The same, with hosts that launch kernel by kernel from Python, as PyTorch did in 2022.

Their rate is that of Megatron-LM on A100s (docs/truth.md); nobody measured it on these hosts.
"""

ASSUMPTIONS = (
    "GPUs: V100 with 32 GB, 8 a host, NVLink inside, one 100 Gbit/s InfiniBand NIC a host, as in "
    "the paper. Links reach 0.8 (NVLink) and 0.88 (NIC) of their data sheets.",
    f"{PAPER.reserved_bytes >> 30} GiB of every GPU is reserved for the driver, the CUDA context "
    "and communicators (docs/costs.md).",
    *(f"{line[:1].upper()}{line[1:]}." for line in PAPER.profile.assumptions),
    *(
        f"In the column then, but for Alpa's, which compiles its stages, {line}."
        for line in EAGER.profile.assumptions
        if line.startswith("hosts")
    ),
    "All systems communicate by the same library and have the same cost model, so only the "
    "parallelization differs. Overheads of a system's own are not modelled.",
    "A step is a forward and a backward pass of the whole batch, and the optimizer's update.",
)
