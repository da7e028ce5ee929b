"""``superscaler search``: find the fastest plan that fits in memory."""

from __future__ import annotations

import argparse
import os
import re
import shlex

from tqdm import tqdm

import rvdcomm as rv
from rvdcomm.cli import OK, Command, num_bytes
from rvdcomm.units import bytes_text, secs_text
from superscaler_core.cli.arguments import (
    MODEL_NAMES,
    add_training,
    built,
    count,
    devices_of,
    topology_of,
)
from superscaler_core.cli.html import add_html
from superscaler_core.cli.plan import decisions_file
from superscaler_core.cli.progress import phase
from superscaler_core.cli.simulate import add_machine, named_profile, profile_name
from superscaler_core.cli.sources import Source, model_source, settings_of
from superscaler_core.evaluation.found import Found
from superscaler_core.evaluation.request import Trial
from superscaler_core.front_end.model_call import ModelCall
from superscaler_core.page import save_candidates
from superscaler_core.planners.search import search
from superscaler_core.planners.table import PLANNERS
from superscaler_core.precision import Precision

_NO_PLAN = Source("search", {}, lambda: None)


def _search(args: argparse.Namespace) -> int:
    topology, num_devices = topology_of(args), devices_of(args)
    model_from = model_source(args.model, args.preset)
    sizes, _ = settings_of(model_from, _NO_PLAN, args.set)
    with phase(f"build {model_from.name}"):
        made = built(model_from, sizes, args.dtype, "meta", 0, 1)
    with _Bar(args.budget, args.max_tried) as bar:
        found = search(
            made.model,
            ModelCall.of(made.model, made.args, made.kwargs),
            topology=topology or rv.Topology.single_host(num_devices, 5e-6, 200e9),
            batch=args.batch,
            memory_bytes=args.memory,
            planner=args.planner,
            budget_secs=args.budget,
            max_tried=args.max_tried,
            profile=named_profile(args),
            devices=range(num_devices),
            samples=args.microbatch,
            recycled=model_from.recycled,
            recycle=args.recycle,
            optimizer=args.optimizer,
            precision=Precision(args.master_dtype),
            num_processes=args.processes,
            progress=bar.show,
        )
    print(found)
    if args.out is not None:
        found.save(args.out)
        save_candidates(found.candidates, args.out)
        print(f"\nwrote {args.out}; look at it:\n  {_next(args, found)}")
    if args.picture is not None:
        found.draw(args.picture)
        print(f"\nwrote {args.picture}")
    if args.html is not None:
        found.save_page(args.html)
        print(f"\nwrote {args.html}; open it in a browser")
    for op in args.explain:
        print(f"\n{found.explain(op)}")
    return OK


class _Bar:
    """A progress bar with the best plan so far, on a terminal."""

    def __init__(self, budget_secs: float, max_tried: int) -> None:
        form = "search: {n_fmt} tried in {elapsed} of " + secs_text(budget_secs) + "{postfix}"
        self._bar = tqdm(total=max_tried or None, bar_format=form, leave=False, disable=None)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, num_tried: int, num_waiting: int, best: Trial | None) -> None:
        """Show one more candidate; called by ``search``."""
        text = f"{num_waiting} wait"
        if best is not None:
            size, name = bytes_text(best.peak_bytes), best.candidate.name
            text += f"; best {secs_text(best.secs)}, {size}: {name}"
        self._bar.set_postfix_str(text[:120], refresh=False)
        self._bar.update(1)


def _next(args: argparse.Namespace, found: Found) -> str:
    """The command that simulates the plan that was found."""
    words = ["superscaler", "simulate", args.model, args.out, "--devices", str(devices_of(args))]
    words += ["--microbatch", str(found.best.candidate.samples)]
    for option in ("preset", "dtype", "master_dtype", "topology"):
        value = getattr(args, option)
        words += [f"--{option.replace('_', '-')}", value] if value is not None else []
    words += ["--profile", profile_name(args), "--optimizer", args.optimizer]
    words += [word for text in args.set for word in ("--set", text)]
    return shlex.join(words)


