"""Arguments: the options of the commands, and the layouts, topology and program they describe."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path as FilePath

from rvdcomm import RVD, Layout, LayoutError, Network, Plan, Program, Topology, plan
from rvdcomm.cli.command import UsageError
from rvdcomm.json_file import parse_json, read_bounded
from rvdcomm.layout import CUT_RULES, parse_ranges
from rvdcomm.network import MACHINES, MAX_FILE_BYTES, PRESETS, SHAPES, parse_matrix
from rvdcomm.plans import EXECUTORS
from rvdcomm.program import MAX_CHARS
from rvdcomm.text import quoted
from rvdcomm.units import parse_bytes

DEFAULT_PRESET = "dgx-h100"
MAX_SECS = 1e9
"""Longest time that an option takes, as of ``rvdcomm.timeout``."""

PLAN_ARGUMENTS = (
    *("src", "dst", "shape", "dtype", "src_ranks", "dst_ranks", "cuts"),
    *("hosts", "preset", "topology", "memory_limit"),
)

NOTATION = """\
layouts:
  R(2)V(1)D(1,4)  2 replicas, 1 value part, dim 0 whole, dim 1 cut in 4: 2*1*1*4 = 8 ranks.
                  Value parts sum to the tensor; R is outermost in the order of ranks, the last
                  dim innermost. A scalar is D(), its shape ''.
  'R(1)V(1)D(2) shape(10) ranks(4,5) cuts(0,3,10)'
                  the same with shape, ranks and cut points; it then needs no --shape.
ranks:
  0:4,8           ranks 0, 1, 2, 3 and 8. By default src is on 0, 1, 2, ... and dst on the ranks of
                  src if it needs as many, else on 0, 1, 2, ... too. SRC and DST may need different
                  numbers of ranks, and their ranks may be the same, overlap or be disjoint.
in a printed plan:
  D(2,*4)         dim 1 is cut in strided pieces;  F(4): every piece is cut flat in 4
  2x(0:4)         2 groups of ranks communicate, of which the first is 0:4
