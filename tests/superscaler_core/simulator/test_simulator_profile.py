"""Device profiles and times of ops."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

import superscaler_core as ss
from superscaler_core.cost import (
    Collective,
    OpTimes,
    Reach,
    backward_products,
    forward_bytes,
    signature,
)
from superscaler_core.simulator import PROFILES
from superscaler_core.simulator.measured import measured
from superscaler_core.simulator.meter import SIZES
from tests.superscaler_core.cases import Case
from tests.superscaler_core.simulated_chains import chain
from tests.superscaler_core.small import branched, on_one, two_linears

SIMPLE = ss.DeviceProfile("simple", {"float32": 1e12, "float64": 1e12}, 1e9, 1 << 30)
COMPUTE_BOUND = replace(SIMPLE, bytes_per_sec=1e30)
MEMORY_BOUND = replace(SIMPLE, flops_per_sec={"float32": 1e30, "float64": 1e30})


def part(graph: ss.Graph, index: int) -> ss.Part:
    return ss.Part(graph.ops[index])


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROFILES)
def test_load_returns_what_save_wrote(name: str, tmp_path: Path) -> None:
    profile = replace(
        PROFILES[name], op_secs={"a": (1e-3, 2e-3)}, notes=("a note",), host_waits=True,
        collectives={2: Collective(1e-6, 1e9), 8: Collective(2e-6, 2e9, 3e-6)},
    )  # fmt: skip
    profile.save(tmp_path / "profile.json")
    assert ss.DeviceProfile.load(tmp_path / "profile.json") == profile


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 9}, "no JSON object of version 2"),
        ({"speed": 3}, "unknown entries speed"),
        ({"bytes_per_sec": "fast"}, "bytes_per_sec is 'fast'"),
        ({"flops_per_sec": {"float32": None}}, "flops_per_sec of float32 is 'None'"),
        ({"op_secs": {"a": [1]}}, "op_secs of 'a' is no pair of seconds"),
        ({"memory_bytes": 0}, "memory_bytes is 0"),
        ({"memory": 0.5}, "memory is '0.5'"),
        ({"products": {"float32": {"points": [[1]]}}}, "products of float32 is no table of pairs"),
        ({"memory": {"points": [[1, 2]]}}, "shares .* cannot be"),
        ({"host_waits": 1}, "host_waits is '1'"),
        ({"collectives": {"2": [1, 2]}}, "collectives of 2 are"),
        ({"collectives": {"x": [1, 2, None]}}, "collectives of x are"),
        ({"collectives": {"1": [1e-6, 1e9, None]}}, "collectives of 1 are"),
        ({"collectives": {"2": [-1, 1e9, None]}}, "collectives of 2 are"),
        ({"collectives": {"2": [1e-6, 0, None]}}, "collectives of 2 are"),
        ({"collectives": {"2": [1e-6, 1e9, "x"]}}, "collectives of 2 are"),
        ({"collectives": {"2": [True, 1e9, None]}}, "collectives of 2 are"),
        ({"collectives": {"2": [float("nan"), 1e9, None]}}, "collectives of 2 are"),
    ],
)
def test_invalid_profile_file_is_rejected(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    SIMPLE.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ss.PlanError, match=f"is not a device profile: .*{message}"):
        ss.DeviceProfile.load(path)


@pytest.mark.parametrize("known", [(1e-6, 1e9, None), 3.0, None])
def test_collectives_of_another_kind_are_refused(known: Any) -> None:
    with pytest.raises(ss.PlanError, match="collectives of 2 are"):
        replace(SIMPLE, collectives={2: known})


@pytest.mark.parametrize(
    ("text", "message"),
    [("[" * 100_000, "it is nested too deeply"), (" " * (2 << 20), "it is longer than")],
    ids=["deep", "long"],
)
def test_a_profile_is_read_in_bounded_time(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ss.PlanError, match=f"is not a device profile: {message}"):
        ss.DeviceProfile.load(path)


def test_invalid_figures_of_a_profile_are_rejected() -> None:
    with pytest.raises(ss.PlanError, match=r"bytes_per_sec is 0; .*launch_secs is -1; "):
        replace(SIMPLE, launch_secs=-1, bytes_per_sec=0)


def test_an_infinite_figure_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(ss.PlanError, match="an infinite figure cannot be saved"):
        replace(SIMPLE, bytes_per_sec=float("inf")).save(tmp_path / "profile.json")


# --- the roofline -------------------------------------------------------------------------------


def test_time_of_a_product_is_its_operations_over_the_peak() -> None:
    linear = part(two_linears(4, 6, 8), 0)
    times = OpTimes(COMPUTE_BOUND)
    assert times.forward_secs(linear) == pytest.approx(2 * 4 * 6 * 8 / 1e12, rel=1e-9)
    # The input has no gradient, so the backward has one product, for the weight.
    assert times.backward_secs(linear) == pytest.approx(2 * 4 * 6 * 8 / 1e12, rel=1e-9)


def test_a_product_of_two_gradients_has_two_products_in_its_backward() -> None:
    down = part(two_linears(4, 6, 8, 5), 2)
    assert backward_products(down.form.op) == 2


def test_memory_traffic_counts_every_operand_once() -> None:
    linear = part(two_linears(4, 6, 8), 0)
    size = 8 * (4 * 6 + 6 * 8 + 4 * 8)
    assert forward_bytes(linear.form) == size
    assert OpTimes(MEMORY_BOUND).forward_secs(linear) == pytest.approx(size / 1e9, rel=1e-9)


def test_op_without_gradient_has_no_backward_time() -> None:
    mask = next(op for op in branched().ops if op.kind == "mask")
    assert OpTimes(SIMPLE).backward_secs(ss.Part(mask)) == 0


def test_launch_time_is_added_to_an_op() -> None:
    linear = part(two_linears(), 0)
    launched = OpTimes(replace(SIMPLE, launch_secs=1e-5))
    assert launched.forward_secs(linear) == OpTimes(SIMPLE).forward_secs(linear) + 1e-5


def test_twice_the_speed_is_half_the_time() -> None:
    graph = branched()
    fast = replace(SIMPLE, flops_per_sec={"float64": 2e12}, bytes_per_sec=2e9)
    for op in graph.ops:
        slow_secs = OpTimes(SIMPLE).backward_secs(ss.Part(op))
        assert OpTimes(fast).backward_secs(ss.Part(op)) == pytest.approx(slow_secs / 2)


def test_product_reaches_the_share_of_the_peak_for_its_size() -> None:
    whole = part(two_linears(4, 6, 8, 5), 2)
    flops = 2.0 * 4 * 8 * 5
    sized = replace(COMPUTE_BOUND, products={"float64": Reach(((flops / 4, 0.25), (flops, 0.5)))})
    half = ss.split("b", 2)(whole)[0]
    for each, num, share in ((whole, 1, 0.5), (half, 2, 0.5**1.5)):
        full = OpTimes(COMPUTE_BOUND)
        assert OpTimes(sized).forward_secs(each) == pytest.approx(full.forward_secs(each) / share)
        # The backward has two products of the same size, not one product of twice the size.
        assert OpTimes(sized).backward_secs(each) == pytest.approx(full.backward_secs(each) / share)
        assert full.backward_secs(each) == pytest.approx(2 * flops / num / 1e12)


def test_fused_attention_has_a_separate_table_of_shares() -> None:
    shared = replace(
        COMPUTE_BOUND, products={"float32": Reach(((1.0, 0.5),))},
        attention={"float32": Reach(((1.0, 0.25),))},
    )  # fmt: skip
    ways = (("linear", "float32"), ("attention", "float32"), ("attention", "float64"))
    secs = [shared.flops_secs(1e12, dtype, kind) for kind, dtype in ways]
    assert secs == [2, 4, 1]


def test_pass_over_memory_reaches_the_share_for_its_bytes() -> None:
    sized = replace(SIMPLE, memory=Reach(((100.0, 0.25), (10_000.0, 0.5))))
    assert [sized.bytes_secs(n) for n in (0, 100, 10_000)] == [0, 4e-7, 2e-5]
    assert OpTimes(sized).sum_secs(100) == 3 * 4e-7


def test_uncached_bytes_take_the_time_per_byte_of_the_largest_size() -> None:
    """The share of a CPU falls with the bytes, as caches are small. The share of a GPU grows."""
    cached = replace(SIMPLE, memory=Reach(((100.0, 0.5), (10_000.0, 0.25))))
    assert [cached.bytes_secs(100), cached.cold_secs(100)] == [2e-7, 4e-7]
    assert [cached.cold_secs(n) for n in (0, 10_000)] == [0, 4e-5]
    assert OpTimes(cached).sum_secs(100) == 3 * 4e-7
    assert OpTimes(cached).update_secs(2, 100) == pytest.approx(7 * 4e-7)
    for gpu in PROFILES.values():
        assert gpu.cold_secs(1 << 16) == gpu.bytes_secs(1 << 16)


@pytest.mark.parametrize("name", PROFILES)
def test_part_of_an_op_takes_at_least_its_share_of_the_time(name: str) -> None:
    """Lower bounds of planners rely on this law."""
    times = OpTimes(replace(PROFILES[name], launch_secs=0.0))
    for op in branched().ops:
        whole = ss.Part(op)
        for loop, size in op.sizes.items():
            if op.form.uncut & {loop} or size % 2:
                continue
            for piece in ss.split(loop, 2)(whole):
                assert 2 * times.forward_secs(piece) >= times.forward_secs(whole) * (1 - 1e-9)
                assert 2 * times.backward_secs(piece) >= times.backward_secs(whole) * (1 - 1e-9)
                assert times.forward_secs(piece) <= times.forward_secs(whole)


def test_grown_op_has_the_speed_of_a_larger_op() -> None:
    profile = replace(PROFILES["v100"], launch_secs=0.0, bytes_per_sec=1e30)
    small, large = (part(two_linears(batch, 64, 64, 64), 2) for batch in (64, 512))
    bound, real = OpTimes(profile, grown=8), OpTimes(profile)
    assert 8 * bound.forward_secs(small) == pytest.approx(real.forward_secs(large))
    assert 8 * real.forward_secs(small) > 1.1 * real.forward_secs(large)


def test_a_profile_is_scaled_by_dtype() -> None:
    usual = PROFILES["v100"]
    slow = usual.scaled(float32=0.5, memory=0.5)
    flops = 2.0 * 8192**3
    for dtype, ratio in (("float32", 2), ("float16", 1)):
        for kind in ("linear", "attention"):
            secs = slow.flops_secs(flops, dtype, kind)
            assert secs == pytest.approx(ratio * usual.flops_secs(flops, dtype, kind))
    assert slow.bytes_secs(1000) == pytest.approx(2 * usual.bytes_secs(1000))
    assert usual.scaled(float32=2.0).products["float32"].points[-1][1] == 1
    with pytest.raises(ss.PlanError, match=r"cannot be scaled by float8=2, float32=0: .*memory"):
        usual.scaled(float8=2, float32=0)


def test_dtype_without_a_peak_raises_plan_error() -> None:
    with pytest.raises(ss.PlanError, match="simple has no flops_per_sec of float64"):
        OpTimes(replace(SIMPLE, flops_per_sec={"float32": 1e12})).forward_secs(
            part(two_linears(), 0)
        )


def test_embedding_reads_only_the_rows_that_it_returns() -> None:
    op = next(
        op for op in Case("accumulate", 1).compiled().plan.graph.ops if op.kind == "embedding"
    )
    looked_up = 8 * op.outputs[0].box.num_elements
    assert forward_bytes(ss.Part(op).form) == 2 * looked_up + 8 * op.inputs[0].box.num_elements


# --- measured -----------------------------------------------------------------------------------


def test_parts_of_equal_shapes_have_equal_signatures() -> None:
    op = chain(1, batch=8).ops[0]
    parts = ss.split("b", 2)(ss.Part(op))
    assert signature(parts[0]) == signature(parts[1])
    assert signature(parts[0]) != signature(ss.Part(op))


def test_a_measured_profile_knows_every_op_of_its_programs() -> None:
    compiled = Case("megatron", 2).compiled()
    profile = measured([compiled], op_secs=0.001)
    plan = compiled.plan
    parts = [part for op in plan.graph.ops for part in plan.parts(op)]
    assert {signature(part) for part in parts} == set(profile.op_secs)
    assert all(forward > 0 for forward, _ in profile.op_secs.values())
    times = OpTimes(profile)
    linear = next(p for p in parts if p.op.kind == "linear")
    assert times.backward_secs(linear) == profile.op_secs[signature(linear)][1] > 0


def test_ops_are_measured_with_the_given_clock() -> None:
    """The clock of this test advances by one second at every read."""
    compiled = ss.compile(on_one(ss.Plan(two_linears(), [0])))
    profile = measured([compiled], op_secs=0.001, clock=map(float, count()).__next__)
    assert {forward for forward, _ in profile.op_secs.values()} == {1.0}
    assert max(backward for _, backward in profile.op_secs.values()) == pytest.approx(1, abs=1e-2)


def test_a_measured_profile_has_speeds_for_other_ops(tmp_path: Path) -> None:
    profile = measured([ss.compile(on_one(ss.Plan(two_linears(), [0])))], op_secs=0.001)
    assert list(profile.products) == list(profile.flops_per_sec) == ["float64"]
    assert [amount for amount, _ in profile.products["float64"].points] == [
        2 * rows**3 for rows in SIZES["cpu"].product_rows
    ]
    assert len(profile.memory.points) == len(SIZES["cpu"].stream_bytes)
    assert max(share for _, share in profile.memory.points) == 1
    assert profile.launch_secs > 0
    profile.save(tmp_path / "profile.json")
    assert ss.DeviceProfile.load(tmp_path / "profile.json") == profile


class WorkClock(FlopCounterMode):
    """A clock that counts the operations of products as seconds, plus one second per read."""

    def __init__(self) -> None:
        super().__init__(display=False)
        self.num_reads = 0

    def __call__(self) -> float:
        self.num_reads += 1
        return float(self.num_reads + self.get_total_flops())


@pytest.fixture
def work_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkClock]:
    with WorkClock() as clock:
        for module in ("measured", "meter"):
            monkeypatch.setattr(f"superscaler_core.simulator.{module}.thread_time", clock)
        yield clock


def test_measured_time_of_an_op_is_that_of_its_forward_and_backward(work_clock: WorkClock) -> None:
    widths = 16, 512
    programs = [ss.compile(on_one(ss.Plan(chain(2, 64, width), [0]))) for width in widths]
    table = measured(programs, op_secs=0.01).op_secs
    for width, program in zip(widths, programs, strict=True):
        flops = 2 * 64 * width**2
        first, second = (table[signature(ss.Part(op))] for op in program.plan.graph.ops[:2])
        # A forward includes one second for the read. A backward does not, as the overhead of the
        # autograd engine is subtracted, with the same second.
        assert first == (flops + 1, flops), "of its input no gradient is made"
        assert second == (flops + 1, 2 * flops)
