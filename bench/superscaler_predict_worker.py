"""One rank of the prediction benchmark; started by ``superscaler_predict.py``.

    python -m bench.superscaler_predict_worker CONFIG.json FOLDER

Rank 0 writes a file for every model into FOLDER, as soon as its plans are measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls
from torch import Tensor

import rvdcomm as rv
from bench.training_method import everyone
from rvdcomm.calibration import calibrate
from superscaler_core.compiled import Compiled, compile
from superscaler_core.front_end import capture
from superscaler_core.graph.graph import Graph
from superscaler_core.models import build, example_inputs
from superscaler_core.plan import Plan
from superscaler_core.planners.search.evaluate import compiled
from superscaler_core.planners.search.request import Request, Trial
from superscaler_core.planners.search.search import search_request
from superscaler_core.planners.table import PLANNERS
from superscaler_core.plans import PLANS
from superscaler_core.run.live_bytes import LiveBytes
from superscaler_core.run.load import load
from superscaler_core.run.trainer import Trainer
from superscaler_core.simulator import DeviceProfile, simulate
from superscaler_core.simulator.measured import measured

TIMEOUT = timedelta(seconds=600)
NUM_WARM = 2
NUM_CALLS = 200
"""Small calls by which the time around a transfer is measured."""

STEPS_OF_VISIT = 3
MOST_ROUNDS = 3
"""So many times the rounds that are asked for, at most, if other programs disturb them."""

HARDLY_DISTURBED = 0.05
"""Of the cores, which other programs take; about what the kernel's clock can tell."""

LEARNING_RATE, MOMENTUM = 0.01, 0.9

NUM_SEARCHES = 3
"""After each but the last the ops of the fastest plans are measured, so that the next one knows
their times."""

PLANS_TO_MEASURE = 40
"""The fastest plans of a search, whose ops are measured."""

TINY = {"layers": 4}
TINY_PLANS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("data_parallel", {}),
    ("zero3", {}),
    ("megatron", {}),
    ("one_f_one_b", {"microbatches": 4}),
    ("one_f_one_b", {"microbatches": 12}),
    ("zero_bubble", {"microbatches": 4}),
    ("zero_bubble", {"microbatches": 12}),
)
"""Plans of a tiny GPT, whose steps are nearly all overheads of the runtime."""
TINY_STEPS = 15

OVERHEADS = ("segment_secs", "move_secs", "carry_secs", "split_secs")

Candidates = list[tuple[str, int, Callable[..., None]]]
"""The name, samples and sProgram of each."""


