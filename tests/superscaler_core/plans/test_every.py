"""Options of every plan: they are known by name and reader, and mean what plans of theirs do."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch

import superscaler_core as ss
from superscaler_core.parallel import SProgram
from superscaler_core.plans import every, option_texts
from tests.superscaler_core.cases import Case
from tests.superscaler_core.parallel.small_nets import batch, net
from tests.superscaler_core.parallel.threads import on_threads


def filled(text: str, num: int = 4, num_microbatches: int = 1, **model: Any) -> ss.Plan:
    plan = ss.Plan(Case("data_parallel", num, **model).compiled().plan.graph, range(num))
    SProgram.of(text)(plan, num_microbatches)
    return plan


def test_every_option_has_a_reader() -> None:
    assert {*every.NAMES} == {*option_texts.EVERY}


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("data_parallel:zero=1", "zero1"),
        ("data_parallel:zero=2", "zero2"),
        ("data_parallel:zero=3", "zero3"),
        ("data_parallel:zero=0", "data_parallel"),
        ("data_parallel:keep=segment_inputs", "recompute"),
        ("zero3:zero=3,shard=4", "zero3:zero=3"),
        ("one_f_one_b:tp=2,zero=1", "hybrid:tp=2,pp=2,zero=1"),
        ("coshard:zero=1", "hybrid:pp=1,microbatches=1,coshard=2,zero=1"),
    ],
)
def test_option_gives_the_decisions_of_the_plan_of_its_name(text: str, same: str) -> None:
    num = 8 if "one_f" in text else 1
    assert filled(text, 4, num).decisions == filled(same, 4, num).decisions


def test_microbatches_accumulate_where_a_plan_has_no_schedule() -> None:
    assert filled("data_parallel:microbatches=2", 2, 2).num_microbatches == 2
    plan = ss.Plan(filled("data_parallel", 2).graph, range(2))
    with pytest.raises(ss.PlanError, match="microbatches=3: the plan has a schedule of its own"):
        every.fill(plan, accumulated, {"microbatches": 3})


def accumulated(plan: ss.Plan) -> None:
    SProgram.of("accumulate:microbatches=2")(plan, 2)


def test_groups_of_shards_replicate_each_other() -> None:
    plan = filled("data_parallel:zero=3,shard=2,overlap=true")
    update = plan.update("layers.0.mlp.up.weight")
    devices = {part.range("d0"): [] for part in plan.parts(update)}
    for part in plan.parts(update):
        devices[part.range("d0")].append(plan.device(part))
    assert [*devices.values()] == [[0, 2], [1, 3]]
    assert plan.overlap == every.OVERLAPPED


@pytest.mark.parametrize("text", ["data_parallel", "megatron", "one_f_one_b:tp=2", "zero3"])
def test_whole_parameters_are_dealt_out_to_devices_that_read_them(text: str) -> None:
    """Each is on one device, and no device has more than the mean and the largest one."""
    joint = "," if ":" in text else ":"
    plan = filled(f"{text}{joint}zero=1,whole=true", 4, 8 if "one_f" in text else 1)
    loads = dict.fromkeys(plan.devices, 0)
    for name, tensor in plan.graph.parameters.items():
        (part,) = plan.parts(plan.update(name))
        owner = plan.device(part)
        assert owner is not None
        (reader, _), *_ = plan.graph.readers[tensor]
        assert owner in plan.op_split(reader).devices
        loads[owner] += prod(tensor.shape)
    largest = max(prod(tensor.shape) for tensor in plan.graph.parameters.values())
    assert max(loads.values()) <= sum(loads.values()) / len(loads) + largest or "one_f" in text


def test_dealt_weights_move_the_bytes_of_zero1() -> None:
    def sent(text: str) -> int:
        return ss.compile(filled(text)).report().sent_bytes

    assert sent("data_parallel:zero=1,whole=true") <= 1.1 * sent("zero1")


def test_experts_are_dealt_out_under_any_plan() -> None:
    plan = filled("zero1:experts=true", 4, model="moe")
    same = filled("hybrid:experts=true,microbatches=1,zero=1", 4, model="moe")
    assert all(plan.op_split(op) == same.op_split(op) for op in plan.graph.ops)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("zero1:zero=4", "zero=4: it is 1"),
        ("zero1:shard=2", "shard=2 is about storage that this option cuts: add zero=1"),
        ("zero1:whole=true", "whole=true is about storage .* a plan that does not cut it"),
        ("zero1:zero=1,shard=3", "shard=3: 4 devices read the same of"),
        ("zero1:experts=true", "has no experts"),
        ("data_parallel:zero=1,zero=2", "zero is said twice"),
        ("best.plan:keep=block_inputs", "a file of decisions says everything"),
    ],
)
def test_wrong_values_are_refused(text: str, words: str) -> None:
    with pytest.raises(ss.PlanError, match=words):
        filled(text)


def test_texts_are_read_for_functions_of_users_too() -> None:
    plan = ss.Plan(filled("data_parallel", 2).graph, range(2))
    SProgram.of(own, {"zero": "3", "overlap": "prefetch 2 reductions"})(plan, 1)
    assert plan.fsdp_units
    assert plan.overlap == ss.Overlap(prefetch=2, reductions=True)
    with pytest.raises(ss.PlanError, match="own:zero=all: expected 1 for states"):
        SProgram.of(own, {"zero": "all"})


def own(plan: ss.Plan) -> None:
    """A function of a user's, which knows nothing of options."""
    for op in plan.graph.ops:
        loops = plan.dims.ids(op, plan.dims.batch)
        num = len(plan.devices)
        plan.op_trans(op, ss.split(loops[0], num) if loops else ss.replicate(num))
        plan.op_assign(op, plan.devices)


@pytest.mark.parametrize(
    "options",
    [
        {"zero": 3, "keep": ss.Keep.BLOCK_INPUTS, "microbatches": 2, "overlap": True},
        {"zero": 1, "whole": True},
        {"zero": 2, "shard": 1, "keep": "segment_inputs"},
    ],
)
def test_plan_of_a_user_with_options_trains_as_one_device(options: dict[str, Any]) -> None:
    alone = net()
    alone(x=batch()).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    want = alone.state_dict()

    def work(parallel: ss.Parallel) -> dict[str, torch.Tensor]:
        parallel.step(x=batch())
        torch.optim.SGD(parallel.parameters(), lr=0.1).step()
        return parallel.state_dict()

    for found in on_threads(net(), {"x": batch()}, 2, work, plan=own, options=options).values():
        for name, value in found.items():
            torch.testing.assert_close(value, want[name], rtol=1e-12, atol=1e-15)
