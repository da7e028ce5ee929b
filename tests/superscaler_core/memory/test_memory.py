"""Memory: ZeRO's bytes per parameter, Megatron's activations per layer, microbatches in flight.

The file test_footprint.py tests that a step takes the predicted memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

import superscaler_core as ss
from superscaler_core import models, plans
from superscaler_core.memory.footprint import footprints
from superscaler_core.memory.held import held_of, in_flight
from superscaler_core.memory.stored import StoredMemory

SMALL = {"width": 32, "heads": 4, "sequence": 16, "vocabulary": 48}
BATCH = 4


@cache
def graph_of(name: str = "gpt", dtype: str = "float32", **sizes: Any) -> ss.Graph:
    with torch.device("meta"):
        model = models.build(name, **sizes).to(getattr(torch, dtype))
    return ss.capture(model, models.example_inputs(name, BATCH, **sizes))


def compiled(graph: ss.Graph, plan_name: str, num_devices: int, **how: Any) -> ss.Compiled:
    options = how.pop("options", {})
    plan = ss.Plan(graph, range(num_devices))
    if plan_name == "single":
        for op in graph.ops:
            plan.op_assign(op, 0)
    else:
        plans.fill(plan, plans.PLANS[plan_name], options)
    return ss.compile(plan, **how)


# --- parameters ---------------------------------------------------------------------------------

# Bytes per parameter of weights, grads and optimizer; each is (a, b) for a + b / num_devices. The
# model is in bfloat16, storage and gradients are in float32, and the optimizer is Adam. The float32
# storage is counted as weights.
ZERO = {
    "data_parallel": ((6, 0), (4, 0), (8, 0)),
    "zero1": ((2, 4), (4, 0), (0, 8)),
    "zero2": ((2, 4), (0, 4), (0, 8)),
    "zero3": ((0, 4), (0, 4), (0, 8)),
}
# ZeRO's published table has 2 bytes of gradients; in stage 3, it has 2 bytes of weights besides
# float32.
SEED = {"data_parallel": (16, 0), "zero1": (4, 12), "zero2": (2, 14), "zero3": (0, 16)}
MORE = {"data_parallel": (2, 0), "zero1": (2, 0), "zero2": (0, 2), "zero3": (0, 0)}
FIGURES = {"data_parallel": 120, "zero1": 31.4, "zero2": 16.6, "zero3": 1.875}
"""Published gigabytes per device, for 7.5e9 parameters on 64 devices."""


def coefficients(plan_name: str) -> list[tuple[float, float]]:
    """The (a, b) of every kind, solved from the bytes on 2 and 4 devices, without open windows."""
    graph = graph_of(dtype="bfloat16", layers=3, **SMALL)
    params = sum(t.box.num_elements for t in graph.parameters.values())
    found = {n: mean_bytes(graph, plan_name, n) for n in (2, 4)}
    solved = []
    for two, four in zip(found[2], found[4], strict=True):
        b = (two - four) / (1 / 2 - 1 / 4) / params
        solved.append((two / params - b / 2, b))
    return solved


def mean_bytes(graph: ss.Graph, plan_name: str, num_devices: int) -> list[float]:
    """Mean bytes of weights, gradients and optimizer states of a device, without open windows."""
    made = compiled(graph, plan_name, num_devices, precision=ss.Precision("float32"))
    stored = StoredMemory(made.materialized, made.precision)
    kinds = [
        [stored.resting_bytes(device) for device in range(num_devices)],
        [grads_bytes(made, device) for device in range(num_devices)],
        [memory.optimizer_bytes for memory in made.memory.values()],
    ]
    return [sum(kind) / len(kind) for kind in kinds]


def grads_bytes(made: ss.Compiled, device: int) -> int:
    """Bytes of the gradients of weights after the backward, in float32."""
    backward = footprints(made.materialized, device, made.precision)["B", 0]
    return sum(backward.grads.values())


@pytest.mark.parametrize("plan_name", ZERO)
def test_bytes_per_parameter_equal_those_of_zero(plan_name: str) -> None:
    """Only the float32 gradients differ from the published table."""
    found = coefficients(plan_name)
    for kind, expected in zip(found, ZERO[plan_name], strict=True):
        assert kind == pytest.approx(expected, abs=1e-9)
    a, b = (sum(part) for part in zip(*found, strict=True))
    more = MORE[plan_name]
    assert (a - more[0], b - more[1]) == pytest.approx(SEED[plan_name], abs=1e-9)
    on_64 = (a - more[0] + (b - more[1]) / 64) * 7.5
    assert on_64 == pytest.approx(FIGURES[plan_name], abs=0.05)


@pytest.mark.parametrize("optimizer, states", [("sgd", 0), ("momentum", 1), ("adam", 2)])
@pytest.mark.parametrize("master, item_bytes", [(None, 4), ("float64", 8)])
def test_optimizer_states_have_the_size_and_dtype_of_stored_weights(
    optimizer: str, states: int, master: str | None, item_bytes: int
) -> None:
    graph = graph_of("mlp")
    params = sum(t.box.num_elements for t in graph.parameters.values())
    made = compiled(graph, "single", 1, optimizer=optimizer, precision=ss.Precision(master))
    assert made.memory[0].optimizer_bytes == states * item_bytes * params


@pytest.mark.parametrize(
    "plan_name, master",
    [*zip(["data_parallel", "megatron", "zero1", "zero2", "zero3"], cycle([None, torch.float64]))],
)
def test_predicted_weight_bytes_equal_those_of_a_rank_between_steps(
    plan_name: str, master: torch.dtype | None, tmp_path: Path
) -> None:
    made = compiled(graph_of(), plan_name, 2, precision=ss.Precision(master))
    folder = made.save(tmp_path)

    def work(trainer: ss.Trainer) -> int:
        trainer.init_weights(lambda name, whole: whole.normal_(std=0.02))
        trainer.step(*models.example_inputs("gpt", BATCH))
        weights = trainer._rank.weights
        tensors = [*weights.stored.values(), *weights._copies.values()]
        places = [t.untyped_storage() for t in tensors]
        return sum({place.data_ptr(): place.nbytes() for place in places}.values())

    found = ss.run_threads(folder, work, range(2), dtype=master)
    stored = StoredMemory(made.materialized, made.precision)
    for rank, size in found.items():
        assert stored.resting_bytes(rank) == size


# --- activations --------------------------------------------------------------------------------

FUSED = 4 * SMALL["heads"] / SMALL["width"]
"""Flash attention keeps a log-sum-exp of four bytes for every query and head."""
NORMS = 2 * 2 * 4 / SMALL["width"]
"""Each of two norms keeps a mean and a deviation of four bytes for every token."""


def per_layer(plan_name: str, num_devices: int = 1, **sizes: Any) -> float:
    """Bytes that a layer keeps, in units of sequence x batch x width."""
    sizes = {**SMALL, "dtype": "bfloat16", **sizes}
    two, three = (
        footprints(compiled(graph_of(layers=n, **sizes), plan_name, num_devices).materialized, 0)
        for n in (2, 3)
    )
    unit: int = sizes["sequence"] * BATCH * sizes["width"]
    more: int = three["F", 0].kept.activations - two["F", 0].kept.activations
    return more / unit


def test_a_layer_keeps_34_bytes_a_token_and_feature_as_megatron_says() -> None:
    # Korthikanti et al. 2022: sbh(34 + 5as/h); the second term is the matrix of scores, which
    # flash attention does not save. Masks of dropout take one byte.
    assert per_layer("single", dropout=0.1) == 34 + FUSED + NORMS


def test_recomputed_layer_keeps_only_its_input() -> None:
    assert per_layer("recompute") == 2


def test_layers_are_recomputed_one_at_a_time() -> None:
    made = {n: compiled(graph_of(layers=n, **SMALL), "recompute", 1) for n in (2, 3)}
    most = {n: footprints(made[n].materialized, 0)["B", 0].most.activations for n in made}
    assert most[3] == most[2]


def test_tensor_parallelism_divides_activations_between_its_all_reduces() -> None:
    # Megatron has 10 + 24/t with dropout masks of 2, so 8 + 24/t here. A few more numbers are kept.
    expected = 8 + 24 / 2 + FUSED / 2 + NORMS
    assert per_layer("megatron", 2) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("num_stages, num_microbatches", [(2, 4), (4, 2)])
@pytest.mark.parametrize(
    "schedule, expected",
    [
        ("one_f_one_b", lambda stages, count, stage: min(count, stages - stage)),
        ("gpipe", lambda stages, count, stage: count),
    ],
)
def test_stages_hold_the_microbatches_of_their_schedule(
    schedule: str, expected: Callable[[int, int, int], int], num_stages: int, num_microbatches: int
) -> None:
    graph = graph_of(layers=4, **SMALL)
    options = {"microbatches": num_microbatches}
    made = compiled(graph, schedule, num_stages, options=options)
    for stage in range(num_stages):
        count = expected(num_stages, num_microbatches, stage)
        prints = footprints(made.materialized, stage)
        kept = prints["F", stage].kept.activations
        # The last of these microbatches is in its forward or in its backward.
        running = max(p.most.activations for p in prints["F", stage].peaks) - kept
        back = max(p.most.activations for p in prints["B", stage].peaks)
        assert made.memory[stage].activations_bytes == count * kept + max(running, back)
        assert in_flight(made.materialized, stage) == {stage: count}
        assert made.materialized.plan.schedule is not None
        assert made.materialized.plan.schedule.peak_microbatches[stage] == count


@pytest.mark.parametrize(
    "name, plan_name, num_devices",
    [
        ("gpt", "recompute", 1),
        ("gpt", "zero3", 2),
        ("moe", "single", 1),
        ("wide_resnet", "single", 1),
    ],
)
def test_named_tensors_are_within_ten_percent_of_the_bytes_a_forward_keeps(
    name: str, plan_name: str, num_devices: int
) -> None:
    sizes = {"width": 64, "sequence": 32, "vocabulary": 100} if name in ("gpt", "moe") else {}
    made = compiled(graph_of(name, **sizes), plan_name, num_devices).materialized
    held = held_of(made.stages[0].steps[0])
    inputs = {t.name for t in made.plan.graph.inputs}
    named = sum(num_bytes for name, num_bytes in held.items() if name not in inputs)
    assert named == pytest.approx(footprints(made, 0)["F", 0].kept.activations, rel=0.1)


# --- limits -------------------------------------------------------------------------------------


def test_memory_limit_equal_to_the_need_is_accepted() -> None:
    graph = graph_of("mlp")
    need = compiled(graph, "single", 1).memory[0].total_bytes
    assert compiled(graph, "single", 1, memory_limit=need).memory[0].total_bytes == need
    with pytest.raises(ss.DeviceMemoryError, match="device 0 needs"):
        compiled(graph, "single", 1, memory_limit=need - 1)


def test_memory_error_names_device_sizes_tensors_and_a_remedy() -> None:
    graph = graph_of(layers=4, **SMALL)
    message = (
        r"device 0 needs [\d.]+ KiB \(weights .* KiB, grads .*\), but the limit is 64 KiB; so do 1 "
        r"others. Its largest: layers.\d.mlp.* \(2 in flight\) .* KiB, .* Most of it is "
        r"activations: recompute groups of ops"
    )
    with pytest.raises(ss.DeviceMemoryError, match=message):
        compiled(graph, "one_f_one_b", 2, memory_limit=64 * 1024)


@pytest.mark.parametrize(
    "plan_name, option",
    [
        ("single", r"Most of it is optimizer: .* ZeRO 1"),
        ("data_parallel", r"Most of it is buffers: reduce gradients in FSDP units"),
        ("zero3", r"Most of it is weights: cut weights over more devices"),
    ],
)
def test_suggested_remedy_depends_on_the_largest_kind_of_memory(
    plan_name: str, option: str
) -> None:
    graph = graph_of("mlp", inputs=512, hidden=512)
    with pytest.raises(ss.DeviceMemoryError, match=option):
        compiled(graph, plan_name, 1 if plan_name == "single" else 4, memory_limit=1)
