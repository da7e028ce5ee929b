"""Time of cost queries: single questions, a whole candidate, and a change of one op."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

import rvdcomm as rv
import superscaler_core as ss
from bench import superscaler_compile
from bench.command_line import parser_for
from bench.result import environment, write
from superscaler_core.compiled import Compiled
from superscaler_core.cost import PROFILES, CostModel
from superscaler_core.materialize import materialize
from superscaler_core.models import GPT, GPTConfig
from superscaler_core.plan import OpSplit
from superscaler_core.plans import PLANS
from superscaler_core.simulator import simulate

DESCRIPTION = """\
Time what a planner asks of the cost functions, for a GPT of 1.3 B parameters (24 layers, width
2048, 2048 tokens, a microbatch of 8; no memory is allocated for it) on 2 hosts of 8 GPUs. Counted,
in seconds of this process on one core:
  questions  a million of `op_cost` and `edge_cost`: every op split as many grids of 16 devices,
             and every edge between two such splits; asked once before, which is the warming
  candidate  a plan's program from its splits to time and memory: materialize, memory, simulate
  again      the time of a step, without its memory, after one op's split changed
  compile    48 layers of width 5120 on 128 devices, from module to files
A candidate is timed when nothing is known (first), when one op has another split than those
before (near), and when it was asked before (same).
"""

EPILOG = """\
examples:
  python -m bench.superscaler_cost                                # all four, and a JSON
  python -m bench.superscaler_cost --questions 100000 --only questions,again
"""

PARTS = ("questions", "candidate", "again", "compile")
NUM_DEVICES, MICROBATCH = 16, 8
WAYS = {"tp": 4, "pp": 2, "microbatches": 8}
"""Options of the candidate: two stages and tensor-parallel degree 4, so two replicas."""

TOPOLOGY = rv.Topology.hosts(
    [list(range(8)), list(range(8, 16))], intra=rv.Link(5e-6, 200e9), inter=rv.Link(10e-6, 25e9)
)
PROFILE = "a100"

T = TypeVar("T")
Samples = dict[str, list[float]]
"""Samples of wall seconds and of processor seconds, which other processes disturb less."""


def timed(work: Callable[[], T], samples: Samples) -> T:
    """Call ``work``, add its time to ``samples``, and return its result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    samples.setdefault("wall_secs", []).append(time.perf_counter() - wall)
    samples.setdefault("cpu_secs", []).append(time.process_time() - cpu)
    return result


def gpt() -> ss.Graph:
    """The captured model."""
    config = GPTConfig.presets()["1.3B"]
    with torch.device("meta"):
        tokens = torch.empty(MICROBATCH, config.sequence, dtype=torch.int64)
        return ss.capture(GPT(config), (tokens, tokens))


# --- questions ----------------------------------------------------------------------------------


