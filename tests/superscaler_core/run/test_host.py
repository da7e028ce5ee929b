"""Host memory: parameters that are stored there, and activations that are swapped there."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import superscaler_core as ss
from superscaler_core.report import split_text
from superscaler_core.run.host import ActivationOffload, Offloaded
from tests.superscaler_core.cases import Case, difference, train
from tests.superscaler_core.recorder import Recorder

MLP = {"inputs": 8, "hidden": 16, "outputs": 8, "layers": 4}
"""All sizes are multiples of the devices, so that volumes are exact."""


def steps(
    case: Case, compiled: ss.Compiled, folder: Path, num_steps: int = 1, **options: Any
) -> tuple[Recorder, list[ss.Trainer]]:
    """Some steps without an optimizer; returns the copies that were made, and all trainers."""
    host = Recorder()
    start = case.new_model().state_dict()

    def work(trainer: ss.Trainer) -> ss.Trainer:
        trainer.load_state_dict(start)
        for seed in range(num_steps):
            trainer.step(*case.inputs(seed, trainer.num_microbatches))
        return trainer

    ranks = range(case.num_devices)
    found = ss.run_threads(compiled.save(folder), work, ranks, host=host, **options)
    return host, list(found.values())


def weights_of(compiled: ss.Compiled) -> int:
    """Elements of all parameters."""
    return sum(t.box.num_elements for t in compiled.plan.graph.parameters.values())


# --- storage ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["data_parallel", "zero2", "zero3"])
def test_parameters_on_the_host_share_no_memory_with_device_copies(
    name: str, tmp_path: Path
) -> None:
    case = Case(name, 2)
    plan = case.compiled().plan
    plan.store_on_host()
    host, trainers = steps(case, ss.compile(plan), tmp_path)
    came = {tensor.untyped_storage() for tensor in host.on_host}
    for trainer in trainers:
        copies = trainer._rank.weights._copies.values()
        on_device = {copy.untyped_storage() for copy in copies}
        for parameter in trainer.parameters():
            assert parameter.untyped_storage() not in on_device
            assert parameter.grad is not None
            # There is one microbatch and one window, so that gradients are copies and not sums.
            assert parameter.grad.untyped_storage() in came


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(("name", "times"), [("zero_offload", 1), ("zero3_offload", 2)])
def test_step_sends_gradients_to_the_host_and_fetches_weights_from_it(
    name: str, times: int, microbatches: int, tmp_path: Path
) -> None:
    case = Case(name, 4, model="mlp", sizes=MLP)
    plan = case.compiled().plan
    plan.op_order(ss.SCHEDULES["1f1b"](1, microbatches))
    compiled = ss.compile(plan)
    host, _ = steps(case, compiled, tmp_path)
    whole = 8 * weights_of(compiled)
    # Under ZeRO 3 weights are fetched for the forward and the backward of every window.
    assert host.fetched_bytes == times * (microbatches if times > 1 else 1) * whole
    assert host.sent_bytes == microbatches * whole


def test_weights_are_fetched_from_the_host_in_the_compute_dtype(tmp_path: Path) -> None:
    case = Case("zero_offload", 2, model="mlp", sizes=MLP, dtype="bfloat16")
    compiled = case.compiled()
    host, trainers = steps(case, compiled, tmp_path, dtype=torch.float32)
    assert {weight.dtype for trainer in trainers for weight in trainer.parameters()} == {
        torch.float32
    }
    assert host.fetched_bytes == 2 * weights_of(compiled)
    assert host.sent_bytes == 4 * weights_of(compiled)


@pytest.mark.parametrize("name", ["zero_offload", "zero3_offload"])
def test_offload_has_the_device_communication_of_zero(name: str) -> None:
    other = {"zero_offload": "zero2", "zero3_offload": "zero3"}[name]
    rows = [
        [row.cells() for row in Case(plan, 4).compiled().report().rows] for plan in (name, other)
    ]
    assert rows[0] == rows[1]


def test_parameters_that_match_no_pattern_stay_on_the_device(tmp_path: Path) -> None:
    case = Case("data_parallel", 2)
    plan = case.compiled().plan
    plan.store_on_host("*.mlp.*", "head.weight")
    compiled = ss.compile(plan)
    host, trainers = steps(case, compiled, tmp_path)
    inside = {n for n in plan.graph.parameters if ".mlp." in n or n == "head.weight"}
    assert plan.on_host == inside
    came = {tensor.untyped_storage() for tensor in host.on_host}
    for name, parameter in trainers[0].named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad.untyped_storage() in came) == (name in inside)


def test_clipping_and_checkpoints_are_the_same_with_host_storage(tmp_path: Path) -> None:
    def work(trainer: ss.Trainer) -> tuple[float, dict[str, torch.Tensor]]:
        trainer.load_state_dict(start)
        trainer.step(*case.inputs(0))
        norm = trainer.clip_grad_norm_(0.5)
        torch.optim.SGD(trainer.parameters(), lr=0.1).step()
        trainer.save(tmp_path / trainer_name / "checkpoint")
        before = trainer.state_dict()
        torch.optim.SGD(trainer.parameters(), lr=0.1).step()
        trainer.load(tmp_path / trainer_name / "checkpoint")
        after = trainer.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        return norm.item(), after

    found = []
    for trainer_name in ("zero3", "zero3_offload"):
        case = Case(trainer_name, 2)
        start = case.new_model().state_dict()
        folder = case.compiled().save(tmp_path / trainer_name)
        found += ss.run_threads(folder, work, range(2)).values()
    norms, states = zip(*found, strict=True)
    assert len(set(norms)) == 1
    assert norms[0] > 0.5
    for state in states[1:]:
        assert all(torch.equal(state[name], value) for name, value in states[0].items())


# --- swapping -----------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [ss.Keep.EVERYTHING, ss.Keep.SEGMENT_INPUTS])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_swapped_bytes_are_those_of_the_planned_activations(
    keep: ss.Keep, microbatches: int, tmp_path: Path
) -> None:
    case = Case("swap", 1, {"keep": keep}, model="mlp", sizes=MLP)
    plan = case.compiled().plan
    plan.op_order(ss.SCHEDULES["gpipe"](1, microbatches))
    compiled = ss.compile(plan)
    host, _ = steps(case, compiled, tmp_path)
    # The inputs of three of 4 layers (the model's input is not swapped), and of three gelus.
    num_hidden = 6 if keep is ss.Keep.EVERYTHING else 3
    assert host.sent_bytes == microbatches * num_hidden * case.batch * 16 * 8
    assert compiled.memory[0].host_bytes == host.sent_bytes


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_prefetch_depth_determines_how_many_swapped_groups_are_on_the_device(
    depth: int, tmp_path: Path
) -> None:
    overlap = ss.Overlap(prefetch=depth)
    case = Case("swap", 1, sizes={"layers": 5}, overlap=overlap)
    host, _ = steps(case, case.compiled(), tmp_path)
    assert host.fetched_bytes == host.sent_bytes
    # All layers send the same number of bytes.
    most = max(copied.fetched_alive_bytes + copied.num_bytes for copied in host.fetched)
    assert most == (1 + max(1, depth)) * host.sent_bytes // 5
    assert [copied.sent_alive_bytes for copied in host.fetched] == [0] * len(host.fetched)


@pytest.mark.parametrize("unit", [False, True])
def test_weights_constants_and_inputs_are_not_swapped(unit: bool, tmp_path: Path) -> None:
    case = Case("swap", 1)
    plan = case.compiled().plan
    if unit:
        plan.unshard(*ss.find_blocks(plan.graph).groups)
    batch = case.inputs(0)

    def work(trainer: ss.Trainer) -> ss.Trainer:
        trainer.load_state_dict(case.new_model().state_dict())
        trainer.step(*batch)
        return trainer

    host = Recorder()
    folder = ss.compile(plan).save(tmp_path)
    (trainer,) = ss.run_threads(folder, work, range(1), host=host).values()
    rank = trainer._rank
    assert host.sent_bytes > 0
    assert not host.has_sent([*rank.weights._copies.values(), *rank._constants.values(), *batch])


def there_and_back(offloaded: Offloaded) -> None:
    for act in (offloaded.send, offloaded.leave, offloaded.fetch, offloaded.arrive):
        act()


def test_shared_memory_is_swapped_once_for_all_its_views() -> None:
    host = Recorder()
    swap = ActivationOffload(host)
    whole = torch.arange(24.0).reshape(4, 6)
    looks = [whole, whole.t(), whole[1:3, ::2], whole.detach(), whole.view(torch.int32)[2]]
    weight = torch.ones(3)
    first, second = swap.offloaded([weight]), swap.offloaded([])
    kept = [first.pack(look) for look in (*looks, weight[1:])]
    again = second.pack(whole[2])
    for offloaded in (first, second):
        there_and_back(offloaded)
    assert [copied.num_bytes for copied in host.sent] == [whole.nbytes]
    for one, look in zip(kept, (*looks, weight[1:]), strict=True):
        found = first.unpack(one)
        assert torch.equal(found, look)
        assert (found.dtype, found.stride()) == (look.dtype, look.stride())
    assert torch.equal(second.unpack(again), whole[2])
    assert first.unpack(kept[0]).data_ptr() != whole.data_ptr()
    assert first.unpack(kept[-1]).data_ptr() == weight[1:].data_ptr()
    assert len(host.fetched) == 2  # once for each parcel


# --- combinations -------------------------------------------------------------------------------


HYBRID = {"tp": 2, "pp": 2, "microbatches": 3, "zero": 1, "sequence": True}


@pytest.mark.parametrize(
    "case",
    [Case("hybrid", 4, HYBRID, sizes={"layers": 3}), Case("zero3", 2, sizes={"dropout": 0.3})],
    ids=str,
)
def test_swap_recompute_and_host_storage_do_not_change_results(case: Case, tmp_path: Path) -> None:
    start = case.new_model().state_dict()
    plain = case.compiled()
    plan = case.compiled().plan
    first, *others = ss.find_blocks(plan.graph).all
    plan.offload(first, *others)
    plan.recompute(first)
    plan.store_on_host("*.attn.*", "embed.*")
    work, ranks = partial(train, case=case, state=start), range(case.num_devices)
    found = [
        ss.run_threads(compiled.save(tmp_path / name), work, ranks).values()
        for name, compiled in {"plain": plain, "placed": ss.compile(plan)}.items()
    ]
    for ours, theirs in zip(*found, strict=True):
        assert difference(ours, theirs, 1e-3) <= 1e-12


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [2, 4])
@pytest.mark.parametrize("name", ["zero_offload", "zero3_offload"])
def test_bytes_per_parameter_on_device_and_host_are_those_of_zero_offload(
    name: str, num: int
) -> None:
    case = Case(name, num, model="mlp", sizes={**MLP, "layers": 8}, dtype="bfloat16")
    compiled = ss.compile(case.compiled().plan, precision=ss.Precision("float32"), optimizer="adam")
    num_parameters = weights_of(compiled)
    for memory in compiled.memory.values():
        # Float32 weights, gradients and two states; ZeRO's table has 14 with gradients of 2 bytes.
        assert memory.host_bytes == 16 * num_parameters // num
        assert memory.optimizer_bytes == 0
        if name == "zero_offload":
            assert memory.weights_bytes == 2 * num_parameters
        else:
            # The weights of a layer, of 8.
            assert memory.weights_bytes <= 2 * (16 * 16 + 16)


@pytest.mark.parametrize("model", ["moe", "wide_resnet"])
def test_estimated_host_memory_equals_the_bytes_that_a_step_sends(
    model: str, tmp_path: Path
) -> None:
    case = Case("swap", 1, model=model, dtype="float32")
    compiled = case.compiled()
    host, _ = steps(case, compiled, tmp_path)
    assert compiled.memory[0].host_bytes == host.sent_bytes


@pytest.mark.parametrize(("name", "shown"), [("zero_offload", True), ("zero2", False)])
def test_report_shows_host_memory_only_if_it_is_used(name: str, shown: bool) -> None:
    compiled = Case(name, 2).compiled()
    lines = str(compiled.report()).splitlines()
    header = lines[lines.index("memory") + 1].split()
    assert (header[-1] == "host") == shown
    assert ("on the host" in str(compiled.memory[0])) == shown


def test_explanation_marks_swapped_ops() -> None:
    plan = Case("swap", 2, {"keep": ss.Keep.SEGMENT_INPUTS}).compiled().plan
    rows = {op.module: split_text(plan, op) for op in plan.graph.ops}
    assert rows["layers.1.mlp.up"] == "b/2, again, swapped"
    assert "swapped" not in rows["head"]


# --- errors -------------------------------------------------------------------------------------


def test_a_pattern_that_fits_no_parameter_is_refused() -> None:
    plan = ss.Plan(Case("zero2", 2).compiled().plan.graph, range(2))
    with pytest.raises(ss.PlanError, match=r"no parameter that fits 'h\.\*'; it has embed\.weight"):
        plan.store_on_host("*.mlp.*", "h.*")


def test_a_group_without_ops_is_refused() -> None:
    plan = ss.Plan(Case("zero2", 2).compiled().plan.graph, range(2))
    with pytest.raises(ss.PlanError, match="offload of a group without ops"):
        plan.offload(plan.graph.ops[:3], [])
