"""``superscaler schedule``: the grids of schedules, and their bubbles."""

from __future__ import annotations

import argparse
from fractions import Fraction
from functools import partial
from inspect import signature

from rvdcomm.cli import OK, Command
from superscaler_core.cli.arguments import count
from superscaler_core.schedules import SCHEDULES, ActionKind, Timeline, generate, grid, timeline
from superscaler_core.schedules.timeline import Time
from superscaler_core.simulator import draw_grids


def _schedule(args: argparse.Namespace) -> int:
    found = [_timeline(name, args) for name in args.names]
    if args.text:
        print("\n\n".join(str(times.schedule) for times in found))
    elif args.picture is not None:
        draw_grids(found, args.picture)
        print(f"wrote {args.picture}")
    else:
        print("\n\n".join(f"{grid(times)}\n{_bubbles(times)}" for times in found))
    return OK


def _timeline(name: str, args: argparse.Namespace) -> Timeline:
    generator = SCHEDULES[name]
    takes = signature(generator).parameters
    options = {"durations": args.times} if "durations" in takes else {}
    schedule = generate(
        partial(generator, **options), args.workers, args.microbatches,
        chunks=args.chunks if "chunks" in takes else 1, halves=args.halves, apart=args.apart,
    )  # fmt: skip
    # Times are for 1/D of the model; if it has more stages, each takes proportionally less.
    share = Fraction(args.workers, schedule.num_stages)
    return timeline(schedule, {kind: secs * share for kind, secs in args.times.items()})


def _bubbles(times: Timeline) -> str:
    return (
        f"bubble: {times.bubble_of_makespan} of the makespan, {times.bubble_of_ideal} of the busy "
        f"time, {times.bubble_of_span} of the longest span"
    )


_TIMED = frozenset(ActionKind) - {ActionKind.UPDATE}


def _times(text: str) -> dict[str, Time]:
    """Parse ``F=1,B=2``; B defaults to I + W, and I and W each default to half of B."""
    try:
        pairs = (word.split("=") for word in text.split(","))
        said: dict[str, Time] = {kind.strip(): Fraction(secs) for kind, secs in pairs}
    except (ValueError, ZeroDivisionError):
        words = f"expected times such as F=1,I=1,W=1, got {text!r}"
        raise argparse.ArgumentTypeError(words) from None
    if odd := [name for name in said if not set(name.split("&")) <= _TIMED]:
        words = f"{odd[0]!r} has no time; times are of {', '.join(sorted(_TIMED))}, and of pairs"
        raise argparse.ArgumentTypeError(f"{words} such as F&B")
    forward = said.get("F", 1)
    whole = said.get("B", said.get("I", forward) + said.get("W", forward))
    half = Fraction(whole) / 2
    return {"F": forward, "f": forward, "R": forward, "B": whole, "I": half, "W": half} | said


def _add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", metavar="NAME", nargs="+", choices=SCHEDULES, help=", ".join(SCHEDULES)
    )
    parser.add_argument("--workers", metavar="D", type=count, default=4, help="(default 4)")
    parser.add_argument("--microbatches", metavar="N", type=count, default=8, help="(default 8)")
    parser.add_argument(
        "--chunks", metavar="V", type=count, default=2,
        help="stages a worker, of interleaved and looped-bfs (default 2)",
    )  # fmt: skip
    parser.add_argument("--halves", action="store_true", help="run every backward as I and W")
    parser.add_argument("--apart", action="store_true", help="run every recomputation as R")
    parser.add_argument(
        "--times", metavar="KIND=TIME,...", type=_times, default="F=1,B=2",
        help="times of 1/D of the model: of F, of B or of I and W, and of a pair F&B, which runs "
        "one after the other if this is not given (default F=1,B=2)",
    )  # fmt: skip
    parser.add_argument("--text", action="store_true", help="print the rows, as a text to edit")
    parser.add_argument("--picture", metavar="FILE", help="draw them, as .png or .svg")


COMMAND = Command(
    "show the grids of schedules, and their bubbles",
    """examples:
  superscaler schedule 1f1b zero-bubble --workers 4 --microbatches 8
  superscaler schedule dualpipe --times 'F=1,B=2,F&B=2' --picture dualpipe.svg

The exit status is 2 if a schedule does not take these numbers.
""",
    _add,
    _schedule,
)