def grids(op: ss.Op) -> list[OpSplit]:
    """Splits of an op over all devices: of two loops, or of one loop with replicas."""
    loops = [loop for loop in op.sizes if op.is_splittable(loop) and op.sizes[loop] > 1]
    found = {}
    for outer in (None, *loops):
        for inner in (None, *loops):
            for num in (2, 4, 8):
                axes = [(outer, num), (inner, NUM_DEVICES // num)]
                is_long = all(loop is None or op.sizes[loop] >= count for loop, count in axes)
                if is_long and (outer is None or outer != inner):
                    found[OpSplit.grid(op.sizes, range(NUM_DEVICES), axes)] = None
    return list(found)[:MOST_GRIDS]


MOST_GRIDS = 12
"""Splits per op. With all splits, the warming would take an hour; questions would take as long."""


def questions(graph: ss.Graph, costs: CostModel) -> Iterator[Callable[[], object]]:
    """All different questions, once each, as functions."""
    of_form = {op.form: grids(op) for op in graph.ops}
    for op in graph.ops:
        for split in of_form[op.form]:
            yield lambda op=op, split=split: costs.op_cost(op, split)
    for tensor, writer in graph.producer.items():
        for reader in graph.readers.get(tensor, ()):
            for src in of_form[writer.form]:
                for dst in of_form[reader[0].form]:
                    yield lambda t=tensor, a=src, b=dst, r=reader: costs.edge_cost(
                        t, a, b, reader=r
                    )


def measure_questions(graph: ss.Graph, count: int) -> dict[str, Any]:
    """Time one round over all different questions, and then ``count`` questions."""
    costs = CostModel(graph, PROFILES[PROFILE], TOPOLOGY)
    asked = list(questions(graph, costs))
    warming: Samples = {}
    timed(lambda: [ask() for ask in asked], warming)
    found: Samples = {}

    def ask_all() -> None:
        for ask in islice(cycle(asked), count):
            ask()

    timed(ask_all, found)
    return {"count": count, "different": len(asked), "warming": warming, "samples": found}


# --- candidates ---------------------------------------------------------------------------------


def plan_of(graph: ss.Graph) -> ss.Plan:
    """The plan of the candidate."""
    plan = ss.Plan(graph, range(NUM_DEVICES))
    PLANS["hybrid"](plan, **WAYS)
    return plan


def changes(plan: ss.Plan, count: int) -> list[dict[ss.Op, OpSplit]]:
    """Changes of one op each, spread over the model: replicas on all devices of the op's stage."""
    cut = [op for op in plan.graph.ops if any(part.pieces for part in plan.op_split(op).parts)]
    chosen = cut[:: max(1, len(cut) // count)][:count]
    return [
        {op: OpSplit.grid(op.sizes, devices, [(None, len(devices))])}
        for op in chosen
        for devices in [plan.op_split(op).devices]
    ]


def priced(plan: ss.Plan) -> tuple[float, int]:
    """Seconds of a step, and bytes of the device that needs the most memory."""
    program = Compiled(materialize(plan, TOPOLOGY))
    peak_bytes = max(memory.total_bytes for memory in program.memory.values())
    return simulate(program, PROFILE).secs, peak_bytes


def measure_candidate(graph: ss.Graph, repetitions: int) -> dict[str, Any]:
    """Time a candidate from its splits to time and memory: first, near and same."""
    found: dict[str, Samples] = {"first": {}, "near": {}, "same": {}}
    step_secs, peak_bytes = timed(lambda: priced(plan_of(graph)), found["first"])
    for change in changes(plan_of(graph), repetitions):
        near = plan_of(graph).with_splits(change)
        timed(lambda plan=near: priced(plan), found["near"])
        plan = plan_of(graph)
        timed(lambda plan=plan: priced(plan), found["same"])
    return {"samples": found, "step_secs": step_secs, "peak_bytes": peak_bytes}


def measure_again(graph: ss.Graph, repetitions: int) -> dict[str, Any]:
    """Time changes of one op, each asked for the first time: the step's time without its memory."""
    plan, found = plan_of(graph), {}
    step_secs = simulated(plan)
    for change in changes(plan, repetitions):
        timed(lambda change=change: simulated(plan.with_splits(change)), found)
    return {"samples": found, "step_secs": step_secs}


def simulated(plan: ss.Plan) -> float:
    """Seconds of a step of a plan."""
    return simulate(Compiled(materialize(plan, TOPOLOGY)), PROFILE).secs


def measure_compile(repetitions: int) -> dict[str, Any]:
    """Time the compilation of 48 layers on 128 devices, each sample in a process of its own."""
    return superscaler_compile.measure(48, 128, repetitions)


# --- the result ---------------------------------------------------------------------------------


def lines_of(result: Mapping[str, Any]) -> Iterator[str]:
    """A line per measurement."""
    if "questions" in result:
        asked = result["questions"]
        secs, warming = (asked[name] for name in ("samples", "warming"))
        yield f"{asked['count']} questions: {_text(secs)}; warming by {asked['different']}: " + (
            _text(warming)
        )
    for name, samples in result.get("candidate", {}).get("samples", {}).items():
        yield f"candidate, {name}: {_text(samples)}"
    if "again" in result:
        yield f"again after one op's split changed: {_text(result['again']['samples'])}"
    if "compile" in result:
        secs = superscaler_compile.files_secs(result["compile"])
        yield f"48 layers on 128 devices, from module to files: {secs:.2f} s"


def _text(samples: Samples) -> str:
    wall, cpu = (median(samples[name]) for name in ("wall_secs", "cpu_secs"))
    return f"{wall:.4g} s, {cpu:.4g} s of the processor"


def parse_args(words: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_for("superscaler_cost", DESCRIPTION, EPILOG)
    parser.add_argument("--questions", type=int, default=1_000_000, help="default: %(default)s")
    parser.add_argument(
        "--repetitions", type=int, default=9, help="of candidates and changes (default %(default)s)"
    )
    parser.add_argument(
        "--only", default=",".join(PARTS), help="parts to measure (default: %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench/results/scratch/superscaler_cost.json"),
        help="result file (default: %(default)s)",
    )
    args = parser.parse_args(words)
    unknown = set(args.only.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"--only {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}.")
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write a JSON file."""
    words = sys.argv[1:] if argv is None else argv
    args = parse_args(words)
    parts = args.only.split(",")
    graph = gpt() if set(parts) - {"compile"} else None
    result: dict[str, Any] = environment("superscaler_cost", words)
    if graph is not None and "candidate" in parts:
        result["candidate"] = measure_candidate(graph, args.repetitions)
    if graph is not None and "again" in parts:
        # Plans of one graph share what is known of them, so the changes are of another graph.
        result["again"] = measure_again(gpt(), args.repetitions)
    if graph is not None and "questions" in parts:
        result["questions"] = measure_questions(graph, args.questions)
    if "compile" in parts:
        result["compile"] = measure_compile(3)
    print("\n".join(lines_of(result)))
    write(result, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
