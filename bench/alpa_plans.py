"""Alpa's published plans beside those that our version of its planner finds, both simulated.

A published plan says which layers are a stage, on which submesh, and the logical shape of its mesh.
How ops are cut there is not published; both plans have it from the same intra-op planner. Blocks
keep their inputs, as in Alpa's suites.

Source: ``benchmark/alpa/suite_auto_gpt.py``, ``suite_auto_moe.py``, ``suite_wresnet.py`` of Alpa,
"solutions found for p3.16xlarge".
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import rvdcomm as rv
import superscaler_core as ss
from bench.cells.workload import captured
from bench.search.models import ALPA_MODELS, SearchModel
from superscaler_core.cost import PROFILES
from superscaler_core.errors import PlanError
from superscaler_core.planners.hierarchical import (
    MeshCut,
    alpa_hierarchical,
    meshes_of,
    placed,
    price_ways,
)
from superscaler_core.simulator import simulate

PER_HOST = 8

MEMORY_BYTES = 15 << 30
"""Of a V100 of a p3.16xlarge, which has 16 GiB; one is left to the context and the allocator."""

SHARES = (1.0, 0.85, 0.7)
"""Of the memory, until a plan fits by the memory reader; as in ``propose_alpa``."""

SAMPLES = (4, 8, 16, 32, 64)
"""Sizes of microbatches that a plan of ours may have, besides the published one."""


NUM_AXES = {"gpt": 2, "moe": 2, "wide_resnet": 1}
"""Of the meshes of our plans. Blocks of a Wide-ResNet differ, so each mesh takes long to price."""


@dataclass(frozen=True)
class PublishedPlan:
    """A plan of Alpa's suites.

    Attributes:
        microbatches: of a step.
        layers: of every stage, of as many clusters of equal numbers of blocks.
        meshes: the logical shape of every stage's mesh.
    """

    microbatches: int
    layers: tuple[int, ...]
    meshes: tuple[tuple[int, int], ...]


PUBLISHED: Mapping[str, PublishedPlan] = {
    "gpt-2.6b": PublishedPlan(128, (2, 2, 4), ((2, 1), (2, 1), (4, 1))),
    "gpt-6.7b": PublishedPlan(64, (4, 4), ((2, 4),) * 2),
    "gpt-15b": PublishedPlan(128, (4,) * 4, ((2, 4),) * 4),
    "gpt-39b": PublishedPlan(1024, (1,) * 16, ((1, 4),) * 16),
    "moe-2.4b": PublishedPlan(32, (4, 4), ((4, 1),) * 2),
    "moe-10b": PublishedPlan(16, (4, 4), ((8, 1),) * 2),
    "moe-27b": PublishedPlan(128, (1,) * 8, ((4, 1),) * 8),
    "moe-70b": PublishedPlan(64, (1,) * 8, ((8, 1),) * 8),
    "wresnet-2b": PublishedPlan(24, (8, 8), ((4, 1), (1, 4))),
    "wresnet-4b": PublishedPlan(32, (5, 4, 7), ((4, 1), (4, 1), (8, 1))),
    "wresnet-6.8b": PublishedPlan(32, (5, 4, 4, 3), ((8, 1),) * 4),
    "wresnet-13b": PublishedPlan(
        38, (4, 4, 4, 4, 4, 4, 5, 4),
        ((8, 1), (1, 8), (8, 1), (1, 8), (8, 1), (8, 1), (1, 8), (8, 1)),
    ),
}  # fmt: skip
"""By the names of ``ALPA_MODELS``."""


@dataclass(frozen=True)
class Simulated:
    """A plan and its step.

    Attributes:
        plan: in words.
        samples: of a microbatch.
        secs: of a step.
        peak_bytes: of the fullest device.
    """

    plan: str
    samples: int
    secs: float
    peak_bytes: int


def p3_topology(num_gpus: int) -> rv.Topology:
    """p3.16xlarge: NVLink inside hosts of 8, one NIC of 25 Gbit/s a host.

    Links reach the shares of their data sheets that ``dgx-v100`` has: 0.8 and 0.88.
    """
    inside = rv.Link(5e-6, 120e9)
    if num_gpus <= PER_HOST:
        return rv.Topology.single_host(num_gpus, inside.alpha_secs, inside.bytes_per_sec)
    hosts = [range(i, i + PER_HOST) for i in range(0, num_gpus, PER_HOST)]
    return rv.Topology.hosts(hosts, intra=inside, inter=rv.Link(15e-6, 0.88 * 25e9 / 8))


def published(name: str) -> Simulated:
    """The published plan of a model, simulated.

    Raises:
        PlanError: it does not fit.
    """
    model, plan = ALPA_MODELS[name], PUBLISHED[name]
    samples = model.workload.batch // plan.microbatches
    # An axis of one device splits nothing.
    shapes = [tuple(size for size in mesh if size > 1) or (1,) for mesh in plan.meshes]
    prices = {each.mesh: each for each in _prices(model, samples, tuple(dict.fromkeys(shapes)))}
    num_blocks = len(next(iter(prices.values())).runs.layers)
    ends = [0, *(end * num_blocks // sum(plan.layers) for end in accumulate(plan.layers))]
    stages = []
    for (first, end), shape in zip(pairwise(ends), shapes, strict=True):
        ways = prices[shape].ways(first, end)
        way = min((w for w in ways if w.keep is ss.Keep.BLOCK_INPUTS), key=lambda w: w.secs)
        stages.append((prices[shape], first, end, way))
    devices = range(model.num_gpus)
    cut = placed(stages, devices, plan.microbatches, 0.0)
    return _simulated(model, samples, cut)


def found(name: str, samples: Sequence[int] = SAMPLES) -> Simulated:
    """The fastest plan of our version of the planner that fits, over sizes of microbatches.

    Raises:
        PlanError: none fits.
    """
    model = ALPA_MODELS[name]
    best: Simulated | None = None
    for each in samples:
        if model.workload.batch % each:
            continue
        axes = NUM_AXES[model.workload.model]
        prices = _prices(model, each, meshes_of(model.num_gpus, PER_HOST, axes))
        for share in SHARES:
            try:
                cut = alpa_hierarchical(
                    prices, range(model.num_gpus), model.workload.batch // each,
                    share * MEMORY_BYTES,
                )  # fmt: skip
            except PlanError:
                break
            tried = _simulated(model, each, cut)
            if tried.peak_bytes <= MEMORY_BYTES:
                best = tried if best is None else min(best, tried, key=lambda x: x.secs)
                break
    if best is None:
        raise PlanError(f"{name}: no stages fit in {MEMORY_BYTES >> 30} GiB.")
    return best


def _prices(model: SearchModel, samples: int, meshes: Sequence[tuple[int, ...]]) -> Any:
    return price_ways(
        captured(model.workload, samples),
        range(model.num_gpus),
        p3_topology(model.num_gpus),
        PROFILES["v100"],
        meshes,
        model.workload.batch // samples,
        memory_bytes=MEMORY_BYTES,
        master_dtype="float32",
    )


def _simulated(model: SearchModel, samples: int, cut: MeshCut) -> Simulated:
    plan = ss.Plan(captured(model.workload, samples), range(model.num_gpus))
    cut(plan)
    made = ss.compile(plan, topology=p3_topology(model.num_gpus), master_dtype="float32")
    peak = max(memory.total_bytes for memory in made.memory.values())
    return Simulated(str(cut), samples, simulate(made, PROFILES["v100"]).secs, peak)


def table(names: Sequence[str]) -> Iterator[str]:
    """A row for every plan: seconds of a step, memory, and how much faster than the published."""
    yield "| model | GPUs | plan | microbatch | step, s | GiB | faster | CPU, s |"
    yield "|---|---|---|---|---|---|---|---|"
    for name in names:
        theirs = None
        for title, plan in (("Alpa's", published), ("ours", found)):
            start = time.process_time()
            mine = plan(name)
            theirs = theirs or mine
            yield (
                f"| {name} | {ALPA_MODELS[name].num_gpus} | {title}: {mine.plan} | {mine.samples} "
                f"| {mine.secs:.3f} | {mine.peak_bytes / 2**30:.1f} | "
                f"{theirs.secs / mine.secs:.2f} | {time.process_time() - start:.0f} |"
            )


def main(args: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    on_eight = [name for name, model in ALPA_MODELS.items() if model.num_gpus == PER_HOST]
    parser.add_argument("models", nargs="*", default=on_eight, help="names of ALPA_MODELS")
    for line in table(parser.parse_args(args).models):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
