"""One rank of the prediction benchmark; started by ``command.py``.

    python -m bench.superscaler_predict.worker CONFIG.json FOLDER

Rank 0 writes a file for every model into FOLDER, as soon as its plans are measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bench.machine.machine import STEPS_OF_VISIT, Machine, Planned
from bench.machine.method import TIMEOUT, Method, everyone, loaded, shared, timed
from superscaler_core import Graph, LiveBytes, Trainer
from superscaler_core.compiled import Compiled
from superscaler_core.front_end import capture
from superscaler_core.models import build, example_inputs
from superscaler_core.simulator import simulate

NUM_WARM = 2
"""Warm-up steps, in which the peak memory is measured."""

MOST_ROUNDS = 3
"""Limit of the rounds, as a multiple of the requested rounds, if other programs disturb them."""

HARDLY_DISTURBED = 0.05
"""Share of the cores taken by other programs up to which a visit counts as hardly disturbed.

It is about the resolution of the kernel's counters.
"""


@dataclass
class Case:
    """A plan with its result row, its program, and this rank's part of the program."""

    row: dict[str, Any]
    compiled: Compiled
    trainer: Trainer
    method: Method
    batch: Sequence[Tensor]


def main(argv: list[str]) -> None:
    """Measure the machine; then search, run and predict plans, one model after another."""
    config, folder = json.loads(Path(argv[0]).read_text()), Path(argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    machine = Machine(op_secs=config["op_secs"], say=_say)
    for name, asked in config["models"].items():
        found = _Model(name, asked, config, machine).measured()
        if dist.get_rank() == 0:
            (folder / f"{name}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


# --- one model ----------------------------------------------------------------------------------


class _Model:
    """The plans of one model; all methods are collective."""

    def __init__(
        self, name: str, asked: Mapping[str, Any], config: Mapping[str, Any], machine: Machine
    ) -> None:
        self._name, self._sizes, self._batch = name, asked["sizes"], asked["batch"]
        self._config, self._machine = config, machine

    def measured(self) -> dict[str, Any]:
        """The measurements and predictions of all plans."""
        plans = self._searched()
        _say(f"{self._name}: load {len(plans)} plans")
        with TemporaryDirectory() as folder:
            cases = [self._case(Path(folder), *each) for each in enumerate(plans)]
        for case in cases:
            case.row["peak_bytes"] = everyone(_peak_bytes(case))
        for case, visits in zip(cases, self._visited(cases), strict=True):
            case.row |= {
                "step_secs": [secs for visit in visits for secs in visit.step_secs],
                "cpu_secs": [secs for visit in visits for secs in visit.cpu_secs],
                "others": median(visit.others for visit in visits),
            }
            case.row |= self._predicted(case.compiled)
        profile = self._machine.profile
        return {
            "topology": self._machine.topology.to_json(),
            "profile": {**asdict(profile), "op_secs": len(profile.op_secs)},
            "rows": [case.row for case in cases],
        }

    def _visited(self, cases: Sequence[Case]) -> list[list[Visit]]:
        """For every case, the visits that other programs disturbed least.

        More rounds follow until every case has enough hardly disturbed visits, up to a limit.
        """
        num_rounds = self._config["rounds"]
        visits: list[list[Visit]] = [[] for _ in cases]
        for i in range(num_rounds * MOST_ROUNDS):
            _say(f"{self._name}: round {i + 1}")
            for case, mine in zip(cases, visits, strict=True):
                mine.append(_visit(case))
                mine.sort(key=lambda visit: visit.others)
            if i + 1 >= num_rounds and shared(
                max(mine[num_rounds - 1].others for mine in visits) <= HARDLY_DISTURBED
            ):
                break
        return [mine[:num_rounds] for mine in visits]

    @cache  # noqa: B019 - as long as the model is measured
    def _graph(self, samples: int) -> Graph:
        return capture(self._model(), example_inputs(self._name, samples, **self._sizes))

    def _model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return build(self._name, **self._sizes)

    def _searched(self) -> list[Planned]:
        """The plans that are run; the first one is the chosen plan."""
        machine = self._machine
        _say(f"{self._name}: search")
        found = machine.search(
            self._graph, self._batch, max_tried=self._config["tried"],
            budget_secs=TIMEOUT.total_seconds() / 2,
        )  # fmt: skip
        request = machine.request(self._graph, self._batch)
        num = self._config["plans"]
        raced = machine.raced(found[:num], request, self._model(), self._inputs())
        return [*raced, *spread(found[len(raced) :], num - len(raced))]

    def _inputs(self) -> Sequence[Tensor]:
        return example_inputs(self._name, self._batch, **self._sizes)

    def _case(self, folder: Path, number: int, plan: Planned) -> Case:
        row = {
            "name": plan.name,
            "samples": plan.samples,
            "is_chosen": number == 0,
            "raced_secs": plan.measured_secs if plan.measured_secs < inf else None,
        }
        program = plan.compiled(self._machine.request(self._graph, self._batch))
        trainer = loaded(program, self._model(), folder / str(number))
        return Case(row, program, trainer, Method.of_trainer(trainer), self._inputs())

    def _predicted(self, program: Compiled) -> dict[str, Any]:
        profile, topology = self._machine.profile, self._machine.topology
        found = simulate(program, profile, topology)
        alone = simulate(program, replace(profile, num_cores=0), topology)
        return {
            "predicted_secs": found.secs,
            "predicted_bytes": [found.peak_bytes[device] for device in found.devices],
            "predicted_busy_secs": list(alone.busy_secs.values()),
        }


@dataclass(frozen=True)
class Visit:
    """A few consecutive steps of a case.

    Attributes:
        step_secs: seconds of each step on the slowest rank.
        cpu_secs: processor seconds of each step, mean of the ranks.
        others: share of the machine's cores that other programs took in this time.
    """

    step_secs: list[float]
    cpu_secs: list[float]
    others: float


def _visit(case: Case) -> Visit:
    """Run a visit; collective."""
    dist.barrier()
    start, busy_start = time.perf_counter(), _busy_secs_of_machine()
    cpu_start = time.process_time()
    steps = [timed(case.method, case.batch) for _ in range(STEPS_OF_VISIT)]
    cpu_secs = time.process_time() - cpu_start
    dist.barrier()
    wall, busy = time.perf_counter() - start, _busy_secs_of_machine() - busy_start
    others = busy - sum(everyone(cpu_secs))
    return Visit(
        [each.step for each in steps],
        [each.cpu for each in steps],
        max(0.0, others / (wall * (os.cpu_count() or 1))),
    )


def _busy_secs_of_machine() -> float:
    """Processor seconds that were spent on any program, or were given to other virtual machines."""
    user, nice, system, _, _, _, _, steal = map(int, _first_line("/proc/stat").split()[1:9])
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


def _first_line(path: str) -> str:
    with open(path) as lines:
        return lines.readline()


def _peak_bytes(case: Case) -> int:
    """Peak memory of the first two steps; the first update creates the optimizer states."""
    with LiveBytes(case.trainer) as live:
        for _ in range(NUM_WARM):
            timed(case.method, case.batch)
    return live.peak_bytes


# --- choice of the plans that are run -----------------------------------------------------------


MOST = 4.0
"""Longest step of a chosen plan, as a multiple of that of the first plan."""


def spread(plans: Sequence[Planned], num: int) -> list[Planned]:
    """Choose plans evenly from the list, without those that are too slow (``MOST``).

    Args:
        plans: plans, fastest first.
        num: number of plans to choose; fewer are chosen if there are fewer.
    """
    near = [plan for plan in plans if plan.secs <= MOST * plans[0].secs]
    places = np.linspace(0, len(near) - 1, min(len(near), max(0, num)))
    return [near[round(place)] for place in places]


if __name__ == "__main__":
    main(sys.argv[1:])
