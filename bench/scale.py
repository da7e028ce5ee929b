"""The RVD benchmark at scale, modelled: no process is started and nothing is measured.

One cost model gives the times of all methods: a step takes latency times rounds, plus the bytes of
the busiest port over its bandwidth (``rvdcomm/cost/ports.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from math import prod
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.command_line import parser_for
from bench.result import environment, write
from bench.rvd.cases import IN_GROUP, definitions, local_groups
from bench.rvd.report import SHORT
from bench.tables import grid
from rvdcomm import Cost, Layout, Path, Topology, plan
from rvdcomm.planning import Binding, R, V, refine, steps_of_bindings
from rvdcomm.plans import modelled_cost

Counts = NDArray[np.int64]

DESCRIPTION = """\
Model the 18 cases of the RVD benchmark between two groups, and the 6 inside one, at scale.

columns:
  ours      the plan that rvdcomm picks
  p2p       SuperScaler's baseline: every reader pulls what it needs of every part from one writer,
            all at once
  DTensor   its order of collectives on a mesh of pods x hosts x ranks, one mesh dim after another;
            between two groups it has none
  bound     what no plan can beat
"""

SHAPE, DTYPE, ITEM_BYTES = (16384, 16384), "float32", 4
METHODS = ("ours", "p2p", "dtensor", "bound")


@dataclass(frozen=True, slots=True)
class Modelled:
    """A modelled cost: seconds, bytes between ranks, the part of them between hosts, and rounds."""

    secs: float
    wire_bytes: int
    host_bytes: int
    rounds: int

    @classmethod
    def of(cls, cost: Cost) -> Modelled:
        """The modelled cost of a plan."""
        return cls(cost.secs, cost.wire_bytes, cost.host_bytes, cost.rounds)


@dataclass(frozen=True)
class World:
    """A cluster: the counts of its levels, outermost first, and the size of the smaller group."""

    name: str
    preset: str
    counts: tuple[int, ...]
    num_ranks: int

    @property
    def topology(self) -> Topology:
        """The topology; ranks are numbered host by host, pod by pod."""
        return Topology.preset(self.preset, *self.counts)


# The two groups of a case are on different hosts, and with three levels in different pods.
WORLDS = (
    World("32 V100", "dgx-v100", (4, 8), 8),
    World("1,024 H100", "dgx-h100", (128, 8), 256),
    World("16,384 H100", "dgx-h100", (64, 32, 8), 4096),
)


def groups_of(world: World) -> dict[str, tuple[Sequence[int], Sequence[int]]]:
    """Src and dst ranks of every relation; the in-group cases use all ranks of the world."""
    everyone = range(prod(world.counts))
    return {**local_groups(world.num_ranks), IN_GROUP: (everyone, everyone)}


def rows_of(world: World) -> list[dict[str, Any]]:
    """A row for every case of a world, with the costs of all methods."""
    topology, rows = world.topology, []
    cases = list(product(groups_of(world).items(), definitions()["categories"].items()))
    for (relation, (src_ranks, dst_ranks)), (category, texts) in _progress(cases, world.name):
        counts = {"n": len(src_ranks), "m": len(dst_ranks)}
        src, dst = (
            Layout(SHAPE, text.format(**counts), ranks)
            for text, ranks in zip(texts, (src_ranks, dst_ranks), strict=True)
        )
        found = plan(src, dst, DTYPE, topology)
        costs = {
            "ours": Modelled.of(found.cost),
            "p2p": point_to_point(src, dst, topology),
            "dtensor": dtensor(src, dst, topology),
            "bound": Modelled.of(found.bound),
        }
        rows.append(
            {"world": world.name, "category": category, "relation": relation}
            | {"src": str(src), "dst": str(dst)}
            | {"steps": [step.kind for step in found.path.steps]}
            | {name: None if cost is None else asdict(cost) for name, cost in costs.items()}
        )
    return rows


def _progress(cases: list[Any], name: str) -> Iterable[Any]:
    from tqdm import tqdm

    is_tty = sys.stderr.isatty()
    bar: Iterable[Any] = tqdm(cases, name, unit="case", delay=2, leave=False, disable=not is_tty)
    return bar


# --- point-to-point -----------------------------------------------------------------------------


def point_to_point(src: Layout, dst: Layout, topology: Topology) -> Modelled:
    """The modelled cost of ``methods.point_to_point``, with all messages at once.

    If src has only replicas, each reader pulls its box from one of them, using the replicas in
    turn. Otherwise each reader pulls equally many bytes from every writer.

    Law (tests/bench/test_scale.py): the cost equals that of counting the messages.
    """
    readers, writers = np.array(dst.ranks), np.array(src.ranks)
    pulled = ITEM_BYTES * prod(src.shape) // prod(dst.rvd.d)
    if src.rvd.r == len(writers):
        turns = writers[np.arange(len(readers)) % len(writers)]
        sources = np.where(np.isin(readers, writers), readers, turns)
        ports = [_Ports.of_pairs(home[sources], home[readers], pulled) for home in _homes(topology)]
        served = np.bincount(sources[sources != readers], minlength=1)
        return _modelled(ports, int(served.max()), topology)
    share = pulled // prod(src.rvd.d)
    ports = [_Ports.of_all(home[writers], home[readers], share) for home in _homes(topology)]
    num_own = int(src.ranks == dst.ranks)
    return _modelled(ports, max(len(writers), len(readers)) - num_own, topology)


@dataclass(frozen=True)
class _Ports:
    """Bytes into and out of the ports of one level, ``[groups]`` each."""

    into: Counts
    out_of: Counts

    @classmethod
    def of_pairs(cls, src_home: Counts, dst_home: Counts, num_bytes: int) -> _Ports:
        """One message per pair, from each source to the destination at the same position."""
        num_homes = 1 + int(max(src_home.max(), dst_home.max()))
        away = src_home != dst_home
        both = (np.bincount(home[away], minlength=num_homes) for home in (dst_home, src_home))
        return cls(*(counts * num_bytes for counts in both))

    @classmethod
    def of_all(cls, src_home: Counts, dst_home: Counts, num_bytes: int) -> _Ports:
        """One message from every source to every destination."""
        num_homes = 1 + int(max(src_home.max(), dst_home.max()))
        a, b = (np.bincount(home, minlength=num_homes) for home in (src_home, dst_home))
        return cls(b * (a.sum() - a) * num_bytes, a * (b.sum() - b) * num_bytes)


def _homes(topology: Topology) -> list[Counts]:
    """For every level, the group of each rank, by rank."""
    return [np.array([home[rank] for rank in range(len(home))]) for home in topology.homes]


def _modelled(ports: list[_Ports], rounds: int, topology: Topology) -> Modelled:
    """The cost of one step under the port model."""
    totals = [int(port.into.sum()) for port in ports]
    if not totals[0]:
        return Modelled(0.0, 0, 0, 0)
    farthest = max(level for level, total in enumerate(totals) if total)
    busiest = max(
        max(int(port.into.max()), int(port.out_of.max())) / level.link.bytes_per_sec
        for port, level in zip(ports, topology.levels, strict=True)
    )
    secs = topology.levels[farthest].link.alpha_secs * rounds + busiest
    return Modelled(secs, totals[0], totals[1] if len(totals) > 1 else 0, rounds)


# --- DTensor ------------------------------------------------------------------------------------


def mesh_order(src: Sequence[str], dst: Sequence[str]) -> list[tuple[int, str, str]]:
    """The order in which DTensor changes mesh dims: (mesh dim, before, after) of every step.

    ``P`` is a partial sum, ``R`` a replica, ``S0`` a split of dim 0; mesh dims are outermost first.
    If src has a split, the mesh dims change from the inner to the outer: each to its dst placement,
    or to ``R`` if an outer mesh dim must still begin or end to split the same tensor dim. The
    remaining changes then follow from the outer to the inner.

    Source: ``DTensorRedistributePlanner.generate_greedy_transform_infos`` of torch 2.13.
    """
    state, steps = list(src), list[tuple[int, str, str]]()

    def change(i: int, after: str) -> None:
        if state[i] != after:
            steps.append((i, state[i], after))
            state[i] = after

    if any(placement.startswith("S") for placement in src):
        for i in reversed(range(len(state))):
            cut, others = dst[i], range(i)
            nested = [state[j] == cut for j in others] != [dst[j] == cut for j in others]
            change(i, "R" if cut.startswith("S") and nested else cut)
    for i, after in enumerate(dst):
        change(i, after)
    return steps


def dtensor(src: Layout, dst: Layout, topology: Topology) -> Modelled | None:
    """The cost of DTensor's order of collectives, by our cost model; None between two groups."""
    pair = refine(src, dst, topology) if src.ranks == dst.ranks else None
    if pair is None:
        return None
    a, b = pair
    grid, states = a.grid, [a.targets]
    steps = mesh_order(*([_placement(x, i) for i in range(len(grid.axes))] for x in pair))
    for i, before, after in steps:
        target = {_placement(a, i): a.targets[i], _placement(b, i): b.targets[i], "R": R}[after]
        # An all_reduce is modelled as a reduce_scatter and an all_gather, as in our plans.
        for t in (grid.scratch(i), R) if (before, after) == ("P", "R") else (target,):
            states.append((*states[-1][:i], t, *states[-1][i + 1 :]))
    order = tuple(i for i, before, _ in steps if before == "P")
    path = Path(src, dst, tuple(steps_of_bindings([Binding(grid, t, order) for t in states])))
    found = modelled_cost(path, ITEM_BYTES, topology)
    assert found is not None, "rebinds of an even grid have a formula"
    return Modelled.of(found.cost)


