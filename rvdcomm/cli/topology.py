"""``rvdcomm topology``: print or draw a network, and the best that any plan can do on it."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rvdcomm import Layout, Link, Network
from rvdcomm.cli.arguments import parse_size
from rvdcomm.cli.command import OK, Command, UsageError
from rvdcomm.cli.report import print_json
from rvdcomm.cost import flow_bound
from rvdcomm.json_file import read_bounded
from rvdcomm.network import DEFAULT_LINK, MACHINES, MAX_FILE_BYTES, PRESETS, SHAPES, parse_matrix
from rvdcomm.picture import draw
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
        draw(network, args.picture)
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
        for line in _bounds(network, args.size):
            print(f"  {line}")
    for file in filter(None, (args.save, args.picture)):
        print(f"wrote  {file}")
    return OK


def _bounds(network: Network, num_bytes: int) -> Iterator[str]:
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


def _network(args: argparse.Namespace) -> Network:
    """The preset or the file that WHAT names."""
    known = {*MACHINES, *PRESETS, *SHAPES}
    if args.what in known:
        if args.nvlink is not None:
            raise UsageError(f"--nvlink is for the output of nvidia-smi; {args.what} is a preset.")
        counts = [int(count) for count in args.counts.split("x")] if args.counts else []
        return Network.preset(args.what, *counts, link=args.link or DEFAULT_LINK)
    if args.counts or args.link:
        raise UsageError(
            f"--counts and --link are for presets, and {args.what!r} is none; the presets are "
            f"{', '.join(sorted(known))}."
        )
    if args.what == "-":
        data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
    elif not Path(args.what).exists():
        raise UsageError(
            f"{args.what!r} is no file and no preset; the presets are {', '.join(sorted(known))}."
        )
    else:
        data = read_bounded(args.what, MAX_FILE_BYTES)
    return _read(args, data)


def _read(args: argparse.Namespace, data: bytes) -> Network:
    """A network from JSON, from the notation, or from the matrix of nvidia-smi."""
    if data.lstrip()[:1] == b"{":
        if args.what == "-":
            raise UsageError("a network in JSON is read from a file; name it in place of -.")
        return Network.load(args.what)
    text = data.decode("utf-8", errors="replace")
    if "GPU0" in text:
        return parse_matrix(text, args.nvlink)
    return Network.parse(text)


def _counts(text: str) -> str:
    if not re.fullmatch(r"\d{1,6}(x\d{1,6}){0,3}", text):
        raise argparse.ArgumentTypeError(f"cannot parse counts {text!r}: expected 2 or 4x4")
    return text


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
        help="a preset, or a file: JSON of Network.save or Topology.save, lines as this command "
        "prints them, or what 'nvidia-smi topo -m' prints; - is stdin",
    )
    parser.add_argument(
        "--counts",
        type=_counts,
        help="hosts of a machine (2), or ranks along each dim of a shape (4x4)",
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
    parser.add_argument("--json", action="store_true", help="print the network as JSON")
    parser.add_argument("--save", metavar="FILE", help="write it as JSON, for Network.load")
    parser.add_argument("--picture", metavar="FILE", help="draw it, as .svg or .png")


COMMAND = Command(
    "print or draw a network, and how fast collectives can be on it at best",
    f"""presets:
  machines  {", ".join(sorted(MACHINES))}
  levels    {", ".join(sorted(PRESETS))}
  shapes    {", ".join(sorted(SHAPES))}

examples:
  Two hosts of 8 V100s as in Azure's NDv2:
    rvdcomm topology ndv2 --counts 2 --picture ndv2.png
  A torus of 16 ranks:
    rvdcomm topology torus --counts 4x4 --link 1e-6,1GB/s
  This machine:
    nvidia-smi topo -m | rvdcomm topology -
""",
    _add_topology,
    _topology,
)
"""The command."""
