"""Laws of searches: memory limits, optimality, training, estimates and time budgets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.evaluation import (
    EXACT,
    FULL,
    Candidate,
    Captured,
    Request,
    Scope,
    Trial,
    Workers,
    compiled,
)
from superscaler_core.evaluation.evaluate import evaluate
from superscaler_core.models import build, example_inputs
from superscaler_core.planners.auto import Setting, auto, options
from superscaler_core.planners.auto.families import Filling
from superscaler_core.planners.auto.options import SettingSpace
from superscaler_core.planners.auto.traits import Traits
from superscaler_core.planners.search import Progress, search_request
from superscaler_core.planners.table import PLANNERS
from superscaler_core.plans import PLANS
from superscaler_core.schedules import one_f_one_b
from superscaler_core.simulator import PROFILES
from tests.superscaler_core.cases import Case, check_trains

BATCH = 8

ENDS_BY_ITSELF = 600.0
"""A budget that these searches never use up, also on a busy machine."""

SMALL = {
    "gpt": {"sequence": 16},
    "moe": {"sequence": 16},
    "mlp": {},
    "wide_resnet": {},
    "mbart": {},
    "evoformer": {},
}
"""Sizes that replace those of the preset ``tiny``."""


@cache
def graph(model: str, samples: int) -> ss.Graph:
    inputs = example_inputs(model, samples, **SMALL[model])
    return ss.capture(build(model, **SMALL[model]), inputs)


@dataclass(frozen=True)
class GraphOf:
    model: str

    def __call__(self, samples: int) -> ss.Graph:
        return graph(self.model, samples)


def request(model: str = "mlp", num: int = 2, *, memory_bytes: int = 1 << 34) -> Request:
    """The request of all tests here, on slow links."""
    topology = rv.Topology.single_host(num, 5e-6, 20e9)
    devices, samples = tuple(range(num)), (1, 2, 4, 8)
    return Request(
        GraphOf(model), samples, BATCH, devices, topology, PROFILES["v100"], memory_bytes
    )


def every_setting(asked: Request) -> set[Setting]:
    """All settings that moves and savings reach from the layouts of the devices."""
    space = SettingSpace(asked, Traits(asked.graph_of(asked.samples[0])))
    found, left = set(), list(space.roots())
    while left:
        setting = left.pop()
        if setting not in found:
            found.add(setting)
            left += space.moves(setting)
            left += space.savings(setting)
    return found


@pytest.fixture
def few_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the moves with the most values, so that a search sees all settings in a second."""
    many = options._in_fewer_parts, options._kept
    few = [move for move in options.MOVES if move not in many]
    monkeypatch.setattr(options, "MOVES", few)


UNLIKE_EACH_OTHER = ("by_hand", "alpa_hierarchical", "alpa_intra", "dapple", "galvatron", "unity")
"""Planners that choose by hand, in stages, in a space, per layer and by substitutions."""


def test_best_plan_equals_the_best_of_all_settings_that_fit(few_moves: None) -> None:
    """Bounds, estimates and changes without effect lose no optimum, with any amount of memory.

    A setting that is skipped because it seems not to fit is reached again from one that fits.
    """
    asked = replace(request("mlp"), samples=(4,))
    every = [
        evaluate(asked, Candidate("", setting.microbatch, Filling(setting, asked.profile, 0, 2)))
        for setting in every_setting(asked)
    ]
    most = min(every, key=lambda each: each.secs).peak_bytes
    for share in (0.35, 100.0):
        limit = int(share * most)
        less = replace(asked, memory_bytes=limit)
        found = search_request(less, auto, budget_secs=ENDS_BY_ITSELF)
        assert found.num_left == 0
        assert found.secs == min(each.secs for each in every if 0 < each.peak_bytes <= limit)


