"""Training a Llama of transformers: plans of superscaler_core against DDP, FSDP2 and DTensor.

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

from bench.local import run_here
from bench.run import environment
from bench.superscaler_predict import texts_of
from bench.training_options import parser_for

DESCRIPTION = """\
Train a Llama (float32, SGD with momentum) on gloo processes of this machine, by plans and by what
torch has for the same. Needs `transformers`. The losses of the first steps, with updates between
them, have to agree to 1e-5 before anything is timed.

columns:
  ms        forward and backward, of the slowest rank: median, least, most
  against   torch's method, and its time over that of the plan
"""

EPILOG = """\
examples:
  python -m bench.llama_train
  python -m bench.llama_train --ranks 2 --steps 5 --layers 2
"""

AGAINST = {"data_parallel": "ddp", "zero3": "fsdp2", "megatron": "dtensor"}
TIMEOUT_SECS = 900.0
SIZES = {"layers": 4, "width": 256, "heads": 8, "sequence": 64, "vocabulary": 1000}


def parse_args(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = parser_for("llama_train", DESCRIPTION, EPILOG)
    parser.add_argument("--ranks", default="2,4", help="numbers of processes (default 2,4)")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step (default 16)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps (default 20)")
    for size, value in SIZES.items():
        parser.add_argument(f"--{size}", type=int, default=value, help=f"default {value}")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench/results/scratch/llama_train.json"),
        help="result file (default: %(default)s)",
    )
    return parser.parse_args(words)


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table and write a JSON."""
    words = sys.argv[1:] if argv is None else argv
    args = parse_args(words)
    config = {
        "model": {size: getattr(args, size) for size in SIZES},
        "batch": args.batch,
        "steps": args.steps,
        "methods": [name for pair in AGAINST.items() for name in pair],
    }
    result = {
        **environment(shlex.join(["python", "-m", "bench.llama_train", *words])),
        **config,
        "rows": [measure(config, int(ranks)) for ranks in args.ranks.split(",")],
    }
    print(table(result))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {args.out}")
    return 0


def measure(config: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Samples of all methods on so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder, "config.json"), Path(folder, "found.json")
        given.write_text(json.dumps({**config, "folder": folder}))
        command = [sys.executable, "-m", "bench.llama_train_worker", str(given), str(found)]
        run_here(ranks, command, timeout_secs=TIMEOUT_SECS)
        return {"ranks": ranks, "samples": json.loads(found.read_text())}


def table(result: dict[str, Any]) -> str:
    """A row a number of ranks and method."""
    sizes = ", ".join(f"{name} {value}" for name, value in result["model"].items())
    lines = [("ranks", "method", "ms", "least", "most", "against")]
    for row in result["rows"]:
        for name, samples in row["samples"].items():
            secs = (median(samples), min(samples), max(samples))
            other, ratio = AGAINST.get(name), "-"
            if other is not None:
                ratio = f"{other} {median(row['samples'][other]) / median(samples):.2f}"
            times = (f"{1e3 * value:.0f}" for value in secs)
            lines.append((str(row["ranks"]), name, *times, ratio))
    title = f"Llama of {sizes}, float32: {result['batch']} sequences a step"
    return "\n".join([title, *texts_of(lines, num_left=2)])


if __name__ == "__main__":
    sys.exit(main())