"""


def add_transition(parser: argparse.ArgumentParser) -> None:
    """The options of a plan; none has a default, so that an unused one can be refused."""
    tensor = parser.add_argument_group("tensor and ranks")
    tensor.add_argument("--shape", type=_shape, help="global sizes, such as 4096,4096")
    tensor.add_argument("--dtype", help="element type, such as bfloat16 (default float32)")
    tensor.add_argument("--src-ranks", metavar="RANKS", help="ranks of SRC, such as 0:8")
    tensor.add_argument("--dst-ranks", metavar="RANKS", help="ranks of DST, such as 0:4,8:12")
    tensor.add_argument(
        "--cuts", choices=sorted(CUT_RULES), help="where uneven dims are cut (default chunk)"
    )
    cluster = parser.add_argument_group("cluster (default: one host, a port for every rank)")
    cluster.add_argument(
        "--hosts",
        help="2x4: 2 hosts of 4 ranks each; 3x2x4: 3 pods of that; or the ranks of every host, "
        "such as '0:4;4:8'",
    )
    cluster.add_argument(
        "--preset",
        choices=sorted(PRESETS),
        help=f"speed of the links (default with --hosts: {DEFAULT_PRESET})",
    )
    cluster.add_argument(
        "--topology",
        metavar="WHAT",
        help="a file of a topology or a network, or a preset such as ndv2:2 or torus:4x4, as of "
        "'rvdcomm topology'",
    )
    parser.add_argument(
        "--memory-limit",
        metavar="BYTES",
        type=num_bytes,
        help="limit for all buffers of a rank together, such as 64MiB, 1e6 or 4096",
    )
    parser.add_argument(
        "--executor",
        choices=EXECUTORS,
        default="auto",
        help="auto, peer: ranks of one host read each other's memory; dist: all send messages "
        "(default: auto)",
    )


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"(\d{1,19}(,\d{1,19})*)?", text):
        raise argparse.ArgumentTypeError(
            f"cannot parse shape {quoted(text)}: expected sizes such as '4096,4096', or '' for a "
            "scalar"
        )
    return tuple(int(size) for size in text.split(",") if size)


def num_bytes(text: str) -> int:
    """Read a number of bytes, as ``parse_bytes``.

    Raises:
        argparse.ArgumentTypeError: the text has another form.
    """
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_size(text: str) -> int:
    """Read a number of bytes that is above 0; errors as of ``num_bytes``."""
    found = num_bytes(text)
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text} is too little: expected at least 1 byte")
    return found


def parse_secs(text: str) -> float:
    """Read a number of seconds that is above 0 and at most ``MAX_SECS``.

    Raises:
        argparse.ArgumentTypeError: the text has another form.
    """
    try:
        secs = float(text)
    except ValueError:
        secs = 0.0
    if not 0 < secs <= MAX_SECS:
        raise argparse.ArgumentTypeError(
            f"cannot parse seconds {quoted(text)}: expected a number above 0, such as 0.5, and at "
            f"most {MAX_SECS:g}"
        )
    return secs


# --- from arguments to values -------------------------------------------------------------------


def planned(args: argparse.Namespace) -> Plan:
    src, dst = _layouts(args)
    return plan(
        src,
        dst,
        dtype=args.dtype or "float32",
        topology=_topology(args, {*src.ranks, *dst.ranks}),
        memory_limit=args.memory_limit,
        executor=args.executor,
    )


def _layouts(args: argparse.Namespace) -> tuple[Layout, Layout]:
    """Src and dst. The shape that one of the texts names is used for the other too."""
    named = [Layout.parse(text).shape for text in (args.src, args.dst) if _is_full(text)]
    shape = args.shape if args.shape is not None else next(iter(named), None)
    if shape is None:
        raise UsageError(f"{args.src} -> {args.dst} needs a shape, such as --shape 4096,4096.")
    src = _layout(args.src, shape, args.src_ranks, args.cuts, None)
    return src, _layout(args.dst, shape, args.dst_ranks, args.cuts, src.ranks)


def _layout(
    text: str,
    shape: tuple[int, ...],
    ranks: str | None,
    cuts: str | None,
    default_ranks: tuple[int, ...] | None,
) -> Layout:
    if _is_full(text):
        layout = Layout.parse(text)
        if layout.shape != shape or ranks is not None or cuts is not None:
            raise UsageError(
                f"{text!r} names its own shape, ranks and cuts; leave out --shape, --cuts and the "
                "option for its ranks, or write the counts alone."
            )
        return layout
    rvd = RVD(text)
    given = None if ranks is None else parse_ranges(ranks)
    if given is None and default_ranks is not None and len(default_ranks) == rvd.num_ranks:
        given = default_ranks
    return Layout(shape, rvd, given, cuts or "chunk")


def _is_full(text: str) -> bool:
    return "shape(" in text


def _topology(args: argparse.Namespace, ranks: set[int]) -> Topology | Network | None:
    if args.topology:
        if args.hosts or args.preset:
            raise UsageError(
                "--topology already describes the hosts and links; leave out --hosts, --preset."
            )
        return named_network(args.topology)
    if not args.hosts and not args.preset:
        return None
    preset = args.preset or DEFAULT_PRESET
    if args.hosts and re.fullmatch(r"\d{1,9}(x\d{1,9})+", args.hosts):
        return Topology.preset(preset, *map(int, args.hosts.split("x")))
    intra, inter = PRESETS[preset].links[:2]
    return Topology.hosts(_hosts(args.hosts) if args.hosts else [ranks], intra, inter)


def named_network(what: str, nvlink: int | None = None) -> Network:
    """The network of a preset with its counts, as ``torus:4x4``, of a file, or of stdin (``-``).

    Raises:
        UsageError: there is no such preset and no such file.
        LayoutError: the preset has no such counts, or the file is no network.
    """
    known = {*MACHINES, *PRESETS, *SHAPES}
    name, _, counts = what.partition(":")
    if name in known and re.fullmatch(r"(\d{1,6}(x\d{1,6}){0,3})?", counts):
        return Network.preset(name, *(int(count) for count in counts.split("x") if count))
    if what != "-" and not FilePath(what).exists():
        raise UsageError(
            f"No such file: {what!r}; it is no preset either, which are "
            f"{', '.join(sorted(known))}, with counts such as ndv2:2 or torus:4x4."
        )
    try:
        if what == "-":
            data = sys.stdin.buffer.read(MAX_FILE_BYTES)
        else:
            data = read_bounded(what, MAX_FILE_BYTES)
        if data.lstrip()[:1] in (b"{", b"["):
            return Network.from_json(parse_json(data))
        text = data.decode("utf-8", errors="replace")
        return parse_matrix(text, nvlink) if "GPU0" in text else Network.parse(text)
    except LayoutError as error:
        raise LayoutError(f"{what} is not a network: {str(error).rstrip('.')}.") from None


def _hosts(text: str) -> Iterable[Iterable[int]]:
    return [parse_ranges(host) for host in text.split(";")]


def program_of(args: argparse.Namespace) -> Program:
    """The program of ``--program-file``, or of the plan from SRC to DST."""
    if args.program_file is None:
        if args.src is None or args.dst is None:
            raise UsageError("verify needs SRC and DST, or --program-file FILE.")
        return planned(args).program
    given = [name for name in PLAN_ARGUMENTS if getattr(args, name) is not None]
    if given:
        raise UsageError(f"--program-file names the whole program; leave out {', '.join(given)}.")
    if args.program_file == "-":
        # One character more than is accepted: a longer input is then refused, not cut.
        text = sys.stdin.read(MAX_CHARS + 1)
    else:
        try:
            text = read_bounded(args.program_file, MAX_CHARS).decode("utf-8")
        except (LayoutError, UnicodeError) as error:
            raise UsageError(f"--program-file {args.program_file}: {error}.") from None
    if not text.strip():
        raise UsageError(
            f"--program-file {args.program_file} is empty; 'rvdcomm plan ... --program' prints a "
            "program."
        )
    return Program.parse(text)
