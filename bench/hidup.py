"""HiDup's strategies for its four models on its clusters, with their predicted times.

python -m bench.hidup                        # one machine, two by 100 Gbps, two by 30 Gbps
python -m bench.hidup --cluster 8x8-10gbps --models bert-sgmoe --show
"""

from __future__ import annotations

import argparse
import sys

import torch

import rvdcomm as rv
from superscaler_core.cost import PROFILES, CostModel
from superscaler_core.front_end import capture
from superscaler_core.models import build, example_inputs
from superscaler_core.planners.hidup import BEAM, OurPrices, Prediction, PricedForms, hidup

# HiDup's clusters: hosts, V100s of a host, and the rate between hosts in bits a second; 9.71 Gbps
# of the 10 were measured by iperf3.
CLUSTERS = {
    "1x4": (1, 4, 0.0),
    "2x4-100gbps": (2, 4, 100e9),
    "2x4-30gbps": (2, 4, 30e9),
    "8x8-10gbps": (8, 8, 9.71e9),
}
MODELS = ("bert-sgmoe", "bert-switch", "vit-sgmoe", "vit-switch")

NVLINK = rv.Link(5e-6, 130e9)
"""A V100's six links, of 25 GB/s each, at what collectives reach of them; an assumption."""

NETWORK_SECS = 2e-5
"""Latency between hosts; an assumption."""

SAMPLES = 32
"""Of a step, for every device."""


def topology_of(cluster: str) -> rv.Topology:
    """The topology of a cluster; the devices of a host share its card."""
    hosts, size, bits_per_sec = CLUSTERS[cluster]
    if hosts == 1:
        return rv.Topology.single_host(size, NVLINK.alpha_secs, NVLINK.bytes_per_sec)
    ranks = [range(host * size, (host + 1) * size) for host in range(hosts)]
    between = rv.Link(NETWORK_SECS, bits_per_sec / 8)
    return rv.Topology.hosts([list(host) for host in ranks], intra=NVLINK, inter=between)


def strategy(model: str, cluster: str) -> tuple[Prediction, str]:
    """The strategy for a model of two experts a device, predicted and as a text."""
    hosts, size, _ = CLUSTERS[cluster]
    num = hosts * size
    with torch.device("meta"):
        built = build("moe_encoder", model, experts=2 * num)
    # The graph is of one half of a step.
    inputs = example_inputs("moe_encoder", SAMPLES * num // 2, model, experts=2 * num)
    costs = CostModel(capture(built, inputs), PROFILES["v100"], topology_of(cluster))
    forms = PricedForms(OurPrices(costs), tuple(range(num)))
    found = hidup(forms.problem, most_calls=None, beam=BEAM)
    return Prediction.of([stage.work for stage in found.stages]), forms.text(found)


def main(argv: list[str] | None = None) -> int:
    """Print a row for every model and cluster."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.hidup", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--cluster", choices=CLUSTERS, action="append", help="default: first three")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--show", action="store_true", help="print the strategies too")
    options = parser.parse_args(argv)
    print(f"{'model':12} {'cluster':12}    wall   total  computing  communication  overlap")
    for cluster in options.cluster or list(CLUSTERS)[:3]:
        for model in options.models:
            found, text = strategy(model, cluster)
            print(
                f"{model:12} {cluster:12} {found.wall_secs:7.4f} {found.total_secs:7.4f} "
                f"{found.computing_secs:10.4f} {found.comm_secs:14.4f} {found.overlap:8.1%}",
                flush=True,
            )
            if options.show:
                print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
