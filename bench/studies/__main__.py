"""``python -m bench.studies``: tune all systems of a study on simulated V100s."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.run import environment
from bench.studies import breakdown, cluster, one_gpu, report, transfers
from bench.studies.cells import tuned
from bench.studies.study import STUDIES

DESCRIPTION = """\
The studies of the SuperScaler paper, simulated on up to 32 V100s (4 hosts of 8). Each system is
tuned over its own knobs; the best way that fits in memory counts. Nothing here was run on a GPU.

  swin        Swin Transformer: co-shard against Megatron 1F1B and DeepSpeed ZeRO-3
  gpt3        GPT-3 by length of the sequence: the same systems
  mbart       mBART: interlaced pipeline against the same
  alphafold2  Evoformer: 3F1B against DAP+DP, and with ZeRO-3
  memory      GPT-3 1.3 B on one GPU: memory by length of the sequence
  breakdown   mBART: compute, communication and bubble under 1F1B and the interlaced pipeline
  transfers   the communication of the studies with RVD on and off
"""

EPILOG = """\
examples:
  python -m bench.studies swin --gpus 4           # minutes
  python -m bench.studies all --processes 2       # some two hours
"""

SINGLE: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "memory": one_gpu.run,
    "breakdown": lambda out, num_processes: breakdown.run(out),
    "transfers": transfers.run,
}
"""Studies that are no tuning of systems over GPU counts: from the folder of results and how many
processes there may be."""


def main(words: list[str]) -> int:
    """The command."""
    args = _parse(words)
    names = [*STUDIES, *SINGLE] if "all" in args.studies else args.studies
    for name in names:
        result: dict[str, Any] = environment(shlex.join(["python", "-m", "bench.studies", *words]))
        if name in SINGLE:
            result |= SINGLE[name](args.out, args.processes)
        else:
            result |= tuned(name, args.gpus, args.processes)
            _show(name, result, args.out)
        path = args.out / f"study_{name}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{path}\n")
    return 0


def _parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.studies",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "studies", nargs="+", choices=[*STUDIES, *SINGLE, "all"], metavar="STUDY",
        help="one of the above, or all",
    )  # fmt: skip
    parser.add_argument(
        "--gpus", type=_counts, default=cluster.GPUS, metavar="N,N",
        help="which of 4,8,16,32 (default: all)",
    )  # fmt: skip
    parser.add_argument("--processes", type=int, default=2, help="at a time (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of results")
    return parser.parse_args(words)


def _counts(text: str) -> tuple[int, ...]:
    found = tuple(int(word) for word in text.split(","))
    if not set(found) <= set(cluster.GPUS):
        raise argparse.ArgumentTypeError(f"{text}: the studies are of {cluster.GPUS} GPUs.")
    return found


def _show(name: str, result: dict[str, Any], out: Path) -> None:
    rows, ours = result["rows"], result["ours"]
    ratios = [r for r in (report.speed_up(row, ours) for row in rows) if r]
    print(f"{result['study']}: samples a second, simulated\n")
    print(report.table(rows, ours), "\n")
    print(report.ways_table(rows), "\n")
    most = f"up to {max(ratios):.2f} x" if ratios else "no row where both fit"
    print(f"speed-up over the best baseline: {most}; the paper: up to {result['claim']} x")
    out.mkdir(parents=True, exist_ok=True)
    report.plot(rows, ours, result["study"], out / f"study_{name}.png")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
