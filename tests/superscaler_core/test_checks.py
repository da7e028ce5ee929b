"""Checks: a wrong value is refused by name, with the right ones, wherever it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.checks import at_least, one_of
from superscaler_core.models import build, example_inputs
from superscaler_core.plans import PLANS

HOST = rv.Topology.single_host(2, 5e-6, 200e9)


def captured() -> ss.Graph:
    return ss.capture(build("mlp", layers=4), example_inputs("mlp", 6, layers=4))


def compiled(**options: Any) -> object:
    plan = ss.Plan(captured(), range(2))
    PLANS["data_parallel"](plan)
    return ss.compile(plan, **options)


def searched(**options: Any) -> object:
    how = {"topology": HOST, "batch": 6, "budget_secs": 1.0, "max_tried": 1} | options
    return ss.search(captured(), **how)


def costs(**options: Any) -> object:
    return ss.CostModel(captured(), ss.cost.PROFILES["v100"], HOST, **options)


def hybrid(**options: Any) -> None:
    PLANS["hybrid"](ss.Plan(captured(), range(2)), **options)


@pytest.mark.parametrize("use", [compiled, searched, costs])
@pytest.mark.parametrize(
    ("option", "given", "words"),
    [
        ("optimizer", "adamm", "no optimizer 'adamm'; there are sgd, .* Is it adam"),
        ("optimizer", None, "no optimizer None; there are sgd"),
        ("precision", "float32", r"precision='float32': it is an ss.Precision, such as"),
    ],
)
def test_wrong_optimizers_and_precisions_are_refused_everywhere(
    use: Callable[..., object], option: str, given: object, words: str
) -> None:
    with pytest.raises(ss.PlanError, match=words):
        use(**{option: given})


@pytest.mark.parametrize("dtype", ["int8", torch.int8])
def test_dtypes_that_optimizers_do_not_update_are_refused(dtype: str | torch.dtype) -> None:
    with pytest.raises(ss.PlanError, match="no dtype of stored parameters 'int8'; there are float"):
        ss.Precision(dtype)


def test_a_dtype_of_torch_is_as_good_as_its_name() -> None:
    assert ss.Precision(torch.float32) == ss.Precision("float32")


@pytest.mark.parametrize(
    ("use", "options", "words"),
    [
        (searched, {"planner": "autoo"}, "no planner 'autoo'; there are auto, .* Is it auto"),
        (searched, {"profile": "v1000"}, "no profile 'v1000'; there are v100"),
        (searched, {"samples": (4,)}, r"samples=\(4,\): a captured graph has one size, 6 samples"),
        (searched, {"samples": (0,)}, "samples=0: it is a whole number of at least 1"),
        (searched, {"recycle": -1}, "recycle=-1: it is a whole number of at least 0"),
        (searched, {"num_processes": 0}, "num_processes=0: .* at least 1"),
        (searched, {"budget_secs": "1m"}, "budget_secs='1m': it is a number of at least 0"),
        (searched, {"budget_secs": float("nan")}, "budget_secs=nan: it is a number"),
        (searched, {"max_tried": 1.5}, "max_tried=1.5: it is a whole number"),
        (searched, {"max_tried": True}, "max_tried=True: it is a whole number"),
        (searched, {"memory_bytes": "32GiB"}, "memory_bytes='32GiB': it is a number"),
        (searched, {"batch": 0}, "batch=0: it is a whole number of at least 1"),
        (searched, {"topology": "v100"}, "topology='v100': it is an rvdcomm.Topology"),
        (searched, {"budget": 3}, "no option of search 'budget'; .* Is it budget_secs"),
        (hybrid, {"schedule": "1f1bb"}, "no schedule '1f1bb'; there are naive, .* Is it 1f1b"),
        (hybrid, {"keep": "block_inputss"}, "no level of Keep 'block_inputss'; .* Is it block_inp"),
        (hybrid, {"tp": "2"}, "tp='2': it is a whole number of at least 1"),
        (ss.Overlap, {"prefetch": -1}, "prefetch=-1: it is a whole number of at least 0"),
        (ss.Overlap, {"bucket_bytes": "1MiB"}, "bucket_bytes='1MiB': it is a whole number"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_what_would_be_right(
    use: Callable[..., object], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ss.PlanError, match=words):
        use(**options)


@pytest.mark.parametrize("missing", ["topology", "batch"])
def test_what_a_search_cannot_do_without_is_asked_for(missing: str) -> None:
    how = {name: value for name, value in {"topology": HOST, "batch": 6}.items() if name != missing}
    with pytest.raises(ss.PlanError, match=f"search takes {missing}"):
        ss.search(captured(), **how)


def test_a_search_is_a_value_of_which_options_replace_some() -> None:
    asked = ss.Search(topology=HOST, batch=6, budget_secs=1.0, max_tried=2)
    found = ss.search(captured(), None, asked, max_tried=1)
    assert len(found.tried) <= 2
    assert asked.max_tried == 2


@pytest.mark.parametrize("value", [np.int64(3), 3])
def test_whole_numbers_of_numpy_are_whole_numbers(value: object) -> None:
    at_least(3, value=value)
    at_least(2.5, value=value)


def test_a_known_name_is_returned() -> None:
    assert one_of("plan", "b", iter("abc")) == "b"
