"""Command line: ``rvdcomm plan``, ``rvdcomm verify`` and ``rvdcomm bench``."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from math import isfinite
from pathlib import Path as FilePath
from typing import Any, NoReturn

from rvdcomm.errors import LayoutError, ProgramError
from rvdcomm.layout import CUT_RULES, Layout, parse_ranges
from rvdcomm.picture import PictureError, draw
from rvdcomm.planner import Plan, plan
from rvdcomm.program import Program
from rvdcomm.rvd import RVD
from rvdcomm.topology import PRESETS, Topology, blocks
from rvdcomm.verify import verify

OK, NOT_PROVED, BAD_REQUEST = 0, 1, 2
"""Exit statuses."""

DEFAULT_PRESET = "h100"
BYTE_UNITS = {"": 1, "B": 1} | {
    prefix + infix + "B": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}

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
"""


class UsageError(ValueError):
    """The command line asks for something that does not exist."""


@dataclass(frozen=True)
class Command:
    """One sub-command."""

    summary: str
    examples: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status: 0, 1 (not proved) or 2 (bad request).

    >>> main(["verify", "R(1)V(2)D(1)", "R(2)V(1)D(1)", "--shape", "6"])  # doctest: +ELLIPSIS
    R(1)V(2)D(1) -> R(2)V(1)D(1)  6 float32 on 2 ranks
    proved   ...
    0
    """
    words = list(sys.argv[1:] if argv is None else argv)
    # What follows `bench` is the benchmark's own; argparse would take its options for ours.
    num_own = 1 if words[:1] == ["bench"] and words[1:] not in (["-h"], ["--help"]) else len(words)
    try:
        args = _parser().parse_args(words[:num_own])
        args.passed_on = words[num_own:]
        status = COMMANDS[args.command].run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader, such as `head`, has all that it wants; what is left goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (UsageError, LayoutError, PictureError, OSError) as error:
        print(f"rvdcomm: error: {error}", file=sys.stderr)
        return BAD_REQUEST


# --- commands -----------------------------------------------------------------------------------


def _plan(args: argparse.Namespace) -> int:
    """Plan a transition and print it in one of three forms."""
    found = _planned(args)
    if args.picture:
        draw(found, args.picture)
    if args.json:
        _print_json(plan_json(found))
    elif args.program:
        print(found.program, end="")
    else:
        print(found)
        if args.picture:
            print(f"wrote  {args.picture}")
    return OK


def _verify(args: argparse.Namespace) -> int:
    """Prove a program, planned here or read from a file."""
    try:
        program = _program_of(args)
        verify(program)
    except ProgramError as error:
        if args.json:
            _print_json({"proved": False, "error": str(error)})
        print(f"rvdcomm: not proved: {error}", file=sys.stderr)
        return NOT_PROVED
    counts = program_counts(program)
    if args.json:
        _print_json({"proved": True, **_transition_json(program), **counts})
        return OK
    shape = "x".join(map(str, program.src.shape)) or "scalar"
    print(
        f"{program.src.rvd} -> {program.dst.rvd}  {shape} {program.dtype} on {counts['ranks']} ranks\n"
        "proved   every element of every dst shard is written once, with every value part once;\n"
        "         nothing is read before it is written, src is not written, replicas are equal;\n"
        "         in every collective groups ascend, sizes agree and runs are contiguous;\n"
        "         one order of collectives for all ranks, so that none waits for another forever\n"
        f"checked  {counts['instructions']} instructions, {counts['collectives']} collectives, "
        f"{counts['messages']} messages, {counts['elements']} elements between ranks"
    )
    return OK


def _bench(args: argparse.Namespace) -> int:
    """Run the benchmark of the source tree that this package lies in."""
    root = FilePath(__file__).resolve().parent.parent
    if not (root / "bench" / "run.py").exists():
        raise UsageError(
            "the benchmark is part of the repository and not of the installed package; "
            "run 'make bench' in a clone of the repository."
        )
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "bench.run", *args.passed_on]
    return subprocess.run(command, env=environment, check=False).returncode


# --- arguments ----------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see '{self.prog} --help')")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=98)


def _parser() -> _Parser:
    parser = _Parser(
        prog="rvdcomm",
        description="Plan, prove and run the cheapest communication between two layouts of a "
        "distributed tensor.",
        epilog="example:\n  rvdcomm plan 'R(1)V(1)D(1,8)' 'R(1)V(1)D(8,1)' --shape 4096,4096 "
        f"--hosts 2x4\n\n{NOTATION}",
        formatter_class=_Formatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.summary,
            description=command.summary[0].upper() + command.summary[1:] + ".",
            epilog=command.examples,
            formatter_class=_Formatter,
        )
        command.add_arguments(sub)
    return parser


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", help="the layout that the tensor has")
    parser.add_argument("dst", metavar="DST", help="the layout that it gets")
    _add_transition(parser)
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print one JSON object")
    forms.add_argument("--program", action="store_true", help="print the program, for 'verify'")
    parser.add_argument(
        "--picture", metavar="FILE", help="draw who sends what to whom, as .svg or .png"
    )


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", nargs="?", help="the layout that the tensor has")
    parser.add_argument("dst", metavar="DST", nargs="?", help="the layout that it gets")
    parser.add_argument(
        "--program-file", metavar="FILE", help="a program as 'plan --program' prints it; - is stdin"
    )
    _add_transition(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", metavar="ARGS", nargs="*", help="passed on to 'bench.run'")


def _add_transition(parser: argparse.ArgumentParser) -> None:
    """Options that say which plan; none has a default, so that a useless one can be refused."""
    tensor = parser.add_argument_group("tensor and ranks")
    tensor.add_argument("--shape", type=_shape, help="global sizes, such as 4096,4096")
    tensor.add_argument("--dtype", help="element type (default float32)")
    tensor.add_argument("--src-ranks", metavar="RANKS", help="ranks of SRC, such as 0:8")
    tensor.add_argument("--dst-ranks", metavar="RANKS", help="ranks of DST, such as 0:4,8:12")
    tensor.add_argument(
        "--cuts", choices=sorted(CUT_RULES), help="where uneven dims are cut (default chunk)"
    )
    cluster = parser.add_argument_group("cluster (default: one host, a port for every rank)")
    cluster.add_argument(
        "--hosts", help="2x4: 2 hosts of 4 ranks each; or their ranks, such as '0:4;4:8'"
    )
    cluster.add_argument(
        "--preset",
        choices=sorted(PRESETS),
        help=f"speed of the links (default with --hosts: {DEFAULT_PRESET})",
    )
    cluster.add_argument("--topology", metavar="FILE", help="a JSON that Topology.save wrote")
    parser.add_argument(
        "--memory-limit",
        metavar="BYTES",
        type=parse_bytes,
        help="most that a rank's buffers may take together, such as 64MiB, 1e6 or 4096",
    )


PLAN_ARGUMENTS = (
    *("src", "dst", "shape", "dtype", "src_ranks", "dst_ranks", "cuts"),
    *("hosts", "preset", "topology", "memory_limit"),
)

COMMANDS = {
    "plan": Command(
        "print the cheapest plan from layout SRC to layout DST",
        f"""{NOTATION}
