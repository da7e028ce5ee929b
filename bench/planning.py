"""How long cold planning takes: ``plan()`` on one core, by number of ranks, dims and relation."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.run import environment
from rvdcomm import Layout, Link, Topology, planner

SHAPES = {2: (3 * 512, 5 * 512), 3: (256, 128, 64)}
SEED = 0


def factorings(number: int, count: int) -> list[tuple[int, ...]]:
    """All ways to write ``number`` as a product of ``count`` factors in order."""
    if count == 1:
        return [(number,)]
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return [(d, *rest) for d in divisors for rest in factorings(number // d, count - 1)]


def layouts(num_ranks: int, num_dims: int, first: int) -> list[Layout]:
    """Every RVD over consecutive ranks from ``first``."""
    ranks = range(first, first + num_ranks)
    return [
        Layout(SHAPES[num_dims], f"R({r})V({v})D({','.join(map(str, d))})", ranks)
        for r, v, *d in factorings(num_ranks, num_dims + 2)
    ]


def measure(num_ranks: int, num_dims: int, relation: str, max_pairs: int) -> dict[str, Any]:
    """Plan pairs of every RVD with every other, at most ``max_pairs`` drawn at random."""
    size = max(num_ranks // 4, 1)
    hosts = [range(h * size, (h + 1) * size) for h in range(8)]
    topology = Topology.hosts(hosts, Link(3e-6, 380e9), Link(12e-6, 360e9))
    src = layouts(num_ranks, num_dims, 0)
    dst = layouts(num_ranks, num_dims, num_ranks if relation == "n->n" else 0)
    pairs = list(itertools.product(src, dst))
    if len(pairs) > max_pairs:
        pairs = random.Random(SEED).sample(pairs, max_pairs)
    secs = []
    for a, b in pairs:
        planner.clear_cache()
        start = time.perf_counter()
        planner.plan(a, b, "float32", topology)
        secs.append(time.perf_counter() - start)
    return {
        "ranks": num_ranks, "dims": num_dims, "relation": relation,
        "pairs": len(pairs), "samples": secs,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, write a JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.planning", description=__doc__)
    parser.add_argument("--ranks", default="8,16,64", help="default: %(default)s")
    parser.add_argument("--pairs", type=int, default=200, help="at most so many pairs a row")
    parser.add_argument("--out", type=Path, default=Path("bench/results/scratch/planning.json"))
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    rows = []
    print(
        f"{'ranks':>5}  {'dims':>4}  {'relation':8}  {'pairs':>5}  {'median ms':>9}  {'max ms':>8}"
    )
    for num_ranks in map(int, args.ranks.split(",")):
        for num_dims, relation in itertools.product(SHAPES, ("in group", "n->n")):
            row = measure(num_ranks, num_dims, relation, args.pairs)
            rows.append(row)
            middle, worst = median(row["samples"]) * 1e3, max(row["samples"]) * 1e3
            print(
                f"{num_ranks:5}  {num_dims:4}  {relation:8}  {row['pairs']:5}  "
                f"{middle:9.2f}  {worst:8.1f}",
                flush=True,
            )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python -m bench.planning", *(sys.argv[1:])])
    args.out.write_text(json.dumps({**environment(command), "rows": rows}, indent=1) + "\n")
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