def _placement(binding: Binding, axis: int) -> str:
    target = binding.targets[axis]
    return {R: "R", V: "P"}.get(target) or f"S{binding.grid.digits[target].dim}"


# --- the result ---------------------------------------------------------------------------------

COLUMNS = ("case", "groups", *METHODS[:2], "DTensor", "bound", "p2p", "DTensor", "plan")


def table(rows: list[dict[str, Any]]) -> str:
    """A table per world: modelled ms, and the times of the other methods over ours."""
    parts = []
    for world in dict.fromkeys(row["world"] for row in rows):
        lines = [COLUMNS, *(_cells(row) for row in rows if row["world"] == world)]
        parts.append(f"{world}, {'x'.join(map(str, SHAPE))} {DTYPE}, modelled ms, and times ours:")
        parts += [grid(lines), ""]
    return "\n".join(parts)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    secs = [None if row[name] is None else row[name]["secs"] for name in METHODS]
    times = ["-" if not (s and secs[0]) else f"{s / secs[0]:.3g}x" for s in secs[1:3]]
    ms = ["-" if s is None else f"{s * 1e3:.4g}" for s in secs]
    kinds = "+".join(SHORT.get(kind, kind) for kind in row["steps"]) or "copy"
    return row["category"], row["relation"], *ms, *times, kinds


