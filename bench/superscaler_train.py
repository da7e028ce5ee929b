"""Training a small GPT: superscaler_core against torch's pipelining and tensor parallel.

All methods run in the same processes of one machine, alternating step by step.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import rvdcomm as rv
from bench import stream
from bench.local import run_here
from bench.run import ALPHA_SECS, environment
from bench.superscaler_predict import texts_of
from bench.training_options import parse_training, parser_for
from superscaler_core.compiled import Compiled, compile
from superscaler_core.program.transfer import Transfer

DESCRIPTION = """\
Train a GPT (float32, SGD with momentum) on gloo processes, by stages (pp) times tensor parallel
ranks (tp), with 1F1B. The same weights and data: losses of the first steps, updates between them,
have to agree to 1e-5 before anything is timed. Methods:
  ours   superscaler_core, plan `hybrid`, as users run it: ranks of one host share memory
  dist   the same with messages of gloo alone (RVDCOMM_EXECUTOR=dist)
  torch  torch.distributed.pipelining (PipelineStage, Schedule1F1B) and DTensor (parallelize_module)

columns:
  ms        forward and backward of all microbatches, of the slowest rank: median, least, most
  opt ms    the optimizer's step, which is torch's in all methods, on what this rank stores
  x torch   time of torch / time of this method, medians of forward and backward
  cpu ms    processor time of a rank in a step with its optimizer, mean of the ranks: hardly noisy
  MiB sent  payload through TCP in a step, mean of the ranks, as the kernel counts it
  planned   the same of ours by its plans: rvdcomm's count of bytes between ranks
"""

EPILOG = """\
examples:
  python -m bench.superscaler_train
  python -m bench.superscaler_train --grids 2x2 --steps 5 --layers 2 --width 64
"""

METHODS = ("ours", "dist", "torch")
TIMEOUT_SECS = 1800.0


def parse_args(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = parser_for("superscaler_train", DESCRIPTION, EPILOG)
    parser.add_argument("--grids", default="2x2,4x1,1x4", help="PPxTP,... (default: %(default)s)")
    parser.add_argument("--microbatch", type=int, default=4, help="sequences (default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step (default 8)")
    args = parse_training(parser, words, methods=METHODS, steps=20, layers=4)
    args.grids = [tuple(map(int, text.split("x"))) for text in args.grids.split(",")]
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table and write a JSON."""
    words = sys.argv[1:] if argv is None else argv
    args = parse_args(words)
    rows = measure(args)
    command = shlex.join(["python", "-m", "bench.superscaler_train", *words])
    result = {
        **environment(command),
        "model": args.model,
        "microbatch": args.microbatch,
        "microbatches": args.microbatches,
        "rows": rows,
    }
    print(table(result))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {args.out}")
    return 0


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compile all programs, run them on the processes, and add what the plans say."""
    num_ranks = {pp * tp for pp, tp in args.grids}
    if len(num_ranks) != 1:
        raise SystemExit(f"bench: all grids need as many ranks, got {sorted(num_ranks)}.")
    (size,) = num_ranks
    topology = rv.Topology.single_host(size, ALPHA_SECS, stream.loopback_stream(1.0))
    with tempfile.TemporaryDirectory() as folder:
        config, results = Path(folder, "config.json"), Path(folder, "results.jsonl")
        topology.save(Path(folder, "topology.json"))
        grids, planned = [], []
        for pp, tp in args.grids:
            compiled = compiled_gpt(args, pp, tp)
            planned.append(planned_bytes(compiled, topology))
            name = str(compiled.save(Path(folder, f"{pp}x{tp}")))
            grids.append({"pp": pp, "tp": tp, "folder": name})
        shared = ("model", "methods", "steps", "microbatch", "microbatches")
        values = {name: getattr(args, name) for name in shared}
        values["topology"] = str(Path(folder, "topology.json"))
        config.write_text(json.dumps({**values, "grids": grids}))
        command = [sys.executable, "-m", "bench.superscaler_train_worker", str(config)]
        run_here(size, [*command, str(results)], timeout_secs=TIMEOUT_SECS)
        rows = [json.loads(line) for line in results.read_text().splitlines()]
    for row, by_rank in zip(rows, planned, strict=True):
        row["planned_bytes"] = by_rank
        del row["folder"]
    return rows


def compiled_gpt(args: argparse.Namespace, pp: int, tp: int) -> Compiled:
    """The GPT under the plan ``hybrid``, on ``pp * tp`` ranks."""
    import torch

    from superscaler_core.front_end import capture
    from superscaler_core.models.gpt import GPT, GPTConfig, example_inputs
    from superscaler_core.plan import Plan
    from superscaler_core.plans import PLANS

    sizes = GPTConfig(**args.model)
    with torch.device("meta"):
        model = GPT(sizes)
    inputs = example_inputs(sizes, args.microbatch, torch.Generator())
    plan = Plan(capture(model, inputs), range(pp * tp))
    PLANS["hybrid"](plan, tp=tp, pp=pp, microbatches=args.microbatches)
    return compile(plan)


# --- bytes --------------------------------------------------------------------------------------


def planned_bytes(compiled: Compiled, topology: rv.Topology) -> list[int]:
    """What every rank sends to others in a step, by the program's plans."""
    made, plan = compiled.materialized, compiled.plan
    assert not plan.windows, "weights in windows move once a microbatch"
    each_microbatch = [leg for e in made.edges.all for leg in (*e.forward, *e.backward)]
    each_step = [leg for use in made.weights.uses for leg in (*use.fetch, *use.reduce)]
    each_step += made.loss
    total = dict.fromkeys(plan.devices, 0)
    for legs, times in ((each_microbatch, plan.num_microbatches), (each_step, 1)):
        for leg in legs:
            for rank, count in sent_bytes_of(leg, topology).items():
                total[rank] += times * count
    return [total[rank] for rank in sorted(total)]


