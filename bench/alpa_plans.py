"""Compare Alpa's published plans with those of our version of Alpa's planner, by simulation.

A published plan gives, for each stage, its layers, its submesh, and the logical shape of the mesh.
Alpa did not publish how ops are split inside a stage; in both plans, the same intra-op planner
decides this. In the published plans, each block keeps only its inputs for the backward and
recomputes the rest, as in Alpa's suites.

Source: ``benchmark/alpa/suite_auto_gpt.py``, ``suite_auto_moe.py``, ``suite_wresnet.py`` of Alpa,
"solutions found for p3.16xlarge".
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from tqdm import tqdm

import rvdcomm as rv
import superscaler_core as ss
from bench.cells.workload import captured
from bench.command_line import parser_for
from bench.result import environment, write
from bench.search.models import ALPA_MODELS, SearchModel
from bench.tables import Lines, markdown
from rvdcomm.units import bytes_text, secs_text
from superscaler_core.cost import PROFILES
from superscaler_core.errors import PlanError
from superscaler_core.published.alpa import (
    MeshCut,
    alpa_hierarchical,
    meshes_of,
    placed,
    price_ways,
)
from superscaler_core.simulator import simulate

PER_HOST = 8

MEMORY_BYTES = 15 << 30
"""Memory limit per V100: 1 of the 16 GiB is reserved for the CUDA context and the allocator."""

SHARES = (1.0, 0.85, 0.7)
"""Shares of the memory limit, tried in order until a plan fits; as in ``propose_alpa``."""

SAMPLES = (4, 8, 16, 32, 64)
"""Microbatch sizes, in samples, that the search for our plan tries."""


NUM_AXES = {"gpt": 2, "moe": 2, "wide_resnet": 1}
"""Axes of the meshes in our plans, by model.

Blocks of a Wide-ResNet differ from each other. Computing the costs of one mesh therefore takes
long, and only meshes of one axis are tried.
"""


@dataclass(frozen=True)
class PublishedPlan:
    """A plan of Alpa's suites.

    Attributes:
        microbatches: microbatches per step.
        layers: layers per stage. A layer of Alpa is a cluster of blocks; all layers of a model have
            equally many blocks.
        meshes: logical shape of the mesh of each stage.
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
"""The published plans, by the names of ``ALPA_MODELS``."""


@dataclass(frozen=True)
class Simulated:
    """A plan and its simulated step.

    Attributes:
        plan: the plan as text.
        samples: samples per microbatch.
        secs: seconds of a step.
        peak_bytes: peak memory of the device that needs the most.
    """

    plan: str
    samples: int
    secs: float
    peak_bytes: int


def p3_topology(num_gpus: int) -> rv.Topology:
    """Hosts of type p3.16xlarge: 8 GPUs joined by NVLink, and one NIC of 25 Gbit/s per host.

    NVLink reaches 0.8 of its data sheet, and the NIC 0.88, as in the preset ``dgx-v100``.
    """
    inside = rv.Link(5e-6, 120e9)
    if num_gpus <= PER_HOST:
        return rv.Topology.single_host(num_gpus, inside.alpha_secs, inside.bytes_per_sec)
    hosts = [range(i, i + PER_HOST) for i in range(0, num_gpus, PER_HOST)]
    return rv.Topology.hosts(hosts, intra=inside, inter=rv.Link(15e-6, 0.88 * 25e9 / 8))


def published(name: str) -> Simulated:
    """Simulate the published plan of a model.

    Raises:
        PlanError: the plan does not fit in memory.
    """
    model, plan = ALPA_MODELS[name], PUBLISHED[name]
    samples = model.workload.batch // plan.microbatches
    # A mesh axis of size 1 splits nothing, so it is dropped.
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
    """Simulate the fastest plan of our planner that fits, over all microbatch sizes in ``samples``.

    Raises:
        PlanError: no plan fits in memory.
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
        ss.CostModel(
            captured(model.workload, samples),
            PROFILES["v100"],
            p3_topology(model.num_gpus),
            precision=ss.Precision("float32"),
        ),
        range(model.num_gpus),
        meshes,
        model.workload.batch // samples,
        memory_bytes=MEMORY_BYTES,
    )


def _simulated(model: SearchModel, samples: int, cut: MeshCut) -> Simulated:
    plan = ss.Plan(captured(model.workload, samples), range(model.num_gpus))
    cut(plan)
    made = ss.compile(plan, topology=p3_topology(model.num_gpus), precision=ss.Precision("float32"))
    peak = max(memory.total_bytes for memory in made.memory.values())
    return Simulated(str(cut), samples, simulate(made, PROFILES["v100"]).secs, peak)


def rows(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Both plans of every model: Alpa's, then ours, with the seconds of computing of each."""
    for name in names:
        for whose, plan in (("Alpa", published), ("ours", found)):
            start = time.process_time()
            head = {"model": name, "gpus": ALPA_MODELS[name].num_gpus, "whose": whose}
            yield {**head, **asdict(plan(name)), "cpu_secs": time.process_time() - start}


def lines(made: Sequence[Mapping[str, Any]]) -> Lines:
    """A line per plan; ``speed`` is the step of Alpa's plan over that of the plan."""
    texts = [["model", "GPUs", "whose", "plan", "microbatch", "step", "memory", "speed"]]
    theirs = {row["model"]: row["secs"] for row in made if row["whose"] == "Alpa"}
    for row in made:
        speed = theirs[row["model"]] / row["secs"]
        texts.append([
            row["model"], str(row["gpus"]), row["whose"], row["plan"], str(row["samples"]),
            secs_text(row["secs"]), bytes_text(row["peak_bytes"]), f"{speed:.2f} x",
        ])  # fmt: skip
    return texts


def main(words: list[str]) -> int:
    """Compare, print the table, and write the result."""
    parser = parser_for("alpa_plans", __doc__)
    on_eight = [name for name, model in ALPA_MODELS.items() if model.num_gpus == PER_HOST]
    add = parser.add_argument
    add(
        "models", nargs="*", default=on_eight, metavar="MODEL",
        help=f"of {', '.join(ALPA_MODELS)} (default: those on {PER_HOST} GPUs)",
    )  # fmt: skip
    add("--out", type=Path, default=Path("bench/results/alpa_plans.json"), help="the result file")
    args = parser.parse_args(words)
    unknown = sorted({*args.models} - ALPA_MODELS.keys())
    if unknown:
        parser.error(f"{', '.join(unknown)}: there are {', '.join(ALPA_MODELS)}.")
    result = environment("alpa_plans", words)
    result["rows"] = [*tqdm(rows(args.models), total=2 * len(args.models), unit="plan")]
    print(markdown(lines(result["rows"])))
    write(result, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