def plot(rows: list[dict[str, Any]], path: FilePath) -> None:
    """Draw a panel per world: the time of every case by every method, on a log scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    worlds = list(dict.fromkeys(row["world"] for row in rows))
    styles = {
        "p2p": ("s", "#E69F00", "point-to-point"),
        "dtensor": ("D", "#56B4E9", "DTensor's order of collectives"),
        "ours": ("o", "#0072B2", "rvdcomm"),
        "bound": ("_", "black", "lower bound"),
    }
    figure, axes = plt.subplots(len(worlds), 1, figsize=(11, 3.1 * len(worlds) + 1.2), sharex=True)
    for ax, world in zip(axes, worlds, strict=True):
        mine = [row for row in rows if row["world"] == world]
        for name, (marker, colour, label) in styles.items():
            # A case that moves nothing takes no time, which a log scale cannot show.
            points = [
                (i, row[name]["secs"] * 1e3)
                for i, row in enumerate(mine)
                if row[name] and row[name]["secs"]
            ]
            size = 130 if marker == "_" else 34
            ax.scatter(*zip(*points, strict=True), marker=marker, c=colour, s=size, label=label)
        ax.set(yscale="log", ylabel="modelled ms", title=world)
        labels = [f"{row['category']}  {row['relation']}" for row in mine]
        ax.set_xticks(range(len(mine)), labels, rotation=60, ha="right")
        ax.set_xlim(-0.8, len(mine) - 0.2)
        ax.grid(alpha=0.25)
        ax.set_axisbelow(True)
    handles, labels = axes[0].get_legend_handles_labels()
    sizes = "x".join(map(str, SHAPE))
    figure.suptitle(f"The RVD benchmark at scale, modelled: {sizes} {DTYPE}")
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0.035, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Model all cases, print a table, and write a JSON file and a plot."""
    words = sys.argv[1:] if argv is None else argv
    parser = parser_for("scale", DESCRIPTION)
    names = [world.name for world in WORLDS]
    parser.add_argument("--worlds", help=f"some of '{';'.join(names)}' (default: all)")
    parser.add_argument(
        "--out",
        type=FilePath,
        default=FilePath("bench/results/scratch/scale.json"),
        help="result file; the plot lies beside it (default: %(default)s)",
    )
    args = parser.parse_args(words)
    chosen = names if args.worlds is None else args.worlds.split(";")
    if not set(chosen) <= set(names):
        parser.error(f"the worlds are {';'.join(names)}")
    rows = [row for world in WORLDS if world.name in chosen for row in rows_of(world)]
    print(table(rows))
    result = {**environment("scale", words), "shape": SHAPE, "dtype": DTYPE, "rows": rows}
    write(result, args.out, partial(plot, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