@pytest.mark.parametrize("name", ["auto", "alpa_hierarchical", "galvatron", "unity"])
def test_best_plan_fits_in_the_memory_limit(name: str) -> None:
    free = search_request(request("gpt"), PLANNERS[name], max_tried=6)
    limit = int(0.9 * free.peak_bytes)
    found = search_request(request("gpt", memory_bytes=limit), PLANNERS[name], max_tried=12)
    peaks = [memory.total_bytes for memory in found.compiled.memory.values()]
    assert max(peaks) == found.peak_bytes <= limit
    assert found.secs == ss.simulate(found.compiled, "v100").secs
    assert all(t.peak_bytes > limit for t in found.tried if t.lacks_memory)


def test_memory_limit_without_a_fitting_plan_raises_plan_error() -> None:
    with pytest.raises(ss.PlanError, match=r"no plan was found for 2 devices: .* the smallest nee"):
        search_request(request(memory_bytes=1000), auto, max_tried=20)


@pytest.mark.parametrize("model", ["gpt", "moe"])
def test_best_plan_trains_as_one_device(model: str, tmp_path: Path) -> None:
    case = Case("data_parallel", 4, model=model, sizes=SMALL[model])
    example = case.inputs(0, 2)
    found = ss.search(
        case.new_model(), example, topology=rv.Topology.single_host(4, 5e-6, 20e9), batch=BATCH,
        max_tried=20,
    )  # fmt: skip
    check_trains(FoundCase(found, case), tmp_path, 1e-9)


class FoundCase:
    """A training case that runs the plan found by a search."""

    def __init__(self, found: ss.Found, case: Case) -> None:
        self._found, self._case = found, replace(case, batch=found.best.candidate.samples)

    def __getattr__(self, name: str) -> object:
        return getattr(self._case, name)

    def compiled(self) -> ss.Compiled:
        return self._found.compiled


def test_interrupted_search_returns_the_best_plan_so_far() -> None:
    def stop(num: int, waiting: int, best: Trial | None) -> None:
        if num == 5:
            raise KeyboardInterrupt

    found = search_request(request("gpt"), auto, progress=stop)
    assert len(found.tried) >= 5
    assert found.num_left > 0
    fits = [t.secs for t in found.tried if t.fits and not t.is_estimate]
    assert found.secs == min(fits)


