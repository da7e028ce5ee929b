"""``rvdcomm plan``: print, draw or write out a plan between two layouts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import asdict

from rvdcomm import Layout, Plan, best_ranks, plan
from rvdcomm.cli.arguments import NOTATION, add_transition, planned
from rvdcomm.cli.command import OK, Command
from rvdcomm.cli.report import plan_json, print_json
from rvdcomm.exports import msccl_xml, schedule_of
from rvdcomm.json_file import write_json
from rvdcomm.layout import ranges_text
from rvdcomm.picture import draw
from rvdcomm.units import bytes_text, secs_text
from rvdcomm.whole_file import write_whole


def _plan(args: argparse.Namespace) -> int:
    """Plan a transition and print it in one of three forms."""
    given = found = planned(args)
    if args.relabel:
        found = _relabelled(given, args.memory_limit)
    written = [name for name in WRITERS if getattr(args, name)]
    for name in written:
        WRITERS[name](found, getattr(args, name))
    if args.json:
        print_json(plan_json(found) | (_saving_json(given, found) if args.relabel else {}))
    elif args.program:
        print(found.program, end="")
    else:
        print(found)
        if args.relabel:
            print(_saving_text(given, found, args.dst))
        for name in written:
            print(f"wrote  {getattr(args, name)}")
    return OK


def _write_schedule(made: Plan, path: str) -> None:
    write_json(path, schedule_of(made.program).to_json())


def _write_msccl(made: Plan, path: str) -> None:
    write_whole(path, msccl_xml(schedule_of(made.program)))


WRITERS: Mapping[str, Callable[[Plan, str], None]] = {
    "picture": draw,
    "save": Plan.save,
    "schedule": _write_schedule,
    "msccl": _write_msccl,
}
"""What writes the file that an option names."""


def _relabelled(given: Plan, memory_limit: int | None) -> Plan:
    """The plan to the same cells on the same dst ranks, in the order of ``best_ranks``."""
    dst = given.dst
    ranks = best_ranks(given.src, dst.rvd, given.links, ranks=dst.ranks, cuts=dst.cuts)
    relabelled = Layout(dst.shape, dst.rvd, ranks, dst.cuts)
    request = given.src, relabelled, given.dtype, given.links, memory_limit
    return plan(*request, executor=given.executor)


def _saving_text(given: Plan, found: Plan, dst_text: str) -> str:
    """What relabelling saves, and the option that asks for it."""
    before, after = given.cost, found.cost
    # A full layout takes no option for its ranks.
    is_full = "shape(" in dst_text
    how = f"{found.dst}" if is_full else f"--dst-ranks {ranges_text(found.dst.ranks)}"
    return (
        f"saves  {bytes_text(before.wire_bytes)} -> {bytes_text(after.wire_bytes)} on the wire "
        f"({bytes_text(before.host_bytes)} -> {bytes_text(after.host_bytes)} between hosts), "
        f"{secs_text(before.secs)} -> {secs_text(after.secs)}\n"
        f"by     {how}"
    )


def _saving_json(given: Plan, found: Plan) -> dict[str, object]:
    ranks = ranges_text(found.dst.ranks)
    return {"relabelled": {"dst_ranks": ranks, "cost_before": asdict(given.cost)}}


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", help="the layout that the tensor has")
    parser.add_argument("dst", metavar="DST", help="the layout that it is to get")
    add_transition(parser)
    parser.add_argument(
        "--relabel",
        action="store_true",
        help="reorder the ranks of DST so that fewer bytes move, and report what it saves",
    )
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print one JSON object")
    forms.add_argument("--program", action="store_true", help="print the program, for 'verify'")
    parser.add_argument(
        "--picture",
        metavar="FILE",
        help="draw who sends what to whom, as .svg or .png (needs matplotlib)",
    )
    parser.add_argument(
        "--save", metavar="FILE", help="write the plan, which rvdcomm.load_plan reads"
    )
    parser.add_argument(
        "--schedule",
        metavar="FILE",
        help="write what is sent and summed in which round, as JSON for other programs",
    )
    parser.add_argument(
        "--msccl",
        metavar="FILE",
        help="write the XML that the runtime of MSCCL reads: all-gather, reduce-scatter, "
        "all-reduce and all-to-all in equal chunks",
    )


COMMAND = Command(
    "search for a low-cost plan from SRC to DST and report its gap to a lower bound",
    f"""{NOTATION}
examples:
  Columns become rows on 2 hosts of 4 ranks; draw it, too:
    rvdcomm plan 'R(1)V(1)D(1,8)' 'R(1)V(1)D(8,1)' --shape 4096,4096 --hosts 2x4 --picture plan.svg
  From 4 ranks to 6 others, within a memory limit:
    rvdcomm plan 'R(1)V(1)D(4)' 'R(1)V(1)D(6)' --shape 1000 --dst-ranks 4:10 --memory-limit 64KiB
  See what another order of the ranks of DST saves:
    rvdcomm plan 'R(1)V(1)D(1,8)' 'R(2)V(1)D(2,2)' --shape 4096,4096 --hosts 2x4 --relabel
  Prove what was planned:
    rvdcomm plan 'R(1)V(4)D(1)' 'R(4)V(1)D(1)' --shape 64 --program > program.txt
    rvdcomm verify --program-file program.txt
  Hand the rounds to another program, and prove that what it got is right:
    rvdcomm plan 'R(1)V(8)D(1)' 'R(8)V(1)D(1)' --shape 64 --topology dgx-1 --schedule rounds.json
    rvdcomm verify --schedule rounds.json
""",
    _add_plan,
    _plan,
)
