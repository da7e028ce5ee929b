"""Presets: common clusters, as links of two or three levels.

Bandwidths are the vendors' figures for one direction times the share that is payload (about 0.85 on
NVLink, 0.9 on InfiniBand and Ethernet). Alphas are typical times of small messages. ``rvdcomm
calibrate`` measures the bandwidths and alphas of a real cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

from rvdcomm.errors import LayoutError
from rvdcomm.network.link import Link


@dataclass(frozen=True, slots=True)
class Preset:
    """A cluster's levels, innermost first.

    Attributes:
        names: the names of the levels.
        links: the port of one group of each level: a rank, a host, a pod of hosts.
        ranks_per_host: the usual number of ranks per host.
    """

    names: tuple[str, ...]
    links: tuple[Link, ...]
    ranks_per_host: int


_LEVELS = ("rank", "host", "pod")

PRESETS: dict[str, Preset] = {
    # 8 V100s: NVLink 2, 150 GB/s per GPU (DGX data sheet). One 100 Gbit/s InfiniBand NIC per host,
    # as in SuperScaler's test bed of 4 hosts with 8 GPUs each. A pod is a leaf switch of 16 hosts,
    # oversubscribed 2:1 to the spine.
    "dgx-v100": Preset(
        _LEVELS, (Link(5e-6, 120e9), Link(15e-6, 11e9), Link(20e-6, 16 * 11e9 / 2)), 8
    ),
    # 8 A100s: NVLink 3, 300 GB/s per GPU; eight 200 Gbit/s NICs per host. A pod is a scalable unit
    # (20 hosts) of the SuperPOD reference architecture, whose fat tree is not oversubscribed.
    "dgx-a100": Preset(
        _LEVELS, (Link(3e-6, 240e9), Link(12e-6, 8 * 22e9), Link(16e-6, 20 * 8 * 22e9)), 8
    ),
    # 8 H100s: NVLink 4, 450 GB/s per GPU; eight 400 Gbit/s NICs per host. A pod is a scalable unit
    # of 32 hosts.
    "dgx-h100": Preset(
        _LEVELS, (Link(3e-6, 380e9), Link(12e-6, 8 * 45e9), Link(16e-6, 32 * 8 * 45e9)), 8
    ),
    # 72 B200s in one NVLink 5 domain, 900 GB/s per GPU. One 400 Gbit/s NIC per GPU leads out of the
    # domain. A pod is a scalable unit of 8 domains.
    "gb200-nvl72": Preset(
        ("rank", "domain", "pod"),
        (Link(3e-6, 760e9), Link(12e-6, 72 * 45e9), Link(16e-6, 8 * 72 * 45e9)),
        72,
    ),
    # Processes on CPU hosts with 10 Gbit/s between them. Inside a host, the bandwidth is that of
    # memory copies by a few cores. A pod is a rack of 16 hosts with an uplink of 4 x 10 Gbit/s.
    "ethernet": Preset(
        _LEVELS, (Link(20e-6, 3e9), Link(60e-6, 1.15e9), Link(80e-6, 4 * 1.15e9)), 8
    ),
}

PRESETS |= {short: PRESETS[f"dgx-{short}"] for short in ("v100", "a100", "h100")}


def preset_of(name: str) -> Preset:
    """The preset with this name.

    Raises:
        LayoutError: no preset has this name. The message lists all names.
    """
    if name not in PRESETS:
        raise LayoutError(f"no preset {name!r}; the presets are {', '.join(sorted(PRESETS))}.")
    return PRESETS[name]
