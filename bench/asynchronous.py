"""Compare training curves of asynchronous pipelines with synchronous training, on a small GPT.

A GPT of four blocks, one per stage, learns to predict the characters of this repository's own
pages. All methods start from the same parameters, see the same sequences in the same order, and
use the same optimizer and learning rate. Each update takes 16 sequences. The methods differ in the
version of the weights from which a gradient is computed. All stages run on one device, in the order
of the schedule (``on_one_worker``); the result is that of stages on four devices. The command
writes a JSON file and a plot.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import superscaler_core as ss
from bench.command_line import parser_for
from bench.result import environment, write
from superscaler_core.models import build, example_inputs
from superscaler_core.plans import stages_of_blocks
from superscaler_core.published.asynchronous import PipeMare
from superscaler_core.schedules import SCHEDULES, on_one_worker

STAGES, SEQUENCES = 4, 16
SIZES = {"layers": STAGES, "width": 48, "heads": 4, "sequence": 32, "vocabulary": 96}
RATE = 1e-3
DECAY = 0.135
"""D of PipeMare's discrepancy correction (T2), about ``exp(-2)``."""


@dataclass(frozen=True)
class Method:
    """A schedule, and how its updates are corrected.

    Attributes:
        schedule: a name of ``SCHEDULES``.
        every: microbatches per update; the sequences of an update are divided among them.
        options: options of the schedule.
        corrections: PipeMare's corrections; None for no correction.
    """

    schedule: str
    every: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    corrections: PipeMare | None = None

    def order(self, num_updates: int) -> ss.Schedule:
        """The schedule of a run on one worker; of a single update if it is synchronous."""
        make = SCHEDULES[self.schedule]
        if self.is_synchronous:
            return on_one_worker(make(STAGES, self.every))
        num = num_updates * self.every
        return on_one_worker(make(STAGES, num, every=self.every, **self.options))

    @property
    def is_synchronous(self) -> bool:
        return self.schedule == "1f1b"


def methods(num_updates: int) -> dict[str, Method]:
    """The methods that are compared, by their names in the plot."""
    mare = PipeMare(annealing=num_updates // 4, decay=DECAY)
    return {
        "synchronous (1F1B)": Method("1f1b", every=STAGES),
        "PipeDream": Method("pipedream"),
        "PipeDream, vertical sync": Method("pipedream", options={"vertical": True}),
        "PipeDream-2BW": Method("pipedream-2bw", every=STAGES),
        "AMPNet": Method("ampnet"),
        "PipeMare without corrections": Method("pipemare"),
        "PipeMare, T1 and T2": Method("pipemare", corrections=mare),
    }


@cache
def _text() -> Tensor:
    """The pages as token numbers: printable ASCII from 1 on, 0 for every other character."""
    pages = sorted(Path(__file__).parents[1].glob("docs/adr/*.md"))
    text = "\n".join(page.read_text() for page in pages)
    return torch.tensor([ord(c) - 31 if " " <= c <= "~" else 0 for c in text])


def _batch(first: int, num_updates: int) -> tuple[Tensor, Tensor]:
    """Sequences of ``num_updates`` updates from update ``first`` on, and their next characters."""
    text, length = _text(), SIZES["sequence"]
    places = torch.Generator().manual_seed(0)
    num = (first + num_updates) * SEQUENCES
    starts = torch.randint(len(text) - length - 1, (num,), generator=places)
    rows = torch.stack([text[s : s + length + 1] for s in starts[first * SEQUENCES :]])
    return rows[:, :-1], rows[:, 1:]


@cache
def _captured(size: int) -> tuple[ss.Graph, dict[str, Tensor]]:
    """The graph for microbatches of ``size``, and the initial parameters, equal for all sizes."""
    torch.manual_seed(0)
    model = build("gpt", **SIZES)
    return ss.capture(model, example_inputs("gpt", size, **SIZES)), model.state_dict()


def _program(method: Method, num_updates: int, folder: str) -> dict[str, Tensor]:
    """Write the program of a method to ``folder``; return the initial parameters."""
    graph, state = _captured(SEQUENCES // method.every)
    plan = ss.Plan(graph, [0])
    stages_of_blocks(plan, STAGES)
    for op in plan.graph.ops:
        plan.op_assign(op, 0)
    plan.op_order(method.order(num_updates))
    ss.compile(plan).save(folder)
    return state


def losses(method: Method, num_runs: int, num_updates: int) -> list[float]:
    """The mean loss of each run of a method; a run is ``num_updates`` updates."""
    make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
    make = partial(torch.optim.Adam, lr=RATE)

    def work(trainer: ss.Trainer) -> list[float]:
        trainer.load_state_dict(state)
        trainer.update_with(make, correction=method.corrections)
        size = 1 if method.is_synchronous else num_updates
        steps = range(0, num_runs * num_updates, size)
        found = torch.tensor([trainer.step(*_batch(first, size)).item() for first in steps])
        return [float(mean) for mean in found.view(num_runs, -1).mean(1)]

    with tempfile.TemporaryDirectory() as folder:
        state = _program(method, num_updates, folder)
        return ss.run_threads(folder, work, range(1))[0]


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw the loss curves of all methods into one figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    num = result["updates_per_run"]
    for number, (name, mine) in enumerate(result["losses"].items()):
        style = {"color": "black", "linewidth": 2.5} if number == 0 else {}
        axes.plot([(i + 0.5) * num for i in range(len(mine))], mine, label=name, **style)
    axes.set(xlabel="updates", ylabel="mean loss of the last updates, nats per character")
    axes.set_title(result["title"], fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    """Train by every method; returns the exit status."""
    parser = parser_for("asynchronous", __doc__)
    parser.add_argument("--runs", type=int, default=15, help="(default: %(default)s)")
    parser.add_argument("--updates", type=int, default=40, help="of a run (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("bench/results/asynchronous.json"))
    parser.add_argument("--picture", type=Path, default=Path("docs/img/asynchronous.png"))
    words = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(words)
    # Small products are fastest on one core, and the result does not depend on the number of cores.
    torch.set_num_threads(1)
    found = {}
    for name, method in methods(args.runs * args.updates).items():
        found[name] = losses(method, args.runs, args.updates)
        print(f"{name:30} first {found[name][0]:.3f}  last {found[name][-1]:.3f}", flush=True)
    result = {
        **environment("asynchronous", words),
        "title": f"GPT of {STAGES} stages, {SEQUENCES} sequences an update, Adam at {RATE:g}",
        "updates_per_run": args.updates,
        "losses": found,
    }
    write(result, args.out, partial(plot, result), args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
