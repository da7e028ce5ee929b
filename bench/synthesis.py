"""Collectives and random pairs of layouts on networks: modelled times over the bound.

Nothing is run: times are those of the model of wires (docs/bound.md), and every number is the same
on each machine, but for the seconds of planning.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import rvdcomm as rv
from bench.command_line import at_least_one, parser_for
from bench.result import environment, write
from bench.tables import grid
from rvdcomm.errors import LayoutError
from rvdcomm.network import Node
from rvdcomm.units import secs_text

DESCRIPTION = """\
Plan collectives on known networks and hosts of unequal size, and random pairs of layouts on random
networks; compare the modelled time with the bound. Nothing is run.

columns:
  x steps   time of the best path of primitives over the bound
  x bound   time of the plan that rv.plan gives over the bound
  steps     the steps of that plan
  slices    pipeline slices
  rounds    messages of the busiest rank, one after another
  planned   seconds that planning took on this machine
"""

GB, GIB, MIB = 1e9, 1 << 30, 1 << 20
COLLECTIVES = {
    "all-gather": ("R(1)V(1)D({n},1)", "R({n})V(1)D(1,1)"),
    "reduce-scatter": ("R(1)V({n})D(1,1)", "R(1)V(1)D({n},1)"),
    "all-reduce": ("R(1)V({n})D(1,1)", "R({n})V(1)D(1,1)"),
}
COLUMNS = 1024


def link(gigabytes: float, alpha_secs: float = 1e-9) -> rv.Link:
    """A link of so many GB/s."""
    return rv.Link(alpha_secs, gigabytes * GB)


def blocks(*sizes: int) -> list[range]:
    """Hosts of these sizes, whose ranks are numbered host by host."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def known() -> Mapping[str, rv.Network]:
    """The networks of the issue's table and of publications, each with all of its ranks."""
    hosts = rv.Network.hosts
    return {
        "1 host of 8": hosts(blocks(8), link(300), link(300)),
        "2 x 8, a NIC for a host": hosts(blocks(8, 8), link(300), link(25)),
        "4 x 2, a NIC for a host": hosts(blocks(2, 2, 2, 2), link(2), link(1)),
        "2 x 8, a NIC for a rank": hosts(blocks(8, 8), link(300), link(25), 1),
        "4 x 8, a NIC for a rank": hosts(blocks(8, 8, 8, 8), link(300), link(25), 1),
        "2 x 16, a NIC for a rank": hosts(blocks(16, 16), link(125), link(12.5), 1),
        "DGX-1": rv.Network.preset("dgx-1"),
        "NDv2 x 2": rv.Network.preset("ndv2", 2),
        "NDv2 x 4": rv.Network.preset("ndv2", 4),
        "DGX-2 x 2": rv.Network.preset("dgx-2", 2),
        "DGX A100 x 2": rv.Network.preset("dgx-a100-rails", 2),
        "torus 4 x 4": rv.Network.preset("torus", 4, 4, link=link(1, 1e-6)),
        "mesh 4 x 4": rv.Network.preset("mesh", 4, 4, link=link(1, 1e-6)),
    }


def unequal() -> Mapping[str, tuple[rv.Topology, Sequence[int]]]:
    """Hosts with unequal numbers of ranks, and the ranks that take part."""

    def of(*sizes: int) -> rv.Topology:
        return rv.Topology.hosts(blocks(*sizes), link(300, 3e-6), link(10, 100e-6))

    return {
        "hosts of 4 + 2": (of(4, 2), range(6)),
        "12 of 16 on 8 + 8": (of(8, 8), range(12)),
        "7 of 8 on 4 + 4": (of(4, 4), range(7)),
        "hosts of 8 + 8 + 4": (of(8, 8, 4), range(20)),
    }


def row_of(
    name: str, what: str, num_bytes: int, src: rv.Layout, dst: rv.Layout, links: Any
) -> dict[str, Any]:
    """Plan one pair of layouts."""
    steps = rv.plan(src, dst, "float32", links, trees=False)
    start = time.perf_counter()
    made = rv.plan(src, dst, "float32", links)
    kinds, slices = [step.kind for step in made.path.steps], made.num_slices
    planning_secs = time.perf_counter() - start
    return {
        "network": name,
        "collective": what,
        "bytes": num_bytes,
        "ranks": len(made.path.ranks),
        "steps": kinds,
        "slices": slices,
        "rounds": made.cost.rounds,
        "secs": made.cost.secs,
        "bound_secs": made.bound.secs,
        "over_bound": made.gap,
        "steps_over_bound": steps.gap,
        "planning_secs": planning_secs,
    }


def rows() -> Iterator[dict[str, Any]]:
    """The rows of known networks, then of unequal hosts."""
    for name, network in known().items():
        for what, texts in COLLECTIVES.items():
            yield row_of(name, what, GIB, *_ends(texts, GIB, network.ranks), network)
    for name, (topology, ranks) in unequal().items():
        for num_bytes in (20 * MIB, 80 * MIB, GIB):
            ends = _ends(COLLECTIVES["all-reduce"], num_bytes, ranks)
            yield row_of(name, "all-reduce", num_bytes, *ends, topology)


