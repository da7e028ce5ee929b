"""Laws of lowering: programs are right, move the bytes of their steps, and copy little."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial

import pytest

import rvdcomm as rv
from rvdcomm import Path
from rvdcomm.planning import State, exchange_step
from rvdcomm.program import DST, SRC, Copy, Program, Zero
from rvdcomm.program.lower import lower
from rvdcomm.program.verify import verify
from tests.oracle import all_pairs, local_faults, program_faults, random_pair, random_topology

ONE_HOST = rv.Topology.single_host(16, 0, 1.0)
TWO_HOSTS = rv.Topology.hosts([range(3), range(3, 6)], rv.Link(0, 4.0), rv.Link(0, 1.0))
# Shards of the even shape are whole cache lines, so that alignment adds nothing to a peak.
EVEN, RAGGED = (120, 180), (6, 10)


def copies(program: Program) -> list[Copy]:
    return [i for i in program.instructions if isinstance(i, Copy)]


def program_of(
    src: str, dst: str, dtype: str = "float32", shape: tuple[int, ...] = EVEN
) -> Program:
    ends = rv.Layout(shape, src), rv.Layout(shape, dst)
    return rv.plan(*ends, dtype, ONE_HOST, executor="dist").program


# --- right --------------------------------------------------------------------------------------


def faults(src: rv.Layout, dst: rv.Layout, program: Program) -> list[str]:
    """What the verifier and the data say against a program."""
    try:
        verify(program)
    except rv.ProgramError as error:
        return [f"{src} -> {dst}: {error}"]
    return [f"{src} -> {dst}: {fault}" for fault in program_faults(program)]


@pytest.mark.parametrize("shape", [(12, 18), RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize("topology", [ONE_HOST, TWO_HOSTS], ids=["one host", "two hosts"])
def test_programs_verify_and_give_right_data(shape: tuple[int, ...], topology: rv.Topology) -> None:
    found = []
    for src, dst in all_pairs(shape, 6):
        program = lower(rv.plan(src, dst, "int64", topology).path, "int64", topology)
        found += faults(src, dst, program)
    assert found == []


@pytest.mark.parametrize("num_slices", [1, 3])
@pytest.mark.parametrize(
    "domains", [(range(6),), (range(3), range(3, 6)), ((0, 3), (1, 2))], ids=str
)
def test_programs_with_domains_and_slices_verify_and_give_right_data(
    domains: tuple[Sequence[int], ...], num_slices: int
) -> None:
    found = []
    rng = random.Random(repr((domains, num_slices)))
    for shape, topology in (((12, 18), ONE_HOST), (RAGGED, TWO_HOSTS)):
        pairs = list(all_pairs(shape, 6))
        for src, dst in rng.sample(pairs, 60):
            path = rv.plan(src, dst, "int64", topology).path
            program = lower(path, "int64", topology, domains=domains, num_slices=num_slices)
            found += faults(src, dst, program)
    assert found == []


@pytest.mark.parametrize("num_slices", [1, 3])
@pytest.mark.parametrize("domains", [(), (range(6),), (range(3), range(3, 6))], ids=str)
def test_program_lowered_for_one_rank_equals_its_part_of_the_whole_program(
    domains: tuple[Sequence[int], ...], num_slices: int
) -> None:
    found = []
    rng = random.Random(f"{domains} {num_slices}")
    for shape, topology in (((12, 18), ONE_HOST), (RAGGED, TWO_HOSTS)):
        for src, dst in rng.sample(list(all_pairs(shape, 6)), 25):
            path = rv.plan(src, dst, "int64", topology).path
            lowered = partial(
                lower, path, "int64", topology, domains=domains, num_slices=num_slices
            )
            apart = local_faults(lowered(), lambda rank, lowered=lowered: lowered(ranks=[rank]))
            found += [f"{src.rvd} -> {dst.rvd}: {fault}" for fault in apart]
    assert found == []


@pytest.mark.parametrize("seed", range(2))
def test_program_of_one_rank_of_random_pairs_equals_its_part_of_the_whole(seed: int) -> None:
    found = []
    rng = random.Random(seed)
    for _ in range(40):
        (src, dst), topology = random_pair(rng), random_topology(rng)
        plan = rv.plan(src, dst, "int64", topology)
        apart = local_faults(plan.program, plan.program_of)
        found += [f"{src} -> {dst}: {fault}" for fault in apart]
    assert found == []


@pytest.mark.parametrize("num_slices", [2, 3, 64])
def test_programs_in_windows_verify_and_give_right_data(num_slices: int) -> None:
    rng = random.Random(num_slices)
    found = []
    for _ in range(30):
        (src, dst), topology = random_pair(rng), random_topology(rng)
        path = Path(src, dst, (exchange_step(State(src), State(dst), num_slices),))
        found += faults(src, dst, lower(path, "int64", topology))
    assert found == []


def test_more_windows_need_no_more_memory() -> None:
    src, dst = rv.Layout(EVEN, "R(1)V(4)D(1,1)"), rv.Layout(EVEN, "R(1)V(1)D(1,4)")
    ends = State(src), State(dst)
    programs = [
        lower(Path(src, dst, (exchange_step(*ends, n),)), "float32", ONE_HOST) for n in (1, 2, 4, 8)
    ]
    peaks = [max(map(program.peak_bytes, program.ranks)) for program in programs]
    assert peaks == sorted(peaks, reverse=True)


# --- bytes --------------------------------------------------------------------------------------


def moved(program: Program, num_steps: int) -> list[Counter[tuple[int, int]]]:
    """Elements from rank to rank, by step."""
    found: list[Counter[tuple[int, int]]] = [Counter() for _ in range(num_steps)]
    for step, pair, num_elements in program.traffic():
        found[step][pair] += num_elements
    return found


def meant(path: Path, topology: rv.Topology) -> list[Counter[tuple[int, int]]]:
    """Elements from rank to rank, by step, as the moves of the steps say."""
    return [
        Counter(
            {
                pair: sum(step_exchange.get(pair, 0) for step_exchange in step_exchanges)
                for step_exchange in step_exchanges
                for pair in step_exchange
                if pair[0] != pair[1]
            }
        )
        for step_exchanges in (step.traffic(topology, 1) for step in path.steps)
    ]


@pytest.mark.parametrize("shape", [EVEN, RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize("topology", [ONE_HOST, TWO_HOSTS], ids=["one host", "two hosts"])
def test_programs_move_the_bytes_of_their_steps(
    shape: tuple[int, ...], topology: rv.Topology
) -> None:
    other = []
    for src, dst in all_pairs(shape, 6):
        path = rv.plan(src, dst, "int64", topology).path
        program = lower(path, "int64", topology)
        if moved(program, len(path.steps)) != meant(path, topology):
            other.append(f"{src.rvd} -> {dst.rvd}")
    assert other == []


# --- copies -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "src, dst",
    [
        ("R(1)V(1)D(4,1)", "R(4)V(1)D(1,1)"),
        ("R(2)V(1)D(4,1)", "R(8)V(1)D(1,1)"),
        ("R(1)V(1)D(2,3)", "R(2)V(1)D(1,3)"),
    ],
)
def test_gather_of_dim_0_needs_no_copy(src: str, dst: str) -> None:
    assert copies(program_of(src, dst)) == []


def test_gather_of_dim_0_needs_no_staging() -> None:
    program = program_of("R(1)V(1)D(3,2)", "R(3)V(1)D(1,2)")
    assert {buffer.name for buffer in program.buffers} == {SRC, DST}


def test_second_gather_packs_nothing_that_is_contiguous() -> None:
    # After the first gather the columns of every rank are contiguous in one buffer.
    packs = [c for c in copies(program_of("R(1)V(1)D(3,2)", "R(6)V(1)D(1,1)")) if c.dst != DST]
    assert packs == []


def test_gather_of_dim_1_unpacks_once_on_every_rank() -> None:
    program = program_of("R(1)V(1)D(1,4)", "R(4)V(1)D(1,1)")
    assert [(copy.rank, copy.dst) for copy in copies(program)] == [(r, DST) for r in range(4)]


def test_slice_is_one_copy_on_every_rank() -> None:
    program = program_of("R(4)V(1)D(1,1)", "R(1)V(1)D(2,2)")
    assert [(c.op, c.rank, c.src, c.dst) for c in program.instructions] == [
        ("copy", rank, SRC, DST) for rank in range(4)
    ]


def test_mask_zeroes_all_but_one_holder() -> None:
    program = program_of("R(3)V(1)D(1,1)", "R(1)V(3)D(1,1)")
    kind_of_rank = {i.rank: type(i) for i in program.instructions}
    assert kind_of_rank == {0: Copy, 1: Zero, 2: Zero}


def test_same_layout_is_one_copy_on_every_rank() -> None:
    program = program_of("R(1)V(2)D(3,1)", "R(1)V(2)D(3,1)")
    assert [(c.rank, c.src, c.dst) for c in program.instructions] == [
        (rank, SRC, DST) for rank in range(6)
    ]


# --- sums ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint8"])
def test_dtypes_that_all_backends_sum_are_summed_by_all_reduce(dtype: str) -> None:
    program = program_of("R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)", dtype)
    assert [call.kind for call in program.collectives] == ["all_reduce"]


@pytest.mark.parametrize("dtype", ["int16", "uint32", "float8_e5m2", "complex64"])
def test_other_dtypes_are_exchanged_and_summed_without_all_reduce(dtype: str) -> None:
    program = program_of("R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)", dtype)
    assert [call.kind for call in program.collectives] == ["all_to_all", "all_gather"]


def test_all_reduce_is_not_used_for_groups_with_parts_out_of_order() -> None:
    # Ranks 0, 1 hold parts 0, 1 of the left half, and 1, 0 of the right: sums would differ in bits.
    src = rv.Layout(EVEN, "R(1)V(4)D(1,2)", ranks=[0, 7, 1, 6, 2, 5, 3, 4])
    dst = rv.Layout(EVEN, "R(4)V(1)D(1,2)", ranks=[0, 7, 1, 6, 2, 5, 3, 4])
    program = rv.plan(src, dst, "float32", ONE_HOST, executor="dist").program
    for call in program.collectives:
        parts = [src.cell(rank).part for rank in call.ranks]
        assert call.kind != "all_reduce" or parts == sorted(parts)


def test_parts_are_added_in_ascending_order() -> None:
    program = program_of("R(1)V(4)D(1,1)", "R(1)V(1)D(4,1)")
    for rank in program.ranks:
        written = [c for c in copies(program) if c.rank == rank and c.dst == DST]
        assert [c.op for c in written] == ["copy", "add", "add", "add"], rank
