"""``rvdcomm plan``: print, draw or write out a plan between two layouts."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from rvdcomm import Layout, Plan, best_ranks, plan
from rvdcomm.cli.arguments import NOTATION, add_transition, planned
from rvdcomm.cli.command import OK, Command
from rvdcomm.cli.report import plan_json, print_json
from rvdcomm.layout import ranges_text
from rvdcomm.picture import draw
from rvdcomm.units import bytes_text, secs_text


def _plan(args: argparse.Namespace) -> int:
    """Plan a transition and print it in one of three forms."""
    given = found = planned(args)
    if args.relabel:
        found = _relabelled(given, args.memory_limit)
    if args.picture:
        draw(found, args.picture)
    if args.json:
        print_json(plan_json(found) | (_saving_json(given, found) if args.relabel else {}))
    elif args.program:
        print(found.program, end="")
    else:
        print(found)
        if args.relabel:
            print(_saving_text(given, found, args.dst))
        if args.picture:
            print(f"wrote  {args.picture}")
    return OK


def _relabelled(given: Plan, memory_limit: int | None) -> Plan:
    """The plan to the same cells on the same dst ranks, in the order of ``best_ranks``."""
    dst = given.dst
    ranks = best_ranks(given.src, dst.rvd, given.topology, ranks=dst.ranks, cuts=dst.cuts)
    relabelled = Layout(dst.shape, dst.rvd, ranks, dst.cuts)
    request = given.src, relabelled, given.dtype, given.topology, memory_limit
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
""",
    _add_plan,
    _plan,
)