examples:
  Columns become rows on 2 hosts of 4 ranks; draw it, too:
    rvdcomm plan 'R(1)V(1)D(1,8)' 'R(1)V(1)D(8,1)' --shape 4096,4096 --hosts 2x4 --picture plan.svg
  From 4 ranks to 6 others, within a memory limit:
    rvdcomm plan 'R(1)V(1)D(4)' 'R(1)V(1)D(6)' --shape 1000 --dst-ranks 4:10 --memory-limit 64KiB
  Prove what was planned:
    rvdcomm plan 'R(1)V(4)D(1)' 'R(4)V(1)D(1)' --shape 64 --program | rvdcomm verify --program-file -
""",
        _add_plan,
        _plan,
    ),
    "verify": Command(
        "prove by symbolic execution over all ranks that a program is right (exit 1 if not)",
        f"""{NOTATION}
examples:
  Plan and prove:
    rvdcomm verify 'R(2)V(4)D(1,1)' 'R(2)V(1)D(4,1)' --shape 64,64 --hosts 2x4
  Prove a program that 'rvdcomm plan ... --program' printed:
    rvdcomm verify --program-file program.txt
""",
        _add_verify,
        _verify,
    ),
    "bench": Command(
        "run the repository's benchmark ('python -m bench.run ARGS') from its source tree",
        """examples:
  The benchmark's own options:
    rvdcomm bench -- --help
