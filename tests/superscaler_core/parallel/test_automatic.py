"""``parallelize(plan="auto")``: all ranks get one plan, which gives the loss of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import superscaler_core as ss
from superscaler_core.cost import PROFILES
from superscaler_core.front_end import ModelCall
from superscaler_core.parallel import SProgram, automatic
from superscaler_core.parallel.automatic import AutoOptions, searched
from superscaler_core.run import Transport
from superscaler_core.training import in_threads
from tests.superscaler_core.cases import Case
from tests.superscaler_core.parallel.test_sample_flow import batch, model
from tests.superscaler_core.parallel.threads import on_threads

CASE = Case("data_parallel", 4, model="mlp", batch=8)


def on_ranks(num: int, *, memory_limit: int | None = None, **options: int) -> dict[int, SProgram]:
    call = ModelCall.of(CASE.new_model(), CASE.inputs(0))
    # Made before the threads: making one seeds torch, which a capture in another thread refuses.
    models = [CASE.new_model() for _ in range(num)]

    def search(transport: Transport) -> SProgram:
        device = torch.device("cpu")
        limit, chosen = memory_limit, AutoOptions(**options)
        return searched(
            models[transport.rank], call, num, transport, device, memory_limit=limit, options=chosen
        )

    return in_threads(search, range(num))


def test_all_ranks_get_the_same_plan() -> None:
    found = on_ranks(3, max_tried=4)
    assert len({str(sprogram.function.setting) for sprogram in found.values()}) == 1


def test_infeasible_memory_limit_raises_plan_error_without_deadlock() -> None:
    with pytest.raises(ss.PlanError, match="no plan was found for 2 devices"):
        on_ranks(2, max_tried=3, memory_limit=100)


@pytest.mark.parametrize(
    "error, of_others", [(ss.CoverageError("why"), ss.CoverageError), (KeyError("why"), KeyError)]
)
def test_error_of_the_search_is_raised_on_all_ranks(
    error: Exception, of_others: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(automatic, "search", fail)
    call = ModelCall.of(CASE.new_model(), CASE.inputs(0))

    def work(transport: Transport) -> None:
        wanted = of_others if transport.rank else type(error)
        with pytest.raises(wanted, match="why"):
            searched(CASE.new_model(), call, 2, transport, torch.device("cpu"))

    in_threads(work, range(2), timeout_secs=10)


def test_loss_under_the_searched_plan_equals_that_of_one_device() -> None:
    sprogram = on_ranks(4, max_tried=6)[0]
    model, names = CASE.new_model(), ("x", "target")
    example = dict(zip(names, CASE.inputs(0), strict=True))

    def step(parallel: ss.Parallel) -> float:
        return parallel.step(**example).item()

    losses = on_threads(model, example, 4, step, plan=sprogram.function, options=sprogram.options)
    assert list(losses.values()) == pytest.approx([model(**example).item()] * 4)


def test_loss_that_mixes_samples_gets_a_plan_without_microbatches() -> None:
    module, given = model("pairs"), batch()
    found = ss.parallelize(module, kwargs=given, plan="auto", options={"max_tried": 2})
    assert found.compiled.plan.num_microbatches == 1
    assert found.step(**given).item() == pytest.approx(module(**given).item(), rel=1e-12)


def test_samples_of_a_ranks_own_need_a_named_plan() -> None:
    with pytest.raises(ss.PlanError, match="name a plan"):
        ss.parallelize(model("mean"), kwargs=batch(), plan="auto", batch=ss.Batch(kind="local"))


@pytest.mark.parametrize(
    "options, match",
    [
        ({"profile": "a1000"}, "there is no profile 'a1000'; there are .*a100"),
        ({"profile": 3}, "auto takes profile as a DeviceProfile or the name of one"),
        ({"tp": 2}, "auto takes no tp; it takes profile, budget_secs, max_tried"),
        ({"budget_secs": "5"}, "auto takes budget_secs as a number from 0, not '5'"),
        ({"max_tried": -1}, "auto takes max_tried as a number from 0, not -1"),
    ],
)
def test_options_that_are_not_known_raise_plan_error(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ss.PlanError, match=match):
        ss.parallelize(CASE.new_model(), CASE.inputs(0), plan="auto", options=options)


def test_profile_may_be_the_name_of_a_preset() -> None:
    assert AutoOptions(profile="a100").profile is PROFILES["a100"]


def test_options_are_read_from_the_text_of_the_plan() -> None:
    found = AutoOptions.of("auto:budget_secs=5,profile=a100", {"max_tried": 7})
    assert (found.budget_secs, found.max_tried) == (5.0, 7)
    assert found.profile is PROFILES["a100"]
    assert AutoOptions.of("auto", None) == AutoOptions()
    for text, words in (
        ("auto:budget=5", "auto takes no budget; it takes profile, budget_secs, max_tried"),
        ("auto:5", "expected auto:OPTION=VALUE"),
        ("auto:budget_secs=long", "auto takes budget_secs as a number from 0, not 'long'"),
    ):
        with pytest.raises(ss.PlanError, match=words):
            AutoOptions.of(text, None)