def sent_bytes_of(leg: Transfer, topology: rv.Topology) -> dict[int, int]:
    """What every rank sends for a transfer, as the simulation of its plan counts it."""
    shards = {
        rank: np.zeros(leg.src.cell(rank).box.shape, np.dtype(leg.dtype)) for rank in leg.src.ranks
    }
    return dict(rv.simulate(leg.plan(topology), shards).sent_bytes)


# --- the table ----------------------------------------------------------------------------------

TIMES = ("ms", "least", "most", "x torch", "opt ms", "cpu ms")
COLUMNS = ("pp x tp", "method", *TIMES, "MiB sent", "planned")


def table(result: dict[str, Any]) -> str:
    """A row a grid and method."""
    sizes = ", ".join(f"{name} {value}" for name, value in result["model"].items())
    title = (
        f"GPT of {sizes}, float32:\n{result['microbatches']} microbatches of "
        f"{result['microbatch']} sequences a step on {len(result['rows'][0]['planned_bytes'])} "
        "processes"
    )
    lines = [COLUMNS, *(cells for row in result["rows"] for cells in _rows(row))]
    return "\n".join([title, *texts_of(lines, num_left=2)])


def _rows(row: dict[str, Any]) -> list[tuple[str, ...]]:
    medians = {name: median(samples["step"]) for name, samples in row["samples"].items()}
    found = []
    for name, samples in row["samples"].items():
        secs = (medians[name], min(samples["step"]), max(samples["step"]))
        planned = _mib(row["planned_bytes"]) if name != "torch" else "-"
        found.append(
            (
                f"{row['pp']} x {row['tp']}",
                name,
                *(f"{1e3 * value:.1f}" for value in secs),
                f"{medians['torch'] / medians[name]:.2f}" if "torch" in medians else "-",
                f"{1e3 * median(samples['optimizer']):.2f}",
                f"{1e3 * median(samples['cpu']):.1f}",
                _mib(row["tcp_bytes"][name]),
                planned,
            )
        )
    return found


def _mib(by_rank: list[int]) -> str:
    return f"{sum(by_rank) / len(by_rank) / 2**20:.2f}"


if __name__ == "__main__":
    sys.exit(main())