@dataclass
class Case:
    """A plan, its program and this rank's share of it."""

    row: dict[str, Any]
    compiled: Compiled
    trainer: Trainer
    batch: Sequence[Tensor]
    optimizer: torch.optim.Optimizer

    def step(self) -> tuple[float, float]:
        """Seconds of a step on this rank, and of its processor."""
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        self.trainer.step(*self.batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start, time.process_time() - cpu_start


def main(argv: list[str]) -> None:
    """Measure the machine; search, run and predict plans of one model after another."""
    config, folder = json.loads(Path(argv[0]).read_text()), Path(argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    _say("calibrate links")
    topology = with_a_core_each(calibrate()[0])
    _say("measure overheads of the runtime")
    overheads = runtime_overheads(topology)
    for name, asked in config["models"].items():
        found = _Model(name, asked, config, topology, overheads).measured()
        if dist.get_rank() == 0:
            (folder / f"{name}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def with_a_core_each(topology: rv.Topology) -> rv.Topology:
    """Links as fast as where every rank has a core, from links that all ranks measured at once.

    Ranks of one machine communicate by copying, and the simulator makes them share its cores.
    """
    share = max(1.0, dist.get_world_size() / num_cores())
    (level,) = topology.levels
    link = rv.Link(level.link.alpha_secs / share, level.link.bytes_per_sec * share)
    return rv.Topology.single_host(dist.get_world_size(), link.alpha_secs, link.bytes_per_sec)


def num_cores() -> int:
    """Cores that the ranks of this machine share."""
    return len(os.sched_getaffinity(0))


# --- overheads of the runtime -------------------------------------------------------------------


def runtime_overheads(topology: rv.Topology) -> Mapping[str, float]:
    """Overheads of a profile, from the processor's time in steps of tiny programs.

    A step takes what its ops and its bytes take, and these for every call of a segment, every
    tensor that is moved, every tensor that is carried between stages, and every op whose backward
    is split into halves. Least squares of the relative errors, none below 0.
    """
    ranks = range(dist.get_world_size())
    with TemporaryDirectory() as folder:
        cases = [_tiny(number, topology, Path(folder)) for number in range(len(TINY_PLANS))]
    profile = replace(measured([case.compiled for case in cases]), num_cores=0)
    spent = []
    for case in cases:
        steps = [everyone(case.step()[1]) for _ in range(TINY_STEPS)]
        spent.append(median(sum(each) / len(ranks) for each in steps[NUM_WARM:]))
    free = replace(profile, **dict.fromkeys(OVERHEADS, 0.0))
    bare = _busy_secs(cases, free, topology)
    nums = [_busy_secs(cases, replace(free, **{name: 1.0}), topology) - bare for name in OVERHEADS]
    fitted, _ = nnls(np.stack(nums, axis=1) / np.array(spent)[:, None], 1 - bare / np.array(spent))
    found: list[Mapping[str, float]] = [dict(zip(OVERHEADS, map(float, fitted), strict=True))]
    dist.broadcast_object_list(found)
    return found[0]


def _tiny(number: int, topology: rv.Topology, folder: Path) -> Case:
    name, knobs = TINY_PLANS[number]
    model, inputs = build("gpt", **TINY), example_inputs("gpt", dist.get_world_size(), **TINY)
    plan = Plan(capture(model, inputs), range(dist.get_world_size()))
    PLANS[name](plan, **knobs)
    program = compile(plan, topology=topology, optimizer="momentum")
    batch = example_inputs("gpt", len(inputs[0]) * plan.num_microbatches, **TINY)
    return _loaded({"name": name}, program, model, batch, folder / str(number))


def _busy_secs(cases: Sequence[Case], profile: DeviceProfile, topology: rv.Topology) -> Any:
    """Mean over the ranks of the time in which they compute or communicate, for every case."""
    found = [simulate(case.compiled, profile, topology).busy_secs.values() for case in cases]
    return np.array([sum(each) / len(each) for each in found])


def measured_move_secs(topology: rv.Topology) -> float:
    """What a call takes besides its plan's time: of a small all-reduce, the median."""
    ranks = range(dist.get_world_size())
    src, dst = (
        rv.Layout((64,), rvd.format(len(ranks)), ranks)
        for rvd in ("R(1)V({})D(1)", "R({})V(1)D(1)")
    )
    plan = rv.plan(src, dst, "float32", topology)
    call = rv.Redistributor(plan)
    value, times = torch.zeros(64), []
    for _ in range(NUM_CALLS):
        start = time.perf_counter()
        call(value, requires_grad=False)
        times.append(time.perf_counter() - start)
    spent: list[float] = everyone(median(times))
    return max(0.0, median(spent) - plan.cost.secs)


# --- one model ----------------------------------------------------------------------------------


class _Model:
    """The plans of one model; all methods are collective."""

    def __init__(
        self,
        name: str,
        asked: Mapping[str, Any],
        config: Mapping[str, Any],
        topology: rv.Topology,
        overheads: Mapping[str, float],
    ) -> None:
        self._name, self._sizes, self._batch = name, asked["sizes"], asked["batch"]
        self._config, self._topology, self._overheads = config, topology, overheads
        self._profile: DeviceProfile | None = None
        self._known: set[str] = set()

    def measured(self) -> dict[str, Any]:
        """What was measured and predicted; whole on rank 0."""
        chosen = self._searched()
        _say(f"{self._name}: load {len(chosen)} plans")
        with TemporaryDirectory() as folder:
            cases = [self._case(Path(folder), *each) for each in enumerate(chosen)]
        for case in cases:
            case.row["peak_bytes"] = everyone(_peak_bytes(case))
        for case, visits in zip(cases, self._visited(cases), strict=True):
            case.row |= {
                "step_secs": [secs for visit in visits for secs in visit.step_secs],
                "cpu_secs": [secs for visit in visits for secs in visit.cpu_secs],
                "others": median(visit.others for visit in visits),
            }
        if self._profile is None:
            return {}
        for case in cases:
            case.row |= self._predicted(case.compiled, self._profile)
        return {
            "topology": self._topology.to_json(),
            "profile": {**asdict(self._profile), "op_secs": len(self._profile.op_secs)},
            "rows": [case.row for case in cases],
        }

    def _visited(self, cases: Sequence[Case]) -> list[list[Visit]]:
        """Of every case the visits that others on the machine disturbed least.

        More rounds follow as long as there are too few visits that are hardly disturbed.
        """
        num_rounds = self._config["rounds"]
        visits: list[list[Visit]] = [[] for _ in cases]
        for i in range(num_rounds * MOST_ROUNDS):
            _say(f"{self._name}: round {i + 1}")
            for case, mine in zip(cases, visits, strict=True):
                mine.append(_visit(case))
                mine.sort(key=lambda visit: visit.others)
            if i + 1 >= num_rounds and _agreed(
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

    def _request(self, profile: DeviceProfile) -> Request:
        sizes = tuple(n for n in range(1, self._batch + 1) if self._batch % n == 0)
        devices = tuple(range(dist.get_world_size()))
        return Request(
            self._graph, sizes, self._batch, devices, self._topology, profile,
            profile.memory_bytes, optimizer="momentum",
        )  # fmt: skip

    def _searched(self) -> Candidates:
        """Plans of the last of several searches, of which each knows more ops; the best first."""
        plan = Plan(self._graph(self._batch), [0])
        PLANS["data_parallel"](plan)
        self._measure_ops([compile(plan, optimizer="momentum")])
        for turn in range(NUM_SEARCHES):
            _say(f"{self._name}: search {turn + 1} of {NUM_SEARCHES}")
            best, several = self._shared(self._search())
            self._measure_ops([self._program(each) for each in best])
        return several

    def _search(self) -> tuple[Candidates, Candidates]:
        """The fastest plans; and those that are run, from all that were tried. Rank 0 searches."""
        if self._profile is None:
            return [], []
        found = search_request(
            self._request(self._profile), PLANNERS["auto"], max_tried=self._config["tried"],
            budget_secs=TIMEOUT.total_seconds() / 2,
        )  # fmt: skip
        rows = distinct([found.best, *found.tried])
        return _sendable(rows[:PLANS_TO_MEASURE]), _sendable(spread(rows, self._config["plans"]))

    def _shared(self, mine: tuple[Candidates, Candidates]) -> tuple[Candidates, Candidates]:
        values = [mine]
        dist.broadcast_object_list(values)
        return values[0]

    def _program(self, candidate: tuple[str, int, Callable[..., None]]) -> Compiled:
        _, samples, sprogram = candidate
        assert self._profile is not None or dist.get_rank() > 0
        return compiled(self._request(self._profile or _ANY), samples, sprogram)

    def _measure_ops(self, programs: Sequence[Compiled]) -> None:
        """As many ranks as there are cores measure the ops that are not known yet."""
        dist.barrier()
        if dist.get_rank() < num_cores():
            found = measured(programs, op_secs=self._config["op_secs"], known=self._known)
            self._known |= set(found.op_secs)
            if dist.get_rank() == 0:
                before = {} if self._profile is None else self._profile.op_secs
                both = {**before, **found.op_secs}
                base = self._profile or replace(found, **self._overheads)
                self._profile = replace(base, op_secs=both)
        dist.barrier()

    def _case(self, folder: Path, number: int, candidate: Any) -> Case:
        name, samples, _ = candidate
        row = {"name": name, "samples": samples, "is_chosen": number == 0}
        batch = example_inputs(self._name, self._batch, **self._sizes)
        program = self._program(candidate)
        return _loaded(row, program, self._model(), batch, folder / str(number))

    def _predicted(self, program: Compiled, profile: DeviceProfile) -> dict[str, Any]:
        found = simulate(program, profile, self._topology)
        alone = simulate(program, replace(profile, num_cores=0), self._topology)
        return {
            "predicted_secs": found.secs,
            "predicted_bytes": [found.peak_bytes[device] for device in found.devices],
            "predicted_busy_secs": list(alone.busy_secs.values()),
        }


_ANY = DeviceProfile("any", {"float32": 1e9}, 1e9, 1 << 40)
"""Plans do not depend on it, beside their balance of stages of unlike blocks."""


def _loaded(
    row: dict[str, Any], program: Compiled, model: torch.nn.Module, batch: Sequence[Tensor],
    folder: Path,
) -> Case:  # fmt: skip
    """Collective: the first rank writes the program."""
    shared = [folder if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    (path,) = shared
    assert path is not None
    if dist.get_rank() == 0:
        program.save(path)
    dist.barrier()
    trainer = load(path)
    trainer.load_state_dict(model.state_dict())
    # A rank may store no parameters, as where whole ops are placed.
    stored = list(trainer.parameters()) or [torch.zeros(0, requires_grad=True)]
    optimizer = torch.optim.SGD(stored, lr=LEARNING_RATE, momentum=MOMENTUM, fused=True)
    dist.barrier()
    return Case(dict(row), program, trainer, batch, optimizer)


@dataclass(frozen=True)
class Visit:
    """Some steps of a case, one after another.

    Attributes:
        step_secs: of the slowest rank.
        cpu_secs: of the processor, mean of the ranks.
        others: the share of the machine's cores that other programs took meanwhile.
    """

    step_secs: list[float]
    cpu_secs: list[float]
    others: float


def _visit(case: Case) -> Visit:
    """Collective."""
    dist.barrier()
    start, busy_start = time.perf_counter(), _busy_secs_of_machine()
    cpu_start = time.process_time()
    taken = [case.step() for _ in range(STEPS_OF_VISIT)]
    cpu_secs = time.process_time() - cpu_start
    dist.barrier()
    wall, busy = time.perf_counter() - start, _busy_secs_of_machine() - busy_start
    ranks = everyone((taken, cpu_secs))
    others = busy - sum(spent for _, spent in ranks)
    steps = list(zip(*(mine for mine, _ in ranks), strict=True))
    return Visit(
        [max(secs for secs, _ in step) for step in steps],
        [sum(secs for _, secs in step) / len(step) for step in steps],
        max(0.0, others / (wall * (os.cpu_count() or 1))),
    )


def _busy_secs_of_machine() -> float:
    """Seconds that all processors have worked for any program, or were given to other machines."""
    user, nice, system, _, _, _, _, steal = map(int, _first_line("/proc/stat").split()[1:9])
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


def _first_line(path: str) -> str:
    with open(path) as lines:
        return lines.readline()


def _agreed(mine: bool) -> bool:
    """What the first rank says."""
    values = [mine]
    dist.broadcast_object_list(values)
    return values[0]


def _peak_bytes(case: Case) -> int:
    """Of the first two steps: optimizer states come to be at the end of the first."""
    with LiveBytes(case.trainer) as live:
        for _ in range(NUM_WARM):
            case.step()
    return live.peak_bytes


# --- which plans are run ------------------------------------------------------------------------


def distinct(trials: Sequence[Trial]) -> list[Trial]:
    """Those that fit, fastest first, and of those that take and need the same the first."""
    found: dict[tuple[float, int], Trial] = {}
    for trial in trials:
        if trial.fits and not trial.is_estimate:
            found.setdefault((trial.secs, trial.peak_bytes), trial)
    return sorted(found.values(), key=lambda trial: trial.secs)


NUM_BEST, MOST = 6, 4.0
"""Of all that are run, the fastest, and how many times as long as the best a step may take."""


def spread(trials: Sequence[Trial], num: int) -> list[Trial]:
    """The fastest of some plans, and others evenly over the rest.

    Args:
        trials: distinct, fastest first.
        num: of plans; fewer if there are not as many.
    """
    near = [trial for trial in trials if trial.secs <= MOST * trials[0].secs]
    best, rest = near[:NUM_BEST], near[NUM_BEST:]
    places = np.linspace(0, len(rest) - 1, min(len(rest), max(0, num - len(best))))
    return [*best, *(rest[round(place)] for place in places)]


def _sendable(trials: Sequence[Trial]) -> Candidates:
    return [(t.candidate.name, t.candidate.samples, t.candidate.sprogram) for t in trials]


if __name__ == "__main__":
    main(sys.argv[1:])
