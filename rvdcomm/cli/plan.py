"""``rvdcomm plan``: print, draw or write out the cheapest plan between two layouts."""

from __future__ import annotations

import argparse

from rvdcomm.cli.arguments import NOTATION, add_transition, planned
from rvdcomm.cli.command import OK, Command
from rvdcomm.cli.report import plan_json, print_json
from rvdcomm.picture import draw


def _plan(args: argparse.Namespace) -> int:
    """Plan a transition and print it in one of three forms."""
    found = planned(args)
    if args.picture:
        draw(found, args.picture)
    if args.json:
        print_json(plan_json(found))
    elif args.program:
        print(found.program, end="")
    else:
        print(found)
        if args.picture:
            print(f"wrote  {args.picture}")
    return OK


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", help="the layout that the tensor has")
    parser.add_argument("dst", metavar="DST", help="the layout that it gets")
    add_transition(parser)
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print one JSON object")
    forms.add_argument("--program", action="store_true", help="print the program, for 'verify'")
    parser.add_argument(
        "--picture", metavar="FILE", help="draw who sends what to whom, as .svg or .png"
    )


COMMAND = Command(
    "print the cheapest plan from layout SRC to layout DST",
    f"""{NOTATION}
examples:
  Columns become rows on 2 hosts of 4 ranks; draw it, too:
    rvdcomm plan 'R(1)V(1)D(1,8)' 'R(1)V(1)D(8,1)' --shape 4096,4096 --hosts 2x4 --picture plan.svg
  From 4 ranks to 6 others, within a memory limit:
    rvdcomm plan 'R(1)V(1)D(4)' 'R(1)V(1)D(6)' --shape 1000 --dst-ranks 4:10 --memory-limit 64KiB
  Prove what was planned:
    rvdcomm plan 'R(1)V(4)D(1)' 'R(4)V(1)D(1)' --shape 64 --program > program.txt
    rvdcomm verify --program-file program.txt
""",
    _add_plan,
    _plan,
)
