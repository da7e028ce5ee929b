"""Presets: common clusters, as links of two or three levels.

Bandwidths are the vendors' figures for one direction times the share that is payload (about 0.85 on
NVLink, 0.9 on InfiniBand and Ethernet). Alphas are typical times of small messages. ``rvdcomm
calibrate`` measures those of a real cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

from rvdcomm.errors import LayoutError
from rvdcomm.layout.link import Link


@dataclass(frozen=True, slots=True)
class Preset:
    """A cluster's levels, innermost first.

    Attributes:
        names: the names of the levels.
        links: the port of one group of each level: a rank, a host, a pod of hosts.
        ranks_per_host: the usual number.
    """

    names: tuple[str, ...]
    links: tuple[Link, ...]
    ranks_per_host: int


_LEVELS = ("rank", "host", "pod")

PRESETS: dict[str, Preset] = {
    # 8 V100s: NVLink 2, 150 GB/s a GPU (DGX data sheet). One 100 Gbit/s InfiniBand NIC a host is
    # SuperScaler's test bed of 4 hosts x 8; a pod is a leaf switch of 16 hosts, 2:1 to the spine.
    "dgx-v100": Preset(
        _LEVELS, (Link(5e-6, 120e9), Link(15e-6, 11e9), Link(20e-6, 16 * 11e9 / 2)), 8
    ),
    # 8 A100s: NVLink 3, 300 GB/s a GPU; eight 200 Gbit/s NICs a host. 20 hosts are a scalable unit
    # of the SuperPOD reference architecture, whose fat tree is not oversubscribed.
    "dgx-a100": Preset(
        _LEVELS, (Link(3e-6, 240e9), Link(12e-6, 8 * 22e9), Link(16e-6, 20 * 8 * 22e9)), 8
    ),
    # 8 H100s: NVLink 4, 450 GB/s a GPU; eight 400 Gbit/s NICs a host; 32 hosts a scalable unit.
    "dgx-h100": Preset(
        _LEVELS, (Link(3e-6, 380e9), Link(12e-6, 8 * 45e9), Link(16e-6, 32 * 8 * 45e9)), 8
    ),
    # 72 B200s in one NVLink 5 domain, 900 GB/s a GPU; a 400 Gbit/s NIC a GPU leaves it. 8 domains
    # are a scalable unit.
    "gb200-nvl72": Preset(
        ("rank", "domain", "pod"),
        (Link(3e-6, 760e9), Link(12e-6, 72 * 45e9), Link(16e-6, 8 * 72 * 45e9)),
        72,
    ),
    # Processes on CPU hosts with 10 Gbit/s between them. Inside a host a stream of a few cores'
    # memory copies; 16 hosts a rack, whose uplink of 4 x 10 Gbit/s they share.
    "ethernet": Preset(
        _LEVELS, (Link(20e-6, 3e9), Link(60e-6, 1.15e9), Link(80e-6, 4 * 1.15e9)), 8
    ),
}

PRESETS |= {short: PRESETS[f"dgx-{short}"] for short in ("v100", "a100", "h100")}


def preset_of(name: str) -> Preset:
    """The preset of a name.

    Raises:
        LayoutError: there is none. The message lists the presets.
    """
    if name not in PRESETS:
        raise LayoutError(f"no preset {name!r}; the presets are {', '.join(sorted(PRESETS))}.")
    return PRESETS[name]
