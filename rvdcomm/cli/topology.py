"""``rvdcomm topology``: print or draw a network, and the best that any plan can do on it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from rvdcomm import Layout, Link, Network
from rvdcomm.cli.arguments import named_network, parse_size
from rvdcomm.cli.command import OK, Command, UsageError
from rvdcomm.cli.report import print_json
from rvdcomm.cost import flow_bound
from rvdcomm.network import MACHINES, PRESETS, SHAPES
from rvdcomm.picture import draw
from rvdcomm.synthesis import Forest, forest_of
from rvdcomm.units import bytes_text, parse_bytes, secs_text

MAX_BOUND_RANKS = 256
"""Bounds of more ranks take minutes."""

COLLECTIVES = {
    "all-gather": ("R(1)V(1)D({n})", "R({n})V(1)D(1)"),
    "reduce-scatter": ("R(1)V({n})D(1)", "R(1)V(1)D({n})"),
    "all-reduce": ("R(1)V({n})D(1)", "R({n})V(1)D(1)"),
}


def _topology(args: argparse.Namespace) -> int:
    """Print a network, its counts and the best times on it."""
    network = _network(args)
    if args.picture:
        draw(_gathering(network) if args.trees else network, args.picture)
    if args.save:
        network.save(args.save)
    if args.json:
        print_json(network.to_json())
        return OK
    print(network)
    num_switches = len(network.switches)
    print(f"\n{len(network.ranks)} ranks, {num_switches} switches, {len(network.wires)} wires")
    if 1 < len(network.ranks) <= MAX_BOUND_RANKS:
        print(f"no plan is faster, latencies aside, for {bytes_text(args.size)}:")
        for line in _bounds(network, args.size, args.trees):
            print(f"  {line}")
    for file in filter(None, (args.save, args.picture)):
        print(f"wrote  {file}")
    return OK


def _gathering(network: Network) -> Forest:
    """Trees of an all-gather."""
    count = len(network.ranks)
    texts = COLLECTIVES["all-gather"]
    src, dst = (Layout((count << 20,), text.format(n=count), network.ranks) for text in texts)
    return forest_of(src, dst, network)


def _bounds(network: Network, num_bytes: int, trees: bool) -> Iterator[str]:
    count = len(network.ranks)
    # A whole number of equal shards, each large enough that a byte more or less is not seen.
    num_elements = count << 20
    for name, texts in COLLECTIVES.items():
        src, dst = (Layout((num_elements,), text.format(n=count), network.ranks) for text in texts)
        bound = flow_bound(src, dst, 1, network)
        if bound.secs:
            secs = bound.secs / num_elements * num_bytes
            rate = num_elements / bound.secs / 1e9
            yield f"{name:<15} {secs_text(secs):>9}  {rate:8.4g} GB/s  {bound.why}"
            if trees:
                forest = forest_of(src, dst, network)
                share = bound.secs / forest.secs
                # Few digits, because solvers of linear programs differ in the others.
                yield f"  {'trees':<23}  {rate * share:8.3g} GB/s  {share:.2f} of it"


def _network(args: argparse.Namespace) -> Network:
    """The preset or the file that WHAT names."""
    name, _, counts = args.what.partition(":")
    if args.link is not None:
        if name not in SHAPES or not counts:
            raise UsageError(f"--link is for a shape, as torus:4x4; {args.what!r} is none.")
        return Network.preset(name, *map(int, counts.split("x")), link=args.link)
    return named_network(args.what, args.nvlink)


def _link(text: str) -> Link:
    found = re.fullmatch(r"([0-9.eE+-]{1,24}),(.{1,24})/s", text)
    try:
        if found is None:
            raise ValueError(text)
        return Link(float(found[1]), float(parse_bytes(found[2])))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"cannot parse link {text!r}: expected seconds a message and a rate, as 3e-6,25GB/s"
        ) from None


def _add_topology(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        metavar="WHAT",
        help="a preset, as ndv2:2 (hosts) or torus:4x4 (ranks along each dim); or a file: JSON of "
        "Network.save or Topology.save, lines as this command prints them, or what 'nvidia-smi "
        "topo -m' prints; - is stdin",
    )
    parser.add_argument(
        "--link", type=_link, help="wires of a shape, as 3e-6,25GB/s: seconds a message, rate"
    )
    parser.add_argument(
        "--nvlink",
        type=int,
        metavar="GENERATION",
        help="of a matrix of nvidia-smi: 1 P100, 2 V100, 3 A100, 4 H100, 5 B200 (default: by the "
        "number of links)",
    )
    parser.add_argument(
        "--size", type=parse_size, default=1 << 30, help="bytes of the whole tensor (default 1GiB)"
    )
    parser.add_argument(
        "--trees", action="store_true", help="pack trees, and say how near they come"
    )
    parser.add_argument("--json", action="store_true", help="print the network as JSON")
    parser.add_argument("--save", metavar="FILE", help="write it as JSON, for Network.load")
    parser.add_argument(
        "--picture",
        metavar="FILE",
        help="draw it, or with --trees some trees of an all-gather, as .svg or .png",
    )


COMMAND = Command(
    "print or draw a network, and how fast collectives can be on it at best",
    f"""presets:
  machines  {", ".join(sorted(MACHINES))}
  levels    {", ".join(sorted(PRESETS))}
  shapes    {", ".join(sorted(SHAPES))}

examples:
  Two hosts of 8 V100s as in Azure's NDv2:
    rvdcomm topology ndv2:2 --picture ndv2.png
  A torus of 16 ranks, and what trees reach on it:
    rvdcomm topology torus:4x4 --link 1e-6,1GB/s --trees
  This machine:
    nvidia-smi topo -m | rvdcomm topology -
""",
    _add_topology,
    _topology,
)
"""The command."""
