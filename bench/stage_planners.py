"""Compare published planners that cut models into stages: their cuts and their planning times."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from math import inf, log2
from pathlib import Path
from typing import Any

import superscaler_core as ss
from bench.cells.cluster import PAPER
from bench.cells.processes import side_by_side
from bench.cells.workload import Workload, captured
from bench.command_line import parser_for
from bench.result import environment, write
from bench.studies.study import STUDIES
from superscaler_core.errors import PlanError
from superscaler_core.published.stages import (
    STAGE_PLANNERS,
    Degrees,
    Layer,
    LayerCost,
    StageCut,
    StageProblem,
    plan_stages,
    price_stages,
    tarnawski_scattered,
)
from superscaler_core.simulator import simulate

DESCRIPTION = """\
Let every planner of superscaler_core.published.stages cut the largest models of the four studies on
32 V100s (4 hosts of 8) and a GPT-3 of 39 B parameters on 64 (8 hosts), whose costs are those of the
cost functions. Each planner has microbatches of 1 and of 8 samples, and layers that keep everything
or their input alone; of those the cut with the least predicted step counts, if the memory reader
agrees that it fits. That step is simulated in full; nothing was run on a GPU. Then each planner's
time for 96 layers on 64 devices, in seconds of the processor.
"""

EPILOG = """\
examples:
  python -m bench.stage_planners                        # all models
  python -m bench.stage_planners --models gpt39b --no-scale
"""

SAMPLES = (1, 8)
"""Samples per microbatch; a stage has at most as many replicas as a microbatch has samples."""

KEEPS = (ss.Keep.EVERYTHING, ss.Keep.BLOCK_INPUTS)

_GPT39B = Workload(
    "gpt",
    {
        "layers": 48, "width": 8192, "heads": 64, "sequence": 1024, "vocabulary": 51200,
        "fused": False,
    },
    "float16",
    512,
)  # fmt: skip

MODELS: dict[str, tuple[Workload, int]] = {
    **{name: (next(iter(study.workloads[32].values())), 32) for name, study in STUDIES.items()},
    "gpt39b": (_GPT39B, 64),
}
"""The workloads, each with its number of GPUs."""

TITLES = {
    "swin": "Swin",
    "gpt3": "GPT-3 29 B",
    "mbart": "mBART",
    "alphafold2": "AlphaFold2",
    "gpt39b": "GPT-3 39 B",
}


# --- models -------------------------------------------------------------------------------------


def cut_model(name: str) -> dict[str, Any]:
    """The best cut of every planner for a model."""
    workload, num_gpus = MODELS[name]
    problems = {}
    start = time.process_time()
    for samples in SAMPLES:
        for keep in KEEPS:
            problems[samples, keep] = price_stages(
                ss.CostModel(
                    captured(workload, samples),
                    PAPER.profile,
                    PAPER.topology(num_gpus),
                    precision=ss.Precision("float32"),
                ),
                range(num_gpus),
                workload.batch // samples,
                memory_bytes=PAPER.limit_bytes,
                keep=keep,
                has_changes=True,
                vocabulary=_has_words(workload),
            )
    secs = time.process_time() - start
    rows = {planner: _row(workload, num_gpus, planner, problems) for planner in STAGE_PLANNERS}
    layers = len(problems[SAMPLES[0], KEEPS[0]].layers)
    return {"gpus": num_gpus, "layers": layers, "pricing_cpu_secs": secs, "planners": rows}


def _has_words(workload: Workload) -> bool:
    return workload.model in ("gpt", "mbart")


def _row(
    workload: Workload,
    num_gpus: int,
    name: str,
    problems: dict[tuple[int, ss.Keep], StageProblem],
) -> dict[str, Any] | None:
    """The planner's cut with the least predicted step that fits in memory; None if none fits."""
    planner = STAGE_PLANNERS[name]
    predicted = {}
    for key, problem in problems.items():
        try:
            predicted[key] = problem.step_secs(planner(problem))
        except PlanError:
            continue
    best: dict[str, Any] | None = None
    for (samples, keep), secs in sorted(predicted.items(), key=lambda pair: pair[1]):
        # A cut that the memory reader refuses is planned again with less memory, so its predicted
        # step never becomes shorter.
        if best is not None and best["predicted_secs"] <= secs:
            break
        problem = problems[samples, keep]
        try:
            cut, made = plan_stages(
                captured(workload, samples),
                problem,
                planner,
                PAPER.topology(num_gpus),
                keep=keep,
                vocabulary=_has_words(workload),
            )
        except PlanError:
            continue
        if best is None or problem.step_secs(cut) < best["predicted_secs"]:
            best = {
                "samples": samples,
                "keep": str(keep),
                "cut": str(cut),
                "objective_secs": cut.objective,
                "predicted_secs": problem.step_secs(cut),
                "peak_bytes": max(memory.total_bytes for memory in made.memory.values()),
                "simulated_secs": simulate(made, PAPER.profile).secs,
            }
    return best


# --- scale --------------------------------------------------------------------------------------

SCALE_BYTES = {"any": inf, "80 GB": 80e9, "32 GB": 32e9}
"""Memory per device; with 32 GB the problem needs tensor parallelism."""


