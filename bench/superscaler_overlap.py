"""Overlap: data parallel and ZeRO-3 with and without it, against DDP and FSDP2, between hosts."""

from __future__ import annotations

import argparse
import sys
from statistics import median
from typing import Any

from bench.at_rates import at_rates
from bench.superscaler_predict import texts_of
from bench.training_options import parse_training, parser_for

DESCRIPTION = """\
Train a GPT (float32, SGD with momentum) on an emulated cluster, every rank on a share of the batch.
The same weights and data: losses of the first steps, updates between them, have to agree to 1e-5
before anything is timed. All methods run in the same processes, alternating step by step.
  dp, dp+        superscaler_core, plan `data_parallel`, without and with overlap
  zero3, zero3+  the same of plan `zero3`
  ddp            torch DistributedDataParallel, with buckets of --bucket; ddp25 with its own 25 MiB
  fsdp           torch FSDP2: fully_shard on every block and on the model

columns:
  ms         forward and backward with all communication, of the slowest rank: median, least, most
  against    the torch method that it is compared with, and that method's time over this one's
  comm ms    time that ranks wait for communication in a step without overlap, mean of the ranks
  hidden     share of it that overlap hides: (ms without - ms with) / comm ms
  predicted  the same by the simulator, with links calibrated and ops measured just before
"""

EPILOG = """\
examples:
  python -m bench.superscaler_overlap                             # needs root
  python -m bench.superscaler_overlap --rates 100mbit,400mbit --steps 20
"""

METHODS = ("dp", "dp+", "ddp", "ddp25", "zero3", "zero3+", "fsdp")
AGAINST = {"dp": "ddp", "dp+": "ddp", "zero3": "fsdp", "zero3+": "fsdp"}


def parse_args(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = parser_for("superscaler_overlap", DESCRIPTION, EPILOG)
    parser.add_argument("--cluster", default="2x2", help="hosts x ranks (default %(default)s)")
    parser.add_argument(
        "--rates", default="200mbit,500mbit", help="of a host's link (default %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step (default 16)")
    parser.add_argument(
        "--bucket", type=int, default=4 << 20, help="bytes reduced in a call (default 4 MiB)"
    )
    parser.add_argument("--prefetch", type=int, default=1, help="windows ahead (default 1)")
    parser.add_argument(
        "--op-secs", type=float, default=0.06, help="to measure an op (default %(default)s)"
    )
    return parse_training(parser, words, methods=METHODS, steps=15, layers=6)


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table and write a JSON."""
    words = sys.argv[1:] if argv is None else argv
    return at_rates(
        "superscaler_overlap", words, parse_args(words),
        given=("model", "methods", "steps", "batch", "bucket", "prefetch", "op_secs"),
        told=("cluster", "model", "batch", "bucket"), table=table,
    )  # fmt: skip


# --- the table ----------------------------------------------------------------------------------

COLUMNS = ("rate", "method", "ms", "least", "most", "against", "comm ms", "hidden", "predicted")


def table(result: dict[str, Any]) -> str:
    """A row a rate and method."""
    sizes = ", ".join(f"{name} {value}" for name, value in result["model"].items())
    title = (
        f"GPT of {sizes}, float32:\n{result['batch']} sequences a step on {result['cluster']} "
        f"ranks, buckets of {result['bucket']} bytes"
    )
    cells = [_cells(row, name) for row in result["rows"] for name in row["samples"]]
    return "\n".join([title, *texts_of([COLUMNS, *cells], num_left=2)])


def hidden(row: dict[str, Any], name: str) -> tuple[float, float] | None:
    """Which share of the communication overlap hides: measured, predicted."""
    plain = name.removesuffix("+")
    if plain == name or plain not in row["samples"]:
        return None
    without, with_overlap = (median(row["samples"][one]) for one in (plain, name))
    predicted = row["predicted"]
    return (
        (without - with_overlap) / row["comm_secs"][plain],
        (predicted[plain]["secs"] - predicted[name]["secs"]) / predicted[plain]["comm_secs"],
    )


def _cells(row: dict[str, Any], name: str) -> tuple[str, ...]:
    samples = row["samples"][name]
    times = (median(samples), min(samples), max(samples))
    other = AGAINST.get(name)
    ratio = "-"
    if other in row["samples"]:
        ratio = f"{other} {median(row['samples'][other]) / median(samples):.2f}"
    shares = hidden(row, name)
    return (
        row["rate"],
        name,
        *(f"{1e3 * secs:.0f}" for secs in times),
        ratio,
        f"{1e3 * row['comm_secs'][name]:.0f}" if name in row["comm_secs"] else "-",
        *(("-", "-") if shares is None else (f"{share:.0%}" for share in shares)),
    )


if __name__ == "__main__":
    sys.exit(main())