""",
        _add_bench,
        _bench,
    ),
}


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"(\d+(,\d+)*)?", text):
        raise argparse.ArgumentTypeError(
            f"cannot parse shape {text!r}: expected sizes such as '4096,4096', or '' for a scalar"
        )
    return tuple(int(size) for size in text.split(",") if size)


def parse_bytes(text: str) -> int:
    """Read a number of bytes.

    >>> parse_bytes("64MiB"), parse_bytes("1.5 KB"), parse_bytes("1e6"), parse_bytes("4096")
    (67108864, 1500, 1000000, 4096)

    Raises:
        argparse.ArgumentTypeError: the text has another form.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?) ?([A-Za-z]*)", text.strip())
    units = {unit.lower(): size for unit, size in BYTE_UNITS.items()}
    if found is None or found[2].lower() not in units:
        raise argparse.ArgumentTypeError(
            f"cannot parse bytes {text!r}: expected a form such as '64MiB', '1e6' or '4096'"
        )
    return int(Fraction(found[1]) * units[found[2].lower()])


# --- from arguments to values -------------------------------------------------------------------


def _planned(args: argparse.Namespace) -> Plan:
    src, dst = _layouts(args)
    return plan(
        src,
        dst,
        dtype=args.dtype or "float32",
        topology=_topology(args, {*src.ranks, *dst.ranks}),
        memory_limit=args.memory_limit,
    )


def _layouts(args: argparse.Namespace) -> tuple[Layout, Layout]:
    """Src and dst. A shape that one of the texts names holds for the other, too."""
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


def _topology(args: argparse.Namespace, ranks: set[int]) -> Topology | None:
    if args.topology:
        if args.hosts or args.preset:
            raise UsageError("--topology already says which hosts there are and how fast.")
        return Topology.load(args.topology)
    if not args.hosts and not args.preset:
        return None
    intra, inter = PRESETS[args.preset or DEFAULT_PRESET]
    return Topology.hosts(_hosts(args.hosts) if args.hosts else [ranks], intra, inter)


def _hosts(text: str) -> Iterable[Iterable[int]]:
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if found is not None:
        return blocks(int(found[1]), int(found[2]))
    return [parse_ranges(host) for host in text.split(";")]


def _program_of(args: argparse.Namespace) -> Program:
    """The program of ``--program-file``, or of the plan from SRC to DST."""
    if args.program_file is None:
        if args.src is None or args.dst is None:
            raise UsageError("verify needs SRC and DST, or --program-file FILE.")
        return _planned(args).program
    given = [name for name in PLAN_ARGUMENTS if getattr(args, name) is not None]
    if given:
        raise UsageError(f"--program-file says all; leave out {', '.join(given)}.")
    if args.program_file == "-":
        return Program.parse(sys.stdin.read())
    return Program.parse(FilePath(args.program_file).read_text(encoding="utf-8"))


# --- JSON ---------------------------------------------------------------------------------------


def plan_json(found: Plan) -> dict[str, Any]:
    """The plan as JSON values; an infinite gap is null."""
    steps = [
        {
            "kind": step.kind,
            "groups": step.groups,
            "state": step.dst.text,
            "ranks": step.dst.placement.ranks,
            "num_slices": step.num_slices,
            "cost": {**asdict(cost), "recv_bytes": max(cost.recv_bytes.values(), default=0)},
        }
        for step, cost in zip(found.path.steps, found.step_costs, strict=True)
    ]
    return {
        **_transition_json(found.program),
        "steps": steps,
        "cost": asdict(found.cost),
        "bound": asdict(found.bound),
        "gap": found.gap if isfinite(found.gap) else None,
    }


def _transition_json(program: Program) -> dict[str, Any]:
    src, dst = program.src, program.dst
    return {"src": str(src), "dst": str(dst), "shape": src.shape, "dtype": program.dtype}


def program_counts(program: Program) -> dict[str, int]:
    """How much there is in a program; messages are those between different ranks."""
    sizes = [size for found in program.collectives for size in found.traffic().values()]
    return {
        "ranks": len(program.ranks),
        "instructions": len(program.instructions),
        "collectives": len(program.collectives),
        "messages": len(sizes),
        "elements": sum(sizes),
    }


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=1, allow_nan=False))
