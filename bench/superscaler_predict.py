"""Predictions of the simulator against real steps: time and memory of small models on gloo ranks.

The machine is measured first: links by ``rvdcomm`` calibrate, ops by ``simulator.measured``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.local import run_here
from bench.run import environment

DESCRIPTION = """\
Train small models (float32, SGD with momentum) under many plans on gloo processes of this machine,
and predict the time and the peak memory of each step by superscaler_core.simulator: with links
calibrated and every op measured by the same processes just before. No figure is fitted to a step.

columns:
  measured   ms of forward and backward of all microbatches, of the slowest rank: median of steps
  predicted  the same, simulated; the optimizer's step is in neither
  error      predicted / measured - 1
  cpu        ms of the processor in a step, mean of the ranks: others on the machine hardly matter
  busy       the same, simulated: ms in which a rank computes or communicates
  MiB        the most that tensors take at one time on the rank that needs most, in two steps
"""

EPILOG = """\
examples:
  python -m bench.superscaler_predict
  python -m bench.superscaler_predict --plans data_parallel,zero3 --steps 5
"""

GPT = {"layers": 4, "width": 256, "heads": 8, "sequence": 128, "vocabulary": 1000}
MOE = {"layers": 2, "width": 128, "heads": 4, "sequence": 64, "vocabulary": 500, "experts": 4}
MLP = {"inputs": 512, "hidden": 1024, "outputs": 512, "layers": 6}

PLANS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name: model, its sizes, knobs; on two ranks.
    "data_parallel": ("gpt", GPT, {}),
    "accumulate": ("gpt", GPT, {"microbatches": 4}),
    "megatron": ("gpt", GPT, {}),
    "megatron_sp": ("gpt", GPT, {}),
    "sequence_parallel": ("gpt", GPT, {}),
    "zero1": ("gpt", GPT, {}),
    "zero2": ("gpt", GPT, {}),
    "zero3": ("gpt", GPT, {}),
    "recompute": ("gpt", GPT, {}),
    "gpipe": ("gpt", GPT, {"microbatches": 4}),
    "one_f_one_b": ("gpt", GPT, {"microbatches": 8}),
    "interleaved": ("gpt", GPT, {"microbatches": 4}),
    "coshard": ("gpt", GPT, {}),
    "hybrid": ("gpt", GPT, {"pp": 2, "microbatches": 4, "recompute": True}),
    "expert_parallel": ("moe", MOE, {}),
    "mlp:data_parallel": ("mlp", MLP, {}),
    "mlp:one_f_one_b": ("mlp", MLP, {"microbatches": 4}),
}

TIMEOUT_SECS = 1800.0


def parse_args(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.superscaler_predict",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--plans", default=",".join(PLANS), help="default: all")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default %(default)s)")
    parser.add_argument("--steps", type=int, default=15, help="timed steps (default %(default)s)")
    parser.add_argument("--microbatch", type=int, default=8, help="samples (default %(default)s)")
    parser.add_argument(
        "--op-secs", type=float, default=0.06, help="to measure an op (default %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench/results/scratch/superscaler_predict.json"),
        help="result file (default: %(default)s)",
    )
    args = parser.parse_args(words)
    args.plans = args.plans.split(",")
    if not set(args.plans) <= set(PLANS):
        parser.error(f"the plans are {', '.join(PLANS)}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table and write a JSON."""
    words = sys.argv[1:] if argv is None else argv
    args = parse_args(words)
    command = shlex.join(["python", "-m", "bench.superscaler_predict", *words])
    result = {**environment(command), **measure(args)}
    print(table(result["rows"]))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {args.out}")
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all plans on the processes; a row each, and what was measured before."""
    rows = [
        {"name": name, "plan": name.rpartition(":")[2], "model": model, "sizes": sizes,
         "knobs": knobs}
        for name, (model, sizes, knobs) in PLANS.items()
        if name in args.plans
    ]  # fmt: skip
    shared = {name: getattr(args, name) for name in ("ranks", "steps", "microbatch", "op_secs")}
    with tempfile.TemporaryDirectory() as folder:
        config, found = Path(folder, "config.json"), Path(folder, "found.json")
        config.write_text(json.dumps({**shared, "rows": rows, "folder": folder}))
        command = [sys.executable, "-m", "bench.superscaler_predict_worker", str(config)]
        run_here(args.ranks, [*command, str(found)], timeout_secs=TIMEOUT_SECS)
        result: dict[str, Any] = json.loads(found.read_text())
    return {**shared, **result}


# --- the table ----------------------------------------------------------------------------------

COLUMNS = ("plan", "measured", "predicted", "error", "cpu", "busy", "MiB", "predicted", "error")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A row a plan, and the medians of errors without their signs."""
    texts = texts_of([COLUMNS, *map(_cells, rows)])
    medians = [median(abs(errors(row)[i]) for row in rows) for i in (0, 1)]
    return "\n".join([*texts, f"median error: time {medians[0]:.1%}, peak memory {medians[1]:.1%}"])


def texts_of(lines: Sequence[Sequence[str]], num_left: int = 1) -> list[str]:
    """Rows of cells in columns, the first columns to the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for cells in lines:
        both = enumerate(zip(cells, widths, strict=True))
        aligned = (c.ljust(w) if i < num_left else c.rjust(w) for i, (c, w) in both)
        texts.append("  ".join(aligned).rstrip())
    return texts


def errors(row: dict[str, Any]) -> tuple[float, float]:
    """Of time and of peak memory, relative."""
    secs, peak = median(row["step_secs"]), max(row["peak_bytes"])
    return row["predicted_secs"] / secs - 1, max(row["predicted_bytes"]) / peak - 1


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    time_error, memory_error = errors(row)
    return (
        row["name"],
        f"{1e3 * median(row['step_secs']):.1f}",
        f"{1e3 * row['predicted_secs']:.1f}",
        f"{time_error:+.0%}",
        f"{1e3 * median(row['cpu_secs']):.1f}",
        f"{1e3 * sum(row['predicted_busy_secs']) / len(row['predicted_busy_secs']):.1f}",
        f"{max(row['peak_bytes']) / 2**20:.2f}",
        f"{max(row['predicted_bytes']) / 2**20:.2f}",
        f"{memory_error:+.0%}",
    )


if __name__ == "__main__":
    sys.exit(main())