class Interrupting:
    """An sProgram whose first evaluation of the whole step is interrupted by Ctrl-C."""

    def __init__(self) -> None:
        self.is_done = False

    def __call__(self, plan: ss.Plan, microbatches: int = 0) -> None:
        if not microbatches and not self.is_done:
            self.is_done = True
            raise KeyboardInterrupt
        PLANS["data_parallel"](plan)
        plan.op_order(one_f_one_b(1, microbatches or BATCH // 2))


@pytest.mark.parametrize("num_known", [0, 1])
def test_interrupted_full_look_loses_no_plan(num_known: int) -> None:
    """Without another plan, the evaluation begins again; with one, the search ends."""
    stopped = Candidate("stopped", 2, Interrupting(), quick=Scope(1), guess_secs=2)
    known = [Candidate("slower", 1, PLANS["data_parallel"], guess_secs=1)][:num_known]
    found = search_request(request(), lambda _: [*known, stopped], max_tried=1 + num_known)
    assert isinstance(stopped.sprogram, Interrupting)
    assert stopped.sprogram.is_done
    assert found.name == [*known, stopped][0].name


def test_interrupted_check_of_the_best_plan_keeps_it() -> None:
    def captured(samples: int) -> ss.Graph:
        raise KeyboardInterrupt

    asked = replace(request(), captured=Captured(captured))
    assert search_request(asked, auto, max_tried=3).secs > 0


def test_a_budget_ends_a_search() -> None:
    found = search_request(request("gpt"), auto, budget_secs=0)
    assert found.num_left > 0
    assert "not evaluated" in str(found)


def test_search_goes_on_beyond_its_budget_until_a_plan_fits() -> None:
    asked = request()
    fat = [
        Candidate(f"fat {i}", 4, PLANS["data_parallel"], guess_secs=i, least_bytes=1e15)
        for i in range(5)
    ]
    fits = Candidate("fits", 4, PLANS["data_parallel"], guess_secs=9)
    assert search_request(asked, lambda _: [*fat, fits], budget_secs=0).name == "fits"


def test_search_without_a_plan_that_fits_tries_all_whatever_its_budget() -> None:
    asked = replace(request(), memory_bytes=100)
    given = [Candidate(str(i), 4, PLANS["data_parallel"], guess_secs=i) for i in range(5)]
    with pytest.raises(ss.PlanError, match="2 devices: 5 were tried; the smallest"):
        search_request(asked, lambda _: given, budget_secs=0)


def test_two_processes_find_the_same_optimum_as_one(few_moves: None) -> None:
    asked = replace(request(), samples=(4,))
    one, two = (search_request(asked, auto, num_processes=n) for n in (1, 2))
    assert one.secs == two.secs
    assert one.peak_bytes == two.peak_bytes


class Growing:
    """Three candidates; each is proposed after the trial of the one before it."""

    def __init__(self) -> None:
        self.waiting, self.seen = [1], list[int]()

    def __len__(self) -> int:
        return len(self.waiting)

    def __iter__(self) -> Iterator[Candidate]:
        while self.waiting:
            number = self.waiting.pop()
            yield Candidate(
                str(number), 4, PLANS["data_parallel"], follow=partial(self.add, number)
            )

    def add(self, number: int, trial: Trial) -> list[Candidate]:
        self.seen.append(number)
        self.waiting += [number + 1] if number < 3 else []
        return []


def test_planner_is_asked_again_if_a_trial_adds_candidates() -> None:
    planner = Growing()
    found = search_request(request(), lambda _: planner)
    assert planner.seen == [1, 2, 3]
    assert found.num_left == 0


def test_unproposed_candidates_of_a_planner_count_as_left() -> None:
    found = search_request(request(), lambda _: Growing(), max_tried=2)
    assert (len(found.tried), found.num_left) == (2, 1)


def test_plan_with_another_number_of_microbatches_is_rejected() -> None:
    def half(plan: ss.Plan) -> None:
        for op in plan.graph.ops:
            plan.op_assign(op, 0)
        plan.op_order(ss.SCHEDULES["1f1b"](1, 4))

    with pytest.raises(ss.PlanError, match="has 8 microbatches of 1, and the plan has 4"):
        compiled(request(), Candidate("", 1, half))


def test_table_fits_in_100_columns_and_decisions_parse_back() -> None:
    found = search_request(request("gpt"), auto, max_tried=25)
    assert max(map(len, str(found).splitlines())) <= 100
    assert found.decisions == ss.Decisions.parse(str(found.decisions))


def test_search_is_drawn_to_a_png_file(tmp_path: Path) -> None:
    found = search_request(request("gpt", memory_bytes=1 << 20), auto, max_tried=25)
    found.draw(tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes()[1:4] == b"PNG"


def test_unknown_planner_raises_plan_error_with_a_suggestion() -> None:
    with pytest.raises(ss.PlanError, match=r"no planner 'alpha'.* Is it alpa"):
        ss.search(graph("mlp", 2), topology=rv.Topology.single_host(2, 1e-6, 1e9), batch=8,
                  planner="alpha")  # fmt: skip


class Biases(torch.nn.Module):
    """Products of two loops alone, so that biases are a large part of the work."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(1, 1 << 18)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(x).sum()


@cache
def biased_graph(samples: int) -> ss.Graph:
    return ss.capture(Biases(), (torch.zeros(samples, 1),))


def biased_request() -> Request:
    """A request whose steps take much longer than the launches of their ops."""
    return replace(request(), graph_of=biased_graph, samples=(64, 128, 256), batch=256)


@pytest.mark.parametrize("model", ["moe", "wide_resnet", "biases"])
def test_bounds_of_time_and_memory_are_not_above_the_trial(model: str) -> None:
    asked = biased_request() if model == "biases" else request(model)
    found = search_request(asked, auto, max_tried=10)
    for trial in found.tried:
        assert trial.candidate.bound_secs <= trial.secs
        assert not trial.peak_bytes or trial.candidate.least_bytes <= trial.peak_bytes


@pytest.mark.parametrize("num, name", [(1, "auto"), (3, "by_hand"), (3, "alpa_hierarchical")])
def test_any_number_of_devices_has_a_plan(num: int, name: str) -> None:
    asked = replace(request("mlp", num), samples=(1, 2, 3, 6), batch=6)
    assert search_request(asked, PLANNERS[name], max_tried=8).secs > 0


class Tied(torch.nn.Module):
    """Look-up and head share a table; nothing repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(16, 8)
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(self.words(words))
        return torch.nn.functional.linear(hidden, self.words.weight).square().mean()


def test_auto_finds_a_plan_for_look_ups_without_blocks() -> None:
    words = torch.zeros(2, 4, dtype=torch.int64)
    topology = rv.Topology.single_host(2, 5e-6, 20e9)
    found = ss.search(Tied(), (words,), topology=topology, batch=BATCH, max_tried=4)
    assert found.secs > 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"devices": ()}, "devices none: give one at least, .* topology's 0 to 1"),
        ({"devices": (0, 0)}, "devices 0, 0: .* each once"),
        ({"devices": (0, 7)}, "devices 0, 7: .* topology's 0 to 1"),
        ({"memory_bytes": 0}, "memory_bytes=0: it is a number of at least 1"),
    ],
)
def test_invalid_arguments_of_a_search_raise_plan_error(
    wrong: dict[str, Any], message: str
) -> None:
    topology = rv.Topology.single_host(2, 5e-6, 20e9)
    with pytest.raises(ss.PlanError, match=message):
        ss.search(graph("mlp", 2), topology=topology, batch=2, **wrong)