def secs(text: str) -> float:
    """Parse a time such as ``90``, ``90s`` or ``5m``."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) ?(s|m|h)?", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a time such as 90s or 5m, got {text!r}")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2] or "s"]


def _counts(text: str) -> tuple[int, ...]:
    return tuple(count(word.strip()) for word in text.split(","))


def _add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="what to train: see below")
    parser.add_argument(
        "--batch", metavar="N", type=count, required=True, help="samples of a training step"
    )
    add_training(
        parser,
        "default: all of --topology, or 1",
        "a size of the model; may be given several times",
    )
    add_machine(parser)
    parser.add_argument(
        "--memory", metavar="BYTES", type=num_bytes,
        help="what a plan may need of each device, such as 30GiB (default: all of the profile's)",
    )  # fmt: skip
    parser.add_argument(
        "--planner", choices=PLANNERS, default="auto", metavar="NAME",
        help=f"who proposes plans: {', '.join(PLANNERS)} (default auto)",
    )  # fmt: skip
    parser.add_argument(
        "--budget", metavar="TIME", type=secs, default="60s",
        help="time of the search, capturing included, such as 90s or 5m (default 60s); a search "
        "takes a little longer if a plan seems 3 %% faster that it has not simulated in full",
    )  # fmt: skip
    parser.add_argument(
        "--max-tried", metavar="N", type=int, default=0,
        help="evaluate so many candidates at most; with --processes 1 the result is then the same "
        "every time (default: any number)",
    )  # fmt: skip
    parser.add_argument(
        "--microbatch", metavar="B,B,...", type=_counts, default=(),
        help="samples of a microbatch that are tried (default: all divisors of the batch)",
    )  # fmt: skip
    parser.add_argument(
        "--recycle", metavar="N", type=int, default=0,
        help="recycling passes of every microbatch, for a model that is recycled (default 0)",
    )  # fmt: skip
    parser.add_argument(
        "--processes", metavar="N", type=count, default=min(2, os.cpu_count() or 1),
        help="processes that evaluate candidates side by side (default 2)",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="FILE.plan", type=decisions_file,
        help="write the plan that was found, to be given as PLAN to other commands, and beside it "
        "FILE.candidates.json, which 'explain --html' shows",
    )  # fmt: skip
    parser.add_argument(
        "--picture", metavar="FILE",
        help="draw time against memory of all candidates, as .png or .svg",
    )  # fmt: skip
    add_html(
        parser,
        "; and all candidates: their step, their memory, whether they fit, and why they were "
        "refused",
    )
    parser.add_argument(
        "--explain", metavar="OP", action="append", default=[],
        help="print what each way to cut this op would have cost, the rest of the plan as it is; "
        "'superscaler explain MODEL PLAN' lists the ops (may be repeated)",
    )  # fmt: skip


COMMAND = Command(
    "search for the fastest plan that fits in memory",
    f"""{MODEL_NAMES}
examples:
  A GPT of 1.3 billion parameters on one host of eight V100s; then look at what was found:
    superscaler search gpt --preset 1.3B --dtype float16 --master-dtype float32 --batch 256 \\
      --devices 8 --topology v100:1x8 --memory 31GiB --out best.plan --picture best.png
    superscaler simulate gpt best.plan --preset 1.3B --dtype float16 --devices 8 --microbatch 8 \\
      --topology v100:1x8
  The chosen plan as a page for a browser, with all candidates:
    superscaler search gpt --batch 64 --devices 4 --topology v100:2x2 --html found.html
  What one published planner would do, for at most five minutes:
    superscaler search gpt --batch 64 --devices 8 --planner alpa --budget 5m
  Why the head of a GPT is cut as it is:
    superscaler search gpt --batch 64 --devices 4 --explain head:linear
  A model of your own:
    superscaler search mine.py:model --batch 64 --devices 4

Every candidate is compiled, its memory is read, and its step is simulated; a plan that needs more
memory than there is never wins. Ctrl-C ends the search with the best plan so far.

in the table:
  1.013 x   how much longer a step takes than with the chosen plan
  ~         an estimate from few microbatches or blocks

in the table of --explain:
  *         the choice of the plan that was found
  b/4       loop b is cut in 4 (-/4: four copies); two words are the axes of a mesh, outer first
  step ms   how much longer a step would be: computing, moves to its neighbours in their cuts, and
            its weights; what the plan recomputes or stores in pieces is left out
""",
    _add,
    _search,
)
