"""Sizes beyond 2^31 elements and 2^32 bytes: nothing counts in 32 bits.

Buffers are mapped and hardly touched, so that they cost a few pages.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import rvdcomm as rv
from rvdcomm.native import core
from rvdcomm.plans.planner import plan_over
from rvdcomm.program import DST, SRC, Program
from rvdcomm.run import CallMemory, Do, PrivateStaging, native_stage, operation
from rvdcomm.run.schedule import schedule

needs_core = pytest.mark.skipif(core is None, reason="the extension is not built")

FREE_ROUNDS = rv.Link(alpha_secs=0.0, bytes_per_sec=1e9)
TOPOLOGIES = {
    "one host": rv.Topology.single_host(8, 0.0, 1e9),
    "two hosts": rv.Topology.hosts([range(4), range(4, 8)], FREE_ROUNDS, FREE_ROUNDS),
}
SCALE = 1 << 20
SHAPES = [((3 << 10, 2), (3 << 30, 2)), ((1 << 6, 1 << 7), (1 << 16, 1 << 17))]
"""A shape, and one of ``SCALE`` times as many elements: 6 and 8 billion."""

TRANSITIONS = [
    (4, "R(1)V(1)D(4,1)", "R(4)V(1)D(1,1)"),
    (4, "R(1)V(4)D(1,1)", "R(1)V(1)D(4,1)"),
    (4, "R(1)V(2)D(2,1)", "R(2)V(1)D(1,2)"),
    (8, "R(1)V(8)D(1,1)", "R(8)V(1)D(1,1)"),
    (8, "R(1)V(1)D(8,1)", "R(1)V(1)D(4,2)"),
    (8, "R(8)V(1)D(1,1)", "R(1)V(1)D(4,2)"),
]

CASES = [
    (*shapes, *transition, topology)
    for shapes, transition, topology in zip(
        SHAPES * 3, TRANSITIONS, ["one host", "two hosts", "two hosts"] * 2, strict=True
    )
]

cases = pytest.mark.parametrize("small, large, num_ranks, src, dst", [row[:5] for row in CASES])


def plan_of(
    shape: tuple[int, int], num_ranks: int, src: str, dst: str, topology: str = "one host"
) -> rv.Plan:
    """A plan of messages, which are not cut in slices of a fixed size."""
    layouts = (rv.Layout(shape, text, range(num_ranks)) for text in (src, dst))
    return rv.plan(*layouts, "float32", TOPOLOGIES[topology], executor="dist")


def byte_counts(cost: rv.Cost) -> tuple[int, ...]:
    return cost.wire_bytes, cost.host_bytes, cost.recv_bytes, cost.peak_bytes


def scaled(counts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(count * SCALE for count in counts)


# --- plans --------------------------------------------------------------------------------------


@pytest.mark.parametrize("small, large, num_ranks, src, dst, topology", CASES)
def test_costs_and_bounds_scale_with_the_size_of_the_tensor(
    small: tuple[int, int],
    large: tuple[int, int],
    num_ranks: int,
    src: str,
    dst: str,
    topology: str,
) -> None:
    a, b = (plan_of(shape, num_ranks, src, dst, topology) for shape in (small, large))
    assert [step.kind for step in a.path.steps] == [step.kind for step in b.path.steps]
    for one, other in ((a.cost, b.cost), (a.bound, b.bound)):
        assert byte_counts(other) == scaled(byte_counts(one))
        assert other.secs == pytest.approx(one.secs * SCALE)  # floats of another magnitude
    assert b.cost.peak_bytes > 1 << 32


@cases
def test_programs_of_large_tensors_verify_and_round_trip(
    small: tuple[int, int], large: tuple[int, int], num_ranks: int, src: str, dst: str
) -> None:
    plan = plan_of(large, num_ranks, src, dst)
    plan.verify()
    assert Program.parse(str(plan.program)) == plan.program


# --- offsets ------------------------------------------------------------------------------------


def programs_of(plan: rv.Plan) -> list[Program]:
    """The program of ranks that send messages, and of ranks that read each other's memory."""
    return [plan.program, plan_over(plan, (plan.src.ranks,)).program]