def _ends(texts: tuple[str, str], num_bytes: int, ranks: Sequence[int]) -> list[rv.Layout]:
    shape = num_bytes // (4 * COLUMNS), COLUMNS
    return [rv.Layout(shape, text.format(n=len(ranks)), ranks) for text in texts]


# --- random networks ----------------------------------------------------------------------------

RATES = (1.0, 2.0, 2.5, 4.0, 8.0)


def random_network(rng: random.Random, alpha_secs: float) -> rv.Network:
    """3 to 8 ranks that reach each other over directed links of unequal rates, and switches."""
    ranks = range(rng.randint(3, 8))
    nodes: list[Node] = [*ranks, *(f"s{i}" for i in range(rng.choice([0, 0, 1, 2, 3])))]
    share = rng.choice([0.3, 0.6, 1.0])
    while True:
        wires = [
            rv.Wire(a, b, link(rng.choice(RATES), alpha_secs))
            for a in nodes
            for b in nodes
            if a != b and rng.random() < share
        ]
        with suppress(LayoutError):
            network = rv.Network(tuple(wires))
            if network.ranks == tuple(ranks):
                return network
        share = min(1.0, share + 0.1)


def random_layout(rng: random.Random, num_bytes: int, ranks: Sequence[int], v: bool) -> rv.Layout:
    """Some of the ranks, with replicas, parts and cuts that may be uneven."""
    mine = rng.sample(ranks, rng.randint(1, len(ranks)))
    counts = [1, 1, 1, 1]
    left = len(mine)
    while left > 1:
        factor = next(f for f in range(2, left + 1) if left % f == 0)
        counts[rng.choice([0, 1, 2, 3] if v else [0, 2, 3])] *= factor
        left //= factor
    r, parts, rows, columns = counts
    shape = num_bytes // (4 * COLUMNS) + rng.choice([0, 0, 5]), COLUMNS
    return rv.Layout(shape, f"R({r})V({parts})D({rows},{columns})", mine)


def random_rows(count: int) -> Iterator[dict[str, Any]]:
    """Rows of random pairs: 64 MiB without latency, and 64 KiB with 10 us."""
    for seed in range(count):
        for num_bytes, alpha_secs in ((64 * MIB, 0.0), (64 << 10, 10e-6)):
            rng = random.Random(seed)
            network = random_network(rng, alpha_secs)
            src = random_layout(rng, num_bytes, network.ranks, True)
            dst = random_layout(rng, num_bytes, network.ranks, False)
            dst = rv.Layout(src.shape, dst.rvd, dst.ranks)
            yield row_of(f"random {seed}", "random", num_bytes, src, dst, network)


def summary(found: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Median and worst of random rows of each size, without those in which nothing moves."""
    out = {}
    for num_bytes in (64 * MIB, 64 << 10):
        mine = [r for r in found if r["bytes"] == num_bytes and r["bound_secs"]]
        ratios = sorted(row["over_bound"] for row in mine)
        if ratios:
            out[str(num_bytes)] = {
                "rows": len(ratios),
                "median": median(ratios),
                "worst": ratios[-1],
                "above_1_05": sum(ratio > 1.05 for ratio in ratios),
                "steps_median": median(row["steps_over_bound"] for row in mine),
            }
    return out


def lines(found: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The table of known networks and unequal hosts."""
    table = [["network", "", "size", "x steps", "x bound", "steps", "slices", "rounds", "planned"]]
    for row in found:
        steps = [kind.replace("_", "-") for kind in row["steps"]]
        size = f"{row['bytes'] // MIB} MiB" if row["bytes"] < GIB else "1 GiB"
        table.append([
            row["network"], row["collective"], size, f"{row['steps_over_bound']:.3f}",
            f"{row['over_bound']:.3f}", steps[0] if len(steps) == 1 else f"{len(steps)} steps",
            str(row["slices"]), str(row["rounds"]), secs_text(row["planning_secs"]),
        ])  # fmt: skip
    return table


def report(result: Mapping[str, Any]) -> str:
    """What the command prints of a result."""
    return "\n".join([grid(lines(result["rows"])), *random_lines(result["random"])])


def random_lines(summed: Mapping[str, Any]) -> Iterator[str]:
    """A line for each size of random rows."""
    names = {str(64 * MIB): "64 MiB, no latency", str(64 << 10): "64 KiB, 10 us a message"}
    for key, each in summed.items():
        yield f"{each['rows']} random pairs, {names[key]}: median {each['median']:.3f} x bound,"
        yield (
            f"  worst {each['worst']:.3f}, {each['above_1_05']} above 1.05; "
            f"paths of primitives: median {each['steps_median']:.3f}"
        )


def main(words: list[str]) -> int:
    """Run the command."""
    parser = parser_for("synthesis", DESCRIPTION)
    parser.add_argument("--out", type=Path, default=Path("bench/results/synthesis.json"))
    parser.add_argument(
        "--random", type=at_least_one, default=500, help="random networks (default: %(default)s)"
    )
    args = parser.parse_args(words)
    from tqdm import tqdm

    found = list(tqdm(rows(), "networks", delay=2, leave=False))
    rest = list(tqdm(random_rows(args.random), "random", total=2 * args.random, leave=False))
    summed = summary(rest)
    result = {"rows": found, "random": summed, "random_rows": rest}
    print(report(result))
    write({**environment("synthesis", words), **result}, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