def scale_problem(memory_bytes: float, num_layers: int = 96, num_devices: int = 64) -> StageProblem:
    """A stage problem: layers of width 8192 on hosts of 8 devices; first and last take longer."""
    degrees = Degrees.powers_of_two(num_devices)

    def layer(index: int) -> Layer:
        share = 1.6 if index in (0, num_layers - 1) else 1.0
        size = 2 * 12 * 8192**2 * share

        def cost(each: Degrees) -> LayerCost:
            secs = share / each.num_devices * (1 + log2(each.tensor) / 10 + log2(each.data) / 50)
            sync = 2 * size / each.tensor * (each.data - 1) / each.data / 20e9
            return LayerCost(
                secs, 2 * secs, sync, 9 * size / each.tensor, 1e9 / each.num_devices,
                5e8 / each.num_devices,
            )  # fmt: skip

        return Layer(str(index), tuple(map(cost, degrees)), size, 2e8)

    return StageProblem.chain(
        [layer(i) for i in range(num_layers)], degrees, tuple(range(num_devices)),
        8, 200e9, 25e9, 64, memory_bytes,
    )  # fmt: skip


def measure_scale() -> dict[str, dict[str, Any]]:
    """Processor seconds and objective of every planner, by planner and memory."""
    planners = {**STAGE_PLANNERS, "tarnawski_scattered": partial(tarnawski_scattered, limit_secs=4)}
    found: dict[str, dict[str, Any]] = {}
    for memory, num_bytes in SCALE_BYTES.items():
        problem = scale_problem(num_bytes)
        for name, planner in planners.items():
            start = time.process_time()
            try:
                objective = planner(problem).objective
            except PlanError:
                objective = None
            secs = time.process_time() - start
            found.setdefault(name, {})[memory] = {"cpu_secs": secs, "objective_secs": objective}
    return found


# --- tables -------------------------------------------------------------------------------------


def tables(result: Mapping[str, Any]) -> Iterator[str]:
    """The cuts of every model, and the planners' times, as titles and Markdown tables."""
    for name, found in result["models"].items():
        workload, num_gpus = MODELS[name]
        yield (
            f"### {TITLES[name]} on {num_gpus} V100s\n\n{found['layers']} layers, a batch of "
            f"{workload.batch}; priced in {found['pricing_cpu_secs']:.0f} s of the processor."
        )
        yield "\n".join(_model_table(found["planners"]))
    if "scale" in result:
        yield "### 96 layers on 64 devices: seconds of the processor"
        yield "\n".join(_scale_table(result["scale"]))


def _model_table(rows: dict[str, Any]) -> Iterator[str]:
    yield "| planner | stages | microbatch | keeps | objective | predicted | simulated | best |"
    yield "|---|---|---|---|---|---|---|---|"
    least = min((row["simulated_secs"] for row in rows.values() if row), default=inf)
    for planner, row in rows.items():
        if row is None:
            yield f"| {planner} | no cut fits | | | | | | |"
            continue
        best = "●" if row["simulated_secs"] <= 1.001 * least else ""
        numbers = (row[f"{what}_secs"] for what in ("objective", "predicted", "simulated"))
        yield (
            f"| {planner} | {cut_text(StageCut.parse(row['cut']))} | {row['samples']} | "
            f"{row['keep']} | {' | '.join(f'{secs:.4g}' for secs in numbers)} | {best} |"
        )


def cut_text(cut: StageCut) -> str:
    """Numbers of layers and degrees of all stages; a run of equal stages is given once.

    >>> cut_text(StageCut.parse("cut 1\\nstage 0-1 on 0 as 1x1\\nstage 2-3 on 1 as 1x1"))
    '2 × (2 at 1x1)'
    """
    runs: list[list[Any]] = []
    for stage in cut.stages:
        different = dict.fromkeys(map(str, stage.degrees))
        text = f"{len(stage.layers)} at {'/'.join(different)}"
        if runs and runs[-1][0] == text:
            runs[-1][1] += 1
        else:
            runs.append([text, 1])
    return ", ".join(text if count == 1 else f"{count} × ({text})" for text, count in runs)


def _scale_table(found: dict[str, Any]) -> Iterator[str]:
    yield f"| planner | {' | '.join(f'memory {memory}' for memory in SCALE_BYTES)} |"
    yield "|---|" + "---|" * len(SCALE_BYTES)
    for planner, row in found.items():
        cells = (
            f"{each['cpu_secs']:.2f}" + ("" if each["objective_secs"] else " (no cut fits)")
            for each in row.values()
        )
        yield f"| {planner} | {' | '.join(cells)} |"


# --- the command --------------------------------------------------------------------------------


def parse_args(words: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_for("stage_planners", DESCRIPTION, EPILOG)
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    parser.add_argument("--no-scale", action="store_true", help="leave out the planners' times")
    parser.add_argument("--processes", type=int, default=2, help="at a time (default: 2)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench/results/scratch/stage_planners.json"),
        help="result file (default: %(default)s)",
    )
    args = parser.parse_args(words)
    unknown = set(args.models.split(",")) - set(MODELS)
    if unknown:
        parser.error(f"--models {', '.join(sorted(unknown))}: there are {', '.join(MODELS)}.")
    return args


def main(argv: list[str] | None = None) -> int:
    """Cut the models, measure, print the tables, and write a JSON file."""
    words = sys.argv[1:] if argv is None else argv
    args = parse_args(words)
    result: dict[str, Any] = environment("stage_planners", words)
    names = args.models.split(",")
    result["models"] = dict(
        zip(names, side_by_side(cut_model, names, args.processes, "models"), strict=True)
    )
    if not args.no_scale:
        result["scale"] = measure_scale()
    print("\n\n".join(tables(result)))
    write(result, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