@cases
def test_arenas_scale_with_the_size_of_the_tensor(
    small: tuple[int, int], large: tuple[int, int], num_ranks: int, src: str, dst: str
) -> None:
    a, b = (plan_of(shape, num_ranks, src, dst).program for shape in (small, large))
    arenas = [[program.arena(rank) for rank in program.ranks] for program in (a, b)]
    for arena, other in zip(*arenas, strict=True):
        assert other.num_bytes == arena.num_bytes * SCALE
        assert other.offsets == {name: at * SCALE for name, at in arena.offsets.items()}


def test_peer_programs_have_buffers_beyond_4_gib() -> None:
    plan = plan_of((12 << 30, 2), 8, "R(1)V(8)D(1,1)", "R(8)V(1)D(1,1)")
    program = programs_of(plan)[1]
    assert max(program.arena(0).offsets.values()) > 1 << 32


@needs_core
@pytest.mark.parametrize("small, large", SHAPES)
@pytest.mark.parametrize("num_ranks, src, dst", TRANSITIONS[:3])
def test_native_core_accepts_peer_offsets_beyond_32_bits(
    small: tuple[int, int], large: tuple[int, int], num_ranks: int, src: str, dst: str
) -> None:
    program = programs_of(plan_of(large, num_ranks, src, dst))[1]
    actions = schedule(program, num_ranks - 1).actions
    native_stage(program, num_ranks - 1, range(num_ranks), actions)


# --- data ---------------------------------------------------------------------------------------

NUM_BYTES = 5 << 30
MAP_NORESERVE = 0x4000


def sparse(num_bytes: int = NUM_BYTES) -> Tensor:
    """Zeros that take no memory until they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)


def ramp(count: int) -> Tensor:
    return torch.arange(1, count + 1, dtype=torch.uint8)


def run_torch(program: Program, src: Tensor, dst: Tensor) -> None:
    call = CallMemory({SRC: src, DST: dst}, torch.empty(0, dtype=torch.uint8))
    for instruction in program.instructions:
        operation(program, 0, instruction)(call)


def run_native(program: Program, src: Tensor, dst: Tensor) -> None:
    actions = [Do(instruction) for instruction in program.instructions]
    stage = native_stage(program, 0, (0,), actions)
    staging = PrivateStaging(0)
    staging.bind(stage, staging.memory)
    stage.run((src.data_ptr(), dst.data_ptr()), 2)


runners = pytest.mark.parametrize("run", [run_torch, pytest.param(run_native, marks=needs_core)])


def program_of(shape: tuple[int, ...], dtype: str, *instructions: str) -> Program:
    """A program of rank 0 alone."""
    layout = rv.Layout(shape, f"R(1)V(1)D({','.join('1' * len(shape))})")
    whole = ",".join(f"0:{size}" for size in shape)
    lines = [f"program {dtype}", f"src {layout}", f"dst {layout}"]
    lines += [f"buffer {name} rank 0: [{whole}]" for name in ("src", "dst")]
    return Program.parse("\n".join([*lines, *instructions]) + "\n")


@runners
def test_copy_near_the_end_of_5_gib_writes_only_its_box(run: Callable[..., None]) -> None:
    src, dst = sparse(), sparse()
    first, last = NUM_BYTES - 77, NUM_BYTES - 7
    src[first:last] = ramp(70)
    run(program_of((NUM_BYTES,), "uint8", f"copy rank 0 src dst: [{first}:{last}]@0>0"), src, dst)
    assert torch.equal(dst[first:last], ramp(70))
    assert not dst[first - (1 << 32) : last - (1 << 32)].any(), "nor 4 GiB before it"
    assert not dst[last:].any()


@runners
def test_sum_with_a_row_stride_of_gigabytes_is_correct(run: Callable[..., None]) -> None:
    # Rows of 1.25 GiB: the last is behind element 2^31 and byte 2^32.
    rows, columns = 4, NUM_BYTES // 4
    src, dst = sparse(), sparse()
    a, b = src.view(rows, columns), dst.view(rows, columns)
    box = slice(None), slice(columns - 9, columns - 2)
    a[box] = ramp(28).view(4, 7)
    b[box] = 100
    run(
        program_of(
            tuple(a.shape), "uint8", f"add rank 0 src dst: [0:4,{columns - 9}:{columns - 2}]@0>0"
        ),
        a,
        b,
    )
    assert torch.equal(b[box], ramp(28).view(4, 7) + 100)
