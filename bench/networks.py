"""Collectives on emulated networks: hosts of unequal size or speed, a line, a ring, two NICs.

Plans as ``rv.plan`` makes them (``ours``), paths of primitives alone (``steps``), gloo's own
collective and DTensor's take turns in one run. The bound is that of ``rv.plan`` for the rate that
one TCP stream reaches between the hosts just before. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any

import rvdcomm as rv
from bench.cluster.emulated import Cluster, ClusterUnavailableError, parse_rates
from bench.command_line import above_zero, parser_for
from bench.result import environment, write
from bench.tables import grid
from rvdcomm.network import Links, Network
from rvdcomm.units import bytes_text, secs_text

INSIDE = rv.Link(20e-6, 2e9)
FAR_ALPHA_SECS = 300e-6
"""Of a message between namespaces; ``rvdcomm calibrate`` finds 0.2 to 0.4 ms."""

MIB = 1 << 20


@dataclass(frozen=True)
class Emulated:
    """An emulated network, and the ranks that take part.

    Attributes:
        hosts, ranks_per_host: how many.
        counts: how many of the ranks take part, the first of each host after the other; all if
            empty.
        rate: of a host's link, or of a wire, as of ``bench.cluster``.
        nics: links of a host.
        shape: ``line`` or ``ring``, of hosts that are wired to each other; empty with a switch.
        sizes: bytes of the tensor.
    """

    hosts: int
    ranks_per_host: int
    counts: tuple[int, ...] = ()
    rate: str = "200mbit"
    nics: int = 1
    shape: str = ""
    sizes: tuple[int, ...] = (16 * MIB,)

    @property
    def wires(self) -> tuple[tuple[int, int], ...]:
        """Pairs of hosts that are wired to each other."""
        ends = range(self.hosts if self.shape == "ring" else self.hosts - 1)
        return tuple((i, (i + 1) % self.hosts) for i in ends) if self.shape else ()

    def links(self, share: float) -> Links:
        """The network as ``rv.plan`` gets it; streams reach this share of the rates."""
        rates = parse_rates(self.rate)
        all_rates = rates if isinstance(rates, tuple) else (rates,) * self.hosts
        far = [rv.Link(FAR_ALPHA_SECS, rate / 8 * share) for rate in all_rates]
        if self.shape:
            return Network.preset(self.shape, self.hosts, link=far[0])
        blocks = [
            range(i * self.ranks_per_host, (i + 1) * self.ranks_per_host) for i in range(self.hosts)
        ]
        if self.nics > 1:
            return Network.hosts(blocks, INSIDE, far, self.ranks_per_host // self.nics)
        if len(set(far)) > 1:
            return Network.hosts(blocks, INSIDE, far)
        return rv.Topology.hosts(blocks, INSIDE, far[0])


SMALL = (4 << 10,)
EMULATED: Mapping[str, Emulated] = {
    "4 + 2, 4 + 3, 4 + 1": Emulated(2, 4, counts=(6, 7, 5)),
    "400, 400, 100, 100": Emulated(4, 1, rate="400mbit/400mbit/100mbit/100mbit"),
    "line of 4": Emulated(4, 1, shape="line"),
    "ring of 4": Emulated(4, 1, shape="ring"),
    "two NICs a host": Emulated(2, 2, nics=2),
    "2 x 4, small": Emulated(2, 4, sizes=SMALL),
    "2 x 8, small": Emulated(2, 8, sizes=SMALL),
}

COLLECTIVES = {
    "all-reduce": ("R(1)V({n})D(1,1)", "R({n})V(1)D(1,1)"),
    "all-gather": ("R(1)V(1)D({n},1)", "R({n})V(1)D(1,1)"),
    "reduce-scatter": ("R(1)V({n})D(1,1)", "R(1)V(1)D({n},1)"),
    "D -> D'": ("R(1)V(1)D({n},1)", "R(1)V(1)D(1,{n})"),
}
METHODS = ("ours", "steps", "gloo", "DTensor")


def shape_of(num_bytes: int, count: int) -> tuple[int, int]:
    """A nearly square float32 matrix of about this size, of which ``count`` ranks get equal pieces.

    >>> shape_of(4096, 8)
    (32, 32)
    """
    columns = count * max(1, round(sqrt(num_bytes / 4) / count))
    return count * max(1, round(num_bytes / 4 / columns / count)), columns


def measured(emulated: Emulated, share: float, samples: int) -> Iterator[dict[str, Any]]:
    """The rows, on the ranks of this world; others than rank 0 get the same rows."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # Ranks that take no part wait for those that do.
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    rank, links = dist.get_rank(), emulated.links(share)
    # Hosts of one rank share no memory, whatever levels the network resembles.
    executor = "auto" if emulated.ranks_per_host > 1 else "dist"
    for count in emulated.counts or (dist.get_world_size(),):
        ranks = list(range(count))
        group: Any = dist.new_group(ranks)
        for size in emulated.sizes:
            shape = shape_of(size, count)
            for what, texts in COLLECTIVES.items():
                ends = [rv.Layout(shape, text.format(n=count), ranks) for text in texts]
                plans = {
                    name: rv.plan(*ends, "float32", links, executor=executor, trees=has_trees)
                    for name, has_trees in (("ours", True), ("steps", False))
                }
                if rank in ranks:
                    shard = torch.ones(ends[0].cell(rank).box.shape)
                    calls = {key: _call(rv.Redistributor(p), shard) for key, p in plans.items()}
                    if what in GLOO:
                        calls["gloo"] = GLOO[what](shard, shape, group)
                    calls["DTensor"] = _by_dtensor(what, shard, group)
                    made = plans["ours"]
                    yield {
                        "ranks": count,
                        "collective": what,
                        "bytes": 4 * shape[0] * shape[1],
                        "steps": [step.kind for step in made.path.steps],
                        "slices": made.num_slices,
                        "rounds": made.cost.rounds,
                        "bound_secs": made.bound.secs,
                        "predicted_secs": made.cost.secs,
                        "samples": _samples(calls, samples, group),
                    }
        dist.barrier()
    dist.destroy_process_group()


