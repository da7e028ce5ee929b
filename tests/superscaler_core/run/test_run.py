from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.plans import shard_storage
from superscaler_core.run.evaluate import evaluate
from superscaler_core.run.transport import Board, ThreadTransport
from tests.superscaler_core.small import on_one, two_linears

GRAPH = two_linears()


def state(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(tensor.shape, dtype=torch.float64, generator=generator).to(dtype)
        for name, tensor in GRAPH.parameters.items()
    }


def inputs(rows: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(rows, 6, dtype=torch.float64, generator=generator).to(dtype)


def batch_split(graph: ss.Graph = GRAPH, num_microbatches: int = 1) -> ss.Plan:
    plan = ss.Plan(graph, [0, 1])
    for op in graph.ops:
        plan.spread(op, plan.devices, [ss.Axis(2, (plan.dims.batch,))])
    plan.op_order(ss.SCHEDULES["1f1b"](1, num_microbatches))
    return plan


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return ss.compile(batch_split()).save(tmp_path / "program")


@pytest.mark.parametrize("limit, num_buckets", [(88, 1), (87, 2), (1, 2)])
def test_transfers_of_weights_in_buckets_give_the_same_gradients(
    tmp_path: Path, limit: int, num_buckets: int
) -> None:
    plan = batch_split()
    shard_storage(plan)
    plan.overlap = ss.Overlap(bucket_bytes=8 * limit)
    compiled = ss.compile(plan)
    program = compiled.step_program
    assert [i.name for i in program.begin] == [f"f{n}" for n in range(num_buckets)]
    reduced = [f"r{n}" for n in range(num_buckets)]
    assert [i.name for i in program.end] == [*reduced, "loss", "stage0"]

    def work(trainer: ss.Trainer) -> tuple[float, dict[str, Tensor]]:
        trainer.load_state_dict(state())
        loss = trainer.step(inputs(4)).item()
        return loss, {n: p.grad for n, p in trainer.named_parameters() if p.grad is not None}

    parameters = {name: value.requires_grad_() for name, value in state().items()}
    expected = evaluate(GRAPH, (inputs(4),), parameters)
    expected.backward()
    found = ss.run_threads(compiled.save(tmp_path), work, range(2))
    assert all(loss == pytest.approx(expected.item(), rel=1e-14) for loss, _ in found.values())
    for name, dim in {"up.weight": 0, "down.weight": 1}.items():
        whole = torch.cat([found[rank][1][name] for rank in range(2)], dim)
        torch.testing.assert_close(whole, parameters[name].grad, rtol=1e-13, atol=1e-14)


def stored_apart(plan: ss.Plan) -> ss.Plan:
    """Parameters cut over the devices: ZeRO 1."""
    for name in plan.graph.parameters:
        plan.op_assign(plan.op_trans(plan.update(name), ss.split("d0", 2)), plan.devices)
    return plan


@pytest.mark.parametrize(
    "given, got", [(inputs(4), r"\[4, 6\] float64"), (inputs(12).float(), r"\[12, 6\] float32")]
)
def test_a_batch_of_another_size_or_dtype_is_refused(
    given: Tensor, got: str, tmp_path: Path
) -> None:
    folder = ss.compile(batch_split(num_microbatches=3)).save(tmp_path)
    match = rf"input 'x' got {got}; a step takes \[12, 6\] float64: 3 microbatches of \[4, 6\]"
    with pytest.raises(ValueError, match=match):
        ss.run_threads(folder, lambda trainer: trainer.step(given), range(2))


def test_extra_input_raises_value_error(program: Path) -> None:
    with pytest.raises(ValueError, match=r"step takes 1 inputs \(x\), got 2"):
        ss.run_threads(program, lambda trainer: trainer.step(inputs(4), inputs(4)), range(2))


@pytest.mark.parametrize("name", ["x", "y"])
def test_input_given_twice_or_unknown_raises_value_error(name: str, program: Path) -> None:
    with pytest.raises(ValueError, match=f"step got {name} by name; after 1 inputs .* none"):
        ss.run_threads(program, lambda t: t.step(inputs(4), **{name: inputs(4)}), range(2))


def test_unknown_rank_raises_plan_error(program: Path) -> None:
    with pytest.raises(ss.PlanError, match=r"no program for rank 2; it has ranks \[0, 1\]"):
        ss.run_threads(program, lambda trainer: None, range(3), timeout_secs=1)


def test_process_group_smaller_than_the_program_raises_plan_error(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda group=None: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group=None: 1)
    with pytest.raises(ss.PlanError, match="a program of 2 ranks and the group has 1: start as"):
        ss.load(program)


def test_a_rank_that_fails_stops_the_others(program: Path) -> None:
    def work(trainer: ss.Trainer) -> None:
        if trainer.rank == 1:
            raise RuntimeError("a disk is full")
        trainer.load_state_dict(state())
        trainer.step(inputs(4))

    with pytest.raises(RuntimeError, match="a disk is full"):
        ss.run_threads(program, work, range(2))


def test_saving_a_smaller_program_removes_the_files_of_a_larger_one(program: Path) -> None:
    ss.compile(on_one(ss.Plan(GRAPH, [0]))).save(program)
    assert [path.name for path in program.glob("rank_*.py")] == ["rank_0.py"]


def test_program_is_loaded_with_its_saved_topology_unless_another_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[rv.Topology | None] = []

    class Remembers(ThreadTransport):
        def __init__(self, rank: int, group: object, topology: rv.Topology | None) -> None:
            super().__init__(rank, Board())
            seen.append(topology)
            raise InterruptedError("the rest of a load needs the other ranks")

    def load(folder: Path, **options: rv.Topology) -> None:
        with pytest.raises(InterruptedError):
            ss.load(folder, **options)

    monkeypatch.setattr("superscaler_core.training.load.DistTransport", Remembers)
    monkeypatch.setattr("torch.distributed.get_rank", lambda group=None: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group=None: 2)
    slow = rv.Topology.single_host(2, alpha_secs=1e-3, bytes_per_sec=1e6)
    other = rv.Topology.single_host(2, alpha_secs=1e-6, bytes_per_sec=1e9)
    load(ss.compile(batch_split(), topology=slow).save(tmp_path))
    load(tmp_path, topology=other)
    load(ss.compile(batch_split()).save(tmp_path))
    assert seen == [slow, other, None]


# --- mixed precision ----------------------------------------------------------------------------


@pytest.mark.parametrize("unit", [None, "unshard", "reduce_grads"])
@pytest.mark.parametrize("sharded", [False, True])
def test_float32_master_weights_accumulate_small_updates(
    tmp_path: Path, unit: str | None, sharded: bool
) -> None:
    """A bfloat16 weight of 1 does not move by 1e-3; its float32 master does, 20 times."""
    graph = two_linears_in("bfloat16")
    plan = batch_split(graph, num_microbatches=2)
    if sharded:
        stored_apart(plan)
    if unit is not None:
        getattr(plan, unit)(graph.ops)
    folder = ss.compile(plan).save(tmp_path)

    def work(trainer: ss.Trainer) -> tuple[Tensor, set[torch.dtype]]:
        trainer.load_state_dict(state())
        for _ in range(20):
            loss = trainer.step(inputs(8, torch.bfloat16))
            assert loss.dtype == torch.bfloat16
            for weight in trainer.parameters():
                assert weight.grad is not None
                weight.data -= 5e-5 * weight.grad.sign()
        dtypes = {weight.dtype for weight in trainer.parameters()}
        return trainer.state_dict()["up.weight"], dtypes

    results = ss.run_threads(folder, work, range(2), dtype=torch.float32)
    for weight, dtypes in results.values():
        assert dtypes == {torch.float32}
        assert (weight - state(torch.float32)["up.weight"]).abs().median().item() > 5e-4


def two_linears_in(dtype: str) -> ss.Graph:
    graph = GRAPH
    builder = ss.GraphBuilder("two_linears")
    tensors = {
        **{t: builder.parameter(t.name, t.shape, dtype) for t in graph.parameters.values()},
        **{t: builder.input(t.name, t.shape, dtype) for t in graph.inputs},
    }
    for op in graph.ops:
        results = builder.op(
            op.kind, op.annotation, [tensors[t] for t in op.inputs],
            [(t.shape, dtype) for t in op.outputs], op.code, module=op.module,
        )  # fmt: skip
        tensors |= dict(zip(op.outputs, results, strict=True))
    assert replace(graph.loss, dtype=dtype) == tensors[graph.loss]
    return builder.build(tensors[graph.loss])


def test_gradients_of_microbatches_are_added_in_the_dtype_of_master_weights(tmp_path: Path) -> None:
    graph = two_linears_in("bfloat16")
    folder = ss.compile(batch_split(graph, num_microbatches=16)).save(tmp_path)
    x, weights = inputs(64, torch.bfloat16), state(torch.bfloat16)
    grads = torch.zeros(8, 6)
    for part in x.split(2):
        leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
        half = torch.cat([part, torch.zeros_like(part)])
        (evaluate(graph, (half,), leaves) / 16).backward()
        grads += leaves["up.weight"].grad.float()

    def work(trainer: ss.Trainer) -> Tensor:
        trainer.load_state_dict(weights)
        trainer.step(x)
        grad = dict(trainer.named_parameters())["up.weight"].grad
        assert grad is not None
        return grad

    for grad in ss.run_threads(folder, work, range(2), dtype=torch.float32).values():
        torch.testing.assert_close(grad, grads, rtol=1e-5, atol=1e-5)