@pytest.mark.parametrize("model", ["mlp", "wide_resnet"])
def test_setting_parses_back_from_its_text(model: str, few_moves: None) -> None:
    for setting in every_setting(replace(request(model), samples=(8,))):
        assert Setting.parse(str(setting)) == setting


def test_invalid_text_of_a_setting_is_rejected() -> None:
    with pytest.raises(ss.PlanError, match="width=3 is no choice of auto's plans"):
        Setting.parse("hybrid dp=2 width=3")


@cache
def deep_graph(samples: int) -> ss.Graph:
    """A graph with enough blocks for schedules with two stages per worker."""
    sizes = {"sequence": 16, "layers": 4}
    return ss.capture(build("gpt", **sizes), example_inputs("gpt", samples, **sizes))


ORDERS = ("zero-bubble-h2", "chimera", "dualpipe-v")


@pytest.mark.parametrize(
    "words",
    [
        "tp=2 duplex",
        "dp=2 zero=1 reductions",
        "pp=2 chunks=2",
        *(f"pp=2 schedule={name}" for name in ORDERS),
    ],
)
def test_estimate_from_few_microbatches_is_near_the_full_simulation(words: str) -> None:
    asked = replace(request("gpt"), batch=64, graph_of=deep_graph)
    setting = Setting.parse(f"hybrid {words}")
    how = Filling(setting, asked.profile, 0, 64 // setting.microbatch)
    candidate = Candidate("", setting.microbatch, how)
    whole = evaluate(asked, candidate)
    estimate = evaluate(asked, candidate, Scope(2 if setting.duplex else setting.pp))
    assert (estimate.is_estimate, whole.is_estimate) == (True, False)
    assert estimate.secs == pytest.approx(whole.secs, rel=0.02)


@cache
def uneven_graph(samples: int) -> ss.Graph:
    """A graph whose stages take unequal times, so that pipelines fill slowly."""
    sizes = {"blocks": (3, 4, 6, 3), "base": 64, "image": 224, "width_factor": 4}
    return ss.capture(
        build("wide_resnet", **sizes), example_inputs("wide_resnet", samples, **sizes)
    )


@pytest.mark.parametrize("words", ["chunks=2", "schedule=zero-bubble-v"])
def test_first_looks_at_uneven_pipelines_extrapolate_exactly(words: str) -> None:
    words = f"pp=4 {words}"
    asked = replace(request("wide_resnet", 4), batch=64, graph_of=uneven_graph)
    setting = Setting.parse(f"hybrid {words}")
    proposals = auto(asked)
    proposals._add([setting])
    candidate = proposals._candidate(setting, 1.0)
    estimate, whole = evaluate(asked, candidate, candidate.quick), evaluate(asked, candidate)
    assert (estimate.is_estimate, whole.is_estimate) == (True, False)
    assert estimate.secs == pytest.approx(whole.secs, rel=1e-3)


def timed_search(monkeypatch: pytest.MonkeyPatch, capture_secs: float = 0.0) -> ss.Found:
    """A search of 100 s; full evaluations take 15 s, others 1 s, and estimates get better."""
    now = 0.0

    def capture(samples: int) -> ss.Graph:
        nonlocal now
        now += capture_secs
        return graph("mlp", samples)

    def seen(asked: Request, candidate: Candidate, how: Scope = FULL) -> Trial:
        nonlocal now
        is_full = how in (FULL, EXACT)
        took = 15.0 if is_full else 1.0
        now += took
        secs = float(candidate.name)
        return Trial(candidate, secs, 1, is_estimate=not is_full, evaluation_secs=took)

    monkeypatch.setattr("superscaler_core.evaluation.workers.evaluate", seen)
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("superscaler_core.evaluation.microbatches.time", clock)
    given = (
        Candidate(f"{100 - n}", 1, PLANS["data_parallel"], quick=Scope(1)) for n in range(1000)
    )
    asked = replace(request(), captured=Captured(capture, first=(2,)), clock=clock.monotonic)
    return search_request(asked, lambda _: given, budget_secs=100)


@pytest.mark.parametrize("capture_secs", [0.0, 20.0])
def test_time_budget_includes_captures_and_the_final_full_simulation(
    monkeypatch: pytest.MonkeyPatch, capture_secs: float
) -> None:
    found = timed_search(monkeypatch, capture_secs)
    assert 100 - 15 < found.search_secs <= 100
    assert found.best.evaluation_secs == 15
    assert not found.best.is_estimate
    estimates = [trial.secs for trial in found.tried if trial.is_estimate]
    assert found.secs <= min(estimates) + 1  # of those that there was time for


def search_with_late_estimate(
    monkeypatch: pytest.MonkeyPatch,
    estimate: str,
    progress: Progress | None = None,
    full_secs: float = 36.0,
) -> ss.Found:
    """A search of 35 s: a plan of 582 s is evaluated in full, then there is an estimate.

    A full evaluation at the plan of the estimate takes ``full_secs``.
    """
    now = 0.0

    def seen(asked: Request, candidate: Candidate, how: Scope = FULL) -> Trial:
        nonlocal now
        is_full = how is FULL
        took = 1.0 if candidate.name == "582" else full_secs if is_full else 2.0
        now += took
        return Trial(
            candidate, float(candidate.name), 1, is_estimate=not is_full, evaluation_secs=took
        )

    monkeypatch.setattr("superscaler_core.evaluation.workers.evaluate", seen)
    monkeypatch.setattr("superscaler_core.planners.search.TIMES_LONGER", 30.0)
    given = [
        Candidate("582", 1, PLANS["data_parallel"], guess_secs=1),
        Candidate(estimate, 1, PLANS["data_parallel"], guess_secs=2, quick=Scope(1)),
    ]
    asked = replace(request(), clock=lambda: now)
    return search_request(asked, lambda _: given, budget_secs=35, progress=progress)


@pytest.mark.parametrize(("estimate", "expected"), [("366", 366), ("575", 582)])
def test_search_exceeds_its_budget_only_for_an_estimate_that_is_much_faster(
    monkeypatch: pytest.MonkeyPatch, estimate: str, expected: int
) -> None:
    found = search_with_late_estimate(monkeypatch, estimate)
    assert found.secs == expected
    assert (found.search_secs > 35) == (expected == 366)


def test_search_waits_for_an_estimate_no_longer_than_a_tenth_of_its_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of evaluations in another process, which can be abandoned; here none ends in time."""
    waits: list[float | None] = []

    def wait(self: Workers, timeout_secs: float | None = None) -> Trial | None:
        trial = (
            None if any(how is FULL for _, how in self._here) and waits else own(self, timeout_secs)
        )
        waits.append(timeout_secs)
        return trial

    own = Workers.wait
    monkeypatch.setattr(Workers, "wait", wait)
    monkeypatch.setattr(Workers, "are_apart", True)
    found = search_with_late_estimate(monkeypatch, "366")
    assert found.secs == 582
    assert "perhaps  1 estimate is faster, down to 366 s" in found.summary()
    assert waits[-1] == pytest.approx(35 - 3 + 3.5)


def test_interrupted_search_does_not_go_on_for_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(num: int, waiting: int, best: Trial | None) -> None:
        if num == 2:
            raise KeyboardInterrupt

    found = search_with_late_estimate(monkeypatch, "366", stop)
    assert (found.secs, found.search_secs) == (582, 1 + 2)


def test_last_full_look_may_be_too_long_if_it_can_be_abandoned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = timed_search(monkeypatch)
    monkeypatch.setattr(Workers, "are_apart", True)
    # These evaluations are in this process all the same, so the last one is waited for.
    apart = timed_search(monkeypatch)
    assert len(apart.tried) > len(alone.tried)
    assert apart.search_secs > 100 >= alone.search_secs


def test_a_clock_of_one_process_is_refused_for_several() -> None:
    asked = replace(request(), clock=time.process_time)
    with pytest.raises(ss.PlanError, match=r"num_processes=2 with a clock of one process"):
        search_request(asked, lambda _: [], num_processes=2)


@dataclass(frozen=True)
class Doubled:
    """Graphs of twice as many samples, so that captured graphs differ from resized graphs."""

    def __call__(self, samples: int) -> ss.Graph:
        return graph("mlp", 2 * samples)


def test_worker_evaluates_the_best_plan_on_the_captured_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that has evaluated plans of the model before is faster than the main process."""

    def here(*_: object) -> Trial:
        raise AssertionError("evaluated in this process")

    monkeypatch.setattr("superscaler_core.evaluation.workers.evaluate", here)
    asked = replace(request("mlp", 2), captured=Captured(Doubled()))
    # The search ends without a limit, so that no worker is busy at the end.
    given = [Candidate(f"{n}", n, PLANS["data_parallel"]) for n in (2, 4, 8)]
    found = search_request(asked, lambda _: given, num_processes=2)
    assert found.plan.graph is graph("mlp", 2 * found.best.candidate.samples)
    assert not found.best.is_estimate


@pytest.mark.parametrize("evaluation_secs", [0.0, 30.0])
def test_slightly_faster_candidate_is_fully_simulated_only_at_the_end(
    monkeypatch: pytest.MonkeyPatch, evaluation_secs: float
) -> None:
    """This also holds if evaluations take long and ``max_tried`` is given."""

    def seen(asked: Request, candidate: Candidate, how: Scope = FULL) -> Trial:
        estimate = how is not FULL
        secs = float(candidate.name)
        return Trial(candidate, secs, 1, is_estimate=estimate, evaluation_secs=evaluation_secs)

    monkeypatch.setattr("superscaler_core.evaluation.workers.evaluate", seen)
    given = [
        Candidate(secs, 1, PLANS["data_parallel"], quick=Scope(1))
        for secs in ("10.0", "9.9", "9.8", "5.0", "4.99")
    ]
    found = search_request(request(), lambda _: iter(given), budget_secs=400, max_tried=100)
    assert [(trial.secs, trial.is_estimate) for trial in found.tried] == [
        (10.0, True), (10.0, False),  # the first that fits
        (9.9, True), (9.8, True),
        (5.0, True), (5.0, False),  # much faster
        (4.99, True), (4.99, False),  # the fastest
    ]  # fmt: skip