def _call(run: rv.Redistributor, shard: Any) -> Callable[[], Any]:
    return lambda: run(shard)


def _all_reduce(shard: Any, shape: tuple[int, int], group: Any) -> Callable[[], Any]:
    import torch.distributed as dist

    return lambda: dist.all_reduce(shard.clone(), group=group)


def _all_gather(shard: Any, shape: tuple[int, int], group: Any) -> Callable[[], Any]:
    import torch
    import torch.distributed as dist

    whole = torch.empty(shape)
    return lambda: dist.all_gather_into_tensor(whole, shard, group=group)


def _all_to_all(shard: Any, shape: tuple[int, int], group: Any) -> Callable[[], Any]:
    """As a person would write it: blocks of columns out, and rows joined."""
    import torch
    import torch.distributed as dist

    def run() -> Any:
        count = dist.get_world_size(group)
        sent = torch.stack(list(shard.chunk(count, dim=1)))
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        return got.flatten(0, 1)

    return run


GLOO: Mapping[str, Callable[..., Callable[[], Any]]] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "D -> D'": _all_to_all,
}
"""gloo has no reduce-scatter of its own that torch offers."""


def _by_dtensor(what: str, shard: Any, group: Any) -> Callable[[], Any]:
    """``redistribute`` on a mesh of the group; D -> D' is a gather and a cut on CPUs."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

    placements: Mapping[str, tuple[Placement, Placement]] = {
        "all-reduce": (Partial(), Replicate()),
        "all-gather": (Shard(0), Replicate()),
        "reduce-scatter": (Partial(), Shard(0)),
        "D -> D'": (Shard(0), Shard(1)),
    }
    src, dst = placements[what]
    mesh = DeviceMesh.from_group(group, "cpu")
    return lambda: (
        DTensor.from_local(shard, mesh, [src], run_check=False).redistribute(placements=[dst])
        .to_local()
    )  # fmt: skip


def _samples(
    calls: Mapping[str, Callable[[], Any]], count: int, group: Any
) -> dict[str, list[float]]:
    """Seconds of each call between two barriers, in turn; the first of each is not counted."""
    import torch.distributed as dist

    found: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(count + 1):
        for name, call in calls.items():
            dist.barrier(group)
            start = time.perf_counter()
            call()
            dist.barrier(group)
            if i:
                found[name].append(time.perf_counter() - start)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each row: medians, over the bound, and those of others over ours."""
    head = ["network", "ranks", "", "size", "bound", "ours", "x bound"]
    lines = [[*head, *(f"{name} / ours" for name in METHODS[1:]), "rounds", "plan"]]
    for row in rows:
        found = {name: median(samples) for name, samples in row["samples"].items()}
        ours, kinds = found["ours"], row["steps"]
        lines.append([
            row["network"], str(row["ranks"]), row["collective"], bytes_text(row["bytes"]),
            secs_text(row["bound_secs"]), secs_text(ours), f"{ours / row['bound_secs']:.2f}",
            *(f"{found[name] / ours:.2f}" if name in found else "-" for name in METHODS[1:]),
            str(row["rounds"]), kinds[0] if len(kinds) == 1 else f"{len(kinds)} steps",
        ])  # fmt: skip
    return grid(lines)


def on(name: str, samples: int) -> list[dict[str, Any]]:
    """The rows of one network.

    Raises:
        ClusterUnavailableError: as of ``Cluster``.
    """
    emulated = EMULATED[name]
    rates = parse_rates(emulated.rate)
    slowest = min(rates[:2]) if isinstance(rates, tuple) else rates
    with (
        Cluster(
            emulated.hosts,
            emulated.ranks_per_host,
            rates,
            nics=emulated.nics,
            wires=emulated.wires,
        ) as cluster,
        tempfile.TemporaryDirectory() as folder,
    ):
        stream, file = cluster.measure_stream(), Path(folder, "rows.json")
        command = [sys.executable, "-m", "bench.networks", "--samples", str(samples)]
        command += ["--rank-of", str(file), "--only", name, "--share", str(8 * stream / slowest)]
        cluster.run(command, timeout_secs=900)
        rows = json.loads(file.read_text())
    return [{"network": name, "stream_bytes_per_sec": stream, **row} for row in rows]


def main(words: list[str]) -> int:
    """Run the command, or a rank of it."""
    parser = parser_for("networks", __doc__)
    parser.add_argument(
        "--only", action="append", choices=EMULATED, help="one of the networks (default: all)"
    )
    parser.add_argument(
        "--samples", type=int, default=7, help="of each call (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("bench/results/networks.json"))
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=above_zero, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.rank_of:
        rows = list(measured(EMULATED[args.only[0]], args.share, args.samples))
        if rows and int(os.environ["RANK"]) == 0:
            args.rank_of.write_text(json.dumps(rows))
        return 0
    from tqdm import tqdm

    found: list[dict[str, Any]] = []
    try:
        for name in tqdm(args.only or EMULATED, "networks", leave=False):
            found += on(name, args.samples)
    except ClusterUnavailableError as error:
        print(f"networks: {error}", file=sys.stderr)
        return 2
    print(table(found))
    write({**environment("networks", words), "rows": found}, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
