"""HiDup's evaluation: its models on its clusters, by its strategies and by the systems beside it.

A row is a simulated step: how long it takes, what a device computes and communicates in it, their
sum as the total, and HiDup's overlap: (total - wall) / min(computation, communication).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum

import superscaler_core as ss
from bench.hidup_models import CLUSTERS, MODELS, SYSTEMS, num_gpus, topology_of, workload
from bench.studies.cluster import PAPER
from bench.studies.workload import captured
from superscaler_core.cost import CostModel
from superscaler_core.planners.hidup import (
    BEAM,
    FormPrices,
    FormStrategy,
    OurPrices,
    Prediction,
    PricedForms,
    PublishedPrices,
    hidup,
    least_secs,
)
from superscaler_core.simulator import simulate
from superscaler_core.units import bytes_text

EPILOG = """\
examples:
  python -m bench.hidup                        # one machine, two by 100 Gbps, two by 30 Gbps
  python -m bench.hidup --cluster 8x8-10gbps --models bert-sgmoe
"""

PUBLISHED: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "1x4": {
        "HiDup": (0.2972, 0.2948, 0.0297),
        "DeepSpeed": (0.3988, 0.3531, 0.0282),
        "FastMoE": (0.3492, 0.2182, 0.1193),
    },
    "2x4-100gbps": {
        "HiDup": (0.3985, 0.3088, 0.1523),
        "DeepSpeed": (0.4993, 0.3479, 0.1347),
        "FastMoE": (0.6971, 0.2252, 0.4605),
    },
    "2x4-30gbps": {
        "HiDup": (0.6657, 0.3021, 0.4432),
        "DeepSpeed": (0.8251, 0.3469, 0.4585),
        "FastMoE": (0.7563, 0.2300, 0.5117),
    },
}
"""Wall, computation and communication in the paper's talk, which does not name the model."""


@dataclass(frozen=True)
class Row:
    """A step; seconds of a device.

    Attributes:
        name: of the system.
        wall_secs: of the step.
        compute_secs, comm_secs: what devices compute and communicate, on average.
        predicted_secs: by the planner; 0 if there is none.
        peak_bytes: of the fullest device; 0 if it was not simulated.
    """

    name: str
    wall_secs: float
    compute_secs: float
    comm_secs: float
    predicted_secs: float = 0.0
    peak_bytes: int = 0

    @property
    def overlap(self) -> float:
        """By HiDup's formula; at least 0, as waiting for others is neither."""
        return max(0.0, Prediction(self.wall_secs, self.compute_secs, self.comm_secs).overlap)

    def __str__(self) -> str:
        total = self.compute_secs + self.comm_secs
        predicted = f"{self.predicted_secs:9.4f}" if self.predicted_secs else " " * 9
        memory = f"{bytes_text(self.peak_bytes):>10}" if self.peak_bytes else ""
        return (
            f"  {self.name:22} {self.wall_secs:7.4f} {total:7.4f} {self.compute_secs:11.4f} "
            f"{self.comm_secs:13.4f} {self.overlap:8.1%} {predicted} {memory}"
        ).rstrip()


FEW = 3
"""Names of groups that are printed for a cut."""

HEADER = (
    f"  {'':22} {'wall':>7} {'total':>7} computation communication  overlap predicted     memory"
)


def of_systems(model: str, cluster: str) -> Iterator[Row]:
    """Every system with all samples of a device at once."""
    num = num_gpus(cluster)
    trained = workload(model, num)
    for name, fill in SYSTEMS.items():
        plan = ss.Plan(captured(trained, trained.batch), range(num))
        fill(plan)
        yield _simulated(name, plan, cluster)


def of_hidup(model: str, cluster: str) -> Iterator[tuple[Row, str]]:
    """HiDup's strategies by our prices and, where its own are known, by those; with their texts."""
    num = num_gpus(cluster)
    trained = workload(model, num)
    graph = captured(trained, trained.batch // 2)
    prices: dict[str, FormPrices] = {
        "HiDup": OurPrices(CostModel(graph, PAPER.profile, topology_of(cluster)))
    }
    if cluster == "8x8-10gbps":
        # Their all-gather has the rate of this cluster's cards.
        prices["HiDup, its prices"] = PublishedPrices(graph)
    for name, each in prices.items():
        forms = PricedForms(each, tuple(range(num)))
        strategy = hidup(forms.problem, most_calls=None, beam=BEAM)
        plan = ss.Plan(graph, range(num))
        forms.fill(plan, strategy)
        least = strategy.secs / least_secs(forms.problem) - 1
        text = f"predicted at most {least:.1%} above the best strategy; {in_words(forms, strategy)}"
        yield _simulated(name, plan, cluster, strategy.secs), text


def in_words(forms: PricedForms, strategy: FormStrategy) -> str:
    """How many groups of ops have each cut; of the rarer cuts, the first few of them."""
    groups: dict[str, list[str]] = {}
    for call, number in zip(forms.problem.calls, strategy.signatures, strict=True):
        groups.setdefault(call.signatures[number].name, []).append(call.name)
    common = max(groups, key=lambda cut: len(groups[cut]))
    words = []
    for cut, names in groups.items():
        short = [*dict.fromkeys(re.sub(r"layers\.\d+\.", "", name) for name in names)]
        which = (
            "" if cut == common else f" ({', '.join(short[:FEW])}{', ...' * (len(short) > FEW)})"
        )
        words.append(f"{cut}: {len(names)}{which}")
    return f"{len(strategy.stages)} stages; " + "; ".join(words)


def _simulated(name: str, plan: ss.Plan, cluster: str, predicted_secs: float = 0.0) -> Row:
    made = ss.compile(plan, topology=topology_of(cluster))
    found = simulate(made, PAPER.profile)
    compute = fsum(found.compute_secs.values()) / len(found.devices)
    comm = fsum(level.secs for level in found.levels)
    peak = max(memory.total_bytes for memory in made.memory.values())
    return Row(name, found.secs, compute, comm, predicted_secs, peak)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for every cluster and model."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.hidup", description=__doc__, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--cluster", choices=CLUSTERS, action="append", help="default: first three")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    options = parser.parse_args(argv)
    for cluster in options.cluster or list(CLUSTERS)[:3]:
        print(f"{cluster}\n{HEADER}")
        for name, times in PUBLISHED.get(cluster, {}).items():
            print(Row(f"published {name}", *times))
        for model in options.models:
            print(f" {model}")
            for row in of_systems(model, cluster):
                print(row, flush=True)
            for row, text in of_hidup(model, cluster):
                print(f"{row}\n    {text}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
