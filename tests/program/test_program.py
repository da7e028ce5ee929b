"""Laws of programs: text, lifetimes, memory, traffic."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

import rvdcomm as rv
from rvdcomm.layout import Box
from rvdcomm.program import (
    ALIGN_BYTES,
    DST,
    SRC,
    Arena,
    Buffer,
    Collective,
    Copy,
    Entry,
    Message,
    Program,
    Transition,
    Zero,
)
from rvdcomm.program.verify import verify
from tests.oracle import all_pairs, random_pair, random_topology
from tests.program.test_verify import SUM

# --- text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks, shape", [(4, (8, 12)), (6, (6, 10)), (8, (14,))])
def test_parse_undoes_str_on_every_pair(num_ranks: int, shape: tuple[int, ...]) -> None:
    changed = []
    for src, dst in all_pairs(shape, num_ranks):
        program = rv.plan(src, dst).program
        if Program.parse(str(program)) != program:
            changed.append(f"{src} -> {dst}")
    assert changed == []


@pytest.mark.parametrize("seed", range(4))
def test_parse_undoes_str_on_random_pairs(seed: int) -> None:
    rng = random.Random(seed)
    changed = []
    for _ in range(50):
        (src, dst), topology = random_pair(rng), random_topology(rng)
        program = rv.plan(src, dst, "int64", topology).program
        if Program.parse(str(program)) != program:
            changed.append(f"{src} -> {dst}")
    assert changed == []


def test_parse_undoes_str_of_programs_in_windows() -> None:
    src, dst = rv.Layout((60, 34), "R(1)V(4)D(1,1)"), rv.Layout((60, 34), "R(1)V(1)D(1,4)")
    with pytest.raises(rv.MemoryLimitError) as raised:
        rv.plan(src, dst, memory_limit=1)
    least = int(str(raised.value).split("needs is ")[1].split(";")[0])
    program = rv.plan(src, dst, memory_limit=least).program
    assert Program.parse(str(program)) == program


TEXT = (
    SUM.replace("int64", "float32").partition("copy rank 1")[0]
    + "zero rank 1 dst: [2:3]@0>0 [3:4]@0>0\n"
)
"""A program of every instruction, which loses a part."""


def test_text_names_the_view_in_which_strided_cells_are_boxes() -> None:
    ends = rv.Layout((8, 6), "R(1)V(1)D(4,1)"), rv.Layout((8, 6), "R(4)V(1)D(1,1)")
    hosts = rv.Topology.hosts([range(2), range(2, 4)], rv.Link(0, 100.0), rv.Link(0, 1.0))
    program = rv.plan(*ends, "float32", hosts, executor="dist").program
    assert "dims (2,4)(6)" in str(program).splitlines()
    assert Program.parse(str(program)) == program
    assert program.shard_box(SRC, 1) == Box((0, 2, 0), (1, 4, 6))
    verify(program)


@pytest.mark.parametrize("dims", ["(2,2)", "(5)", "(3,3)"])
def test_view_that_does_not_match_the_shape_raises_program_error(dims: str) -> None:
    with pytest.raises(rv.ProgramError, match="not those of the shape"):
        verify(Program.parse(TEXT.replace("src R", f"dims {dims}(1)\nsrc R", 1)))


def test_parse_reads_every_instruction() -> None:
    whole, low, high = Box((0,), (4,)), Box((0,), (2,)), Box((2,), (4,))
    assert Program.parse(TEXT) == Program(
        transitions=(
            Transition(
                rv.Layout((4,), "R(1)V(2)D(1)"),
                rv.Layout((4,), "R(1)V(1)D(2)"),
                "float32",
                "float32",
            ),
        ),
        dtype="float32",
        buffers=(
            Buffer(SRC, 0, (whole,)),
            Buffer(SRC, 1, (whole,)),
            Buffer(DST, 0, (low,)),
            Buffer(DST, 1, (high,)),
            Buffer("r1", 0, (low,)),
            Buffer("r1", 1, (high,)),
        ),
        instructions=(
            Collective(
                "all_to_all",
                0,
                (0, 1),
                (SRC, SRC),
                ("r1", "r1"),
                (Message(0, 1, (Entry(high, 0, 0),)), Message(1, 0, (Entry(low, 0, 0),))),
            ),
            Copy("copy", 0, SRC, DST, (Entry(low, 0, 0),)),
            Copy("add", 0, "r1", DST, (Entry(low, 0, 0),)),
            Zero(1, DST, (Entry(Box((2,), (3,)), 0, 0), Entry(Box((3,), (4,)), 0, 0))),
        ),
    )


@pytest.mark.parametrize(
    "line, new, message",
    [
        (1, "programme float32", "expected a line that starts with 'program '"),
        (1, "program float24", "dtype 'float24' is unknown"),
        (2, "dst R(1)V(1)D(2) shape(4)", "expected a line that starts with 'src '"),
        (2, "src R(1)V(2)D(1)", "cannot parse layout"),
        (3, "dst R(1)V(1)D(3) shape(4) ranks(0,1)", "needs 3 ranks"),
        (4, "buffer src rank zero: [0:4]", "invalid literal"),
        (4, "buffer src 0: [0:4]", "not enough values"),
        (5, "buffer src rank 1: [0-4]", "cannot parse box"),
        (10, "collective all_to_all step 0 ranks 0,1 src,src", "not enough values"),
        (10, "collective all_to_all step x ranks 0,1 src,src r1,r1", "invalid literal"),
        (10, "collective all_to_all step 0 ranks 0-1 src,src r1,r1", "cannot parse ranks"),
        (11, "  0>1: [2:4]@0>0", "not enough values"),
        (11, "  0->1: [2:4]@0", "not enough values"),
        (13, "move rank 0 src dst: [0:2]@0>0", "expected buffer, copy, add, zero or collective"),
        (13, "copy rank 0 src: [0:2]@0>0", "not enough values"),
        (13, "copy rank 0 src dst [0:2]@0>0", "expected 'SRC DST:' after the rank"),
        (15, "zero rank 1 dst: [2:3]@0>z", "invalid literal"),
        (14, "", "expected"),
    ],
)
def test_parse_error_names_the_line_of_the_mistake(line: int, new: str, message: str) -> None:
    lines = TEXT.splitlines()
    lines[line - 1] = new
    with pytest.raises(rv.ProgramError, match=rf"cannot parse program, line {line}: .*{message}"):
        Program.parse("\n".join(lines))


@pytest.mark.parametrize("num_lines", [0, 1, 2])
def test_parse_error_of_a_truncated_text_names_its_end(num_lines: int) -> None:
    text = "\n".join(TEXT.splitlines()[:num_lines])
    with pytest.raises(
        rv.ProgramError, match=f"cannot parse program, line {num_lines + 1}: 'the end'"
    ):
        Program.parse(text)


# --- views --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rank, kinds", [(0, [Collective, Copy, Copy]), (1, [Collective, Zero]), (2, [])]
)
def test_of_rank_yields_the_instructions_of_one_rank(rank: int, kinds: list[type]) -> None:
    assert [type(instruction) for instruction in Program.parse(TEXT).of_rank(rank)] == kinds


def test_offset_of_a_piece_is_the_size_of_the_pieces_before_it() -> None:
    pieces = (Box((0, 0), (2, 3)), Box((5, 5), (6, 9)), Box((0, 0), (1, 1)))
    assert [Buffer("s1", 0, pieces).offset(i) for i in range(3)] == [0, 6, 10]


# --- memory -------------------------------------------------------------------------------------

MEMORY_TEXT = """\
program float64
src R(1)V(1)D(1) shape(10) ranks(0)
dst R(1)V(1)D(1) shape(10) ranks(1)
buffer src rank 0: [0:10]
buffer dst rank 1: [0:10]
buffer s1 rank 0: [0:10]
buffer s2 rank 0: [0:4]
buffer s3 rank 0: [0:7]
buffer r1 rank 1: [0:10]
copy rank 0 src s1: [0:10]@0>0
copy rank 0 s1 s2: [0:4]@0>0
copy rank 0 s2 s3: [0:4]@0>0
copy rank 0 src s3: [4:7]@0>0
collective all_to_all step 0 ranks 0,1 s1,- -,r1
  0->1: [0:10]@0>0
copy rank 1 r1 dst: [0:10]@0>0
"""


@pytest.mark.parametrize(
    "rank, lifetimes", [(0, {"s1": (0, 4), "s2": (1, 2), "s3": (2, 3)}), (1, {"r1": (4, 5)})]
)
def test_staging_buffers_live_from_first_to_last_use(
    rank: int, lifetimes: dict[str, tuple[int, int]]
) -> None:
    assert Program.parse(MEMORY_TEXT).lifetimes(rank) == lifetimes


def test_peak_is_the_shards_and_the_arena() -> None:
    program = Program.parse(MEMORY_TEXT)
    assert program.peak_bytes(0) == 10 * 8 + program.arena(0).num_bytes


def test_arena_gives_live_buffers_separate_aligned_offsets() -> None:
    # s1 (80 bytes) is live while s2 (32 bytes) and s3 (56 bytes) become live.
    arena = Program.parse(MEMORY_TEXT).arena(0)
    assert arena == Arena({"s1": 0, "s2": 128, "s3": 192}, 192 + 56)


def test_arena_reuses_the_offset_of_a_dead_buffer() -> None:
    # Without this copy s2 is dead before s3 becomes live.
    program = Program.parse(MEMORY_TEXT.replace("copy rank 0 s2 s3: [0:4]@0>0\n", ""))
    assert program.arena(0) == Arena({"s1": 0, "s2": 128, "s3": 128}, 128 + 56)


def test_rank_without_staging_has_an_empty_arena() -> None:
    layout = rv.Layout((6,), "R(1)V(1)D(2)")
    assert rv.plan(layout, layout).program.arena(0) == Arena({}, 0)


def arena_faults(program: Program, rank: int) -> list[str]:
    """Faults of the arena of a rank: buffers that overlap while both are live, alignment, size."""
    arena, lifetimes = program.arena(rank), program.lifetimes(rank)
    size = {n: program.buffer[n, rank].num_elements * program.item_bytes for n in arena.offsets}
    faults = [name for name, offset in arena.offsets.items() if offset % ALIGN_BYTES]
    faults += [n for n, offset in arena.offsets.items() if offset + size[n] > arena.num_bytes]
    for a, b in combinations(arena.offsets, 2):
        (born_a, died_a), (born_b, died_b) = lifetimes[a], lifetimes[b]
        at_a, at_b = arena.offsets[a], arena.offsets[b]
        meet_in_time = born_a <= died_b and born_b <= died_a
        if meet_in_time and at_a < at_b + size[b] and at_b < at_a + size[a]:
            faults.append(f"{a} and {b} overlap")
    if set(arena.offsets) != set(lifetimes):
        faults.append(f"{sorted(arena.offsets)} are not the staging buffers")
    return faults


@pytest.mark.parametrize("seed", range(4))
def test_staging_buffers_alive_at_once_never_overlap(seed: int) -> None:
    rng = random.Random(seed)
    found = []
    for _ in range(100):
        (src, dst), topology = random_pair(rng), random_topology(rng)
        program = rv.plan(src, dst, "int64", topology).program
        found += [f"{src} -> {dst}: {f}" for r in program.ranks for f in arena_faults(program, r)]
    assert found == []


# --- traffic ------------------------------------------------------------------------------------


def test_traffic_is_the_elements_between_different_ranks() -> None:
    whole = Box((0,), (10,))
    messages = [
        Message(a, b, (Entry(whole, 0, 0), Entry(Box((2,), (5,)), 0, 0)))
        for a, b in ((0, 0), (0, 2), (2, 1))
    ]
    call = Collective("all_to_all", 0, (0, 1, 2), (SRC,) * 3, (DST,) * 3, tuple(messages))
    assert call.traffic() == {(0, 2): 13, (2, 1): 13}


def all_reduce_of(num_elements: int, num_ranks: int) -> Collective:
    entries = (Entry(Box((0,), (num_elements,)), 0, 0),)
    ranks = tuple(range(num_ranks))
    names = (DST,) * num_ranks
    messages = tuple(Message(rank, rank, entries) for rank in ranks)
    return Collective("all_reduce", 0, ranks, names, names, messages)


@pytest.mark.parametrize("num_elements, num_ranks", [(12, 4), (10, 4), (2, 3), (7, 2)])
def test_traffic_of_an_all_reduce_is_its_lower_bound(num_elements: int, num_ranks: int) -> None:
    # Source: docs/bound.md, "Messages in all": 2 (p - 1) S in all.
    total = sum(all_reduce_of(num_elements, num_ranks).traffic().values())
    assert total == 2 * (num_ranks - 1) * num_elements


@pytest.mark.parametrize("num_ranks, rounds", [(2, 2), (4, 6)])
def test_all_reduce_takes_two_rounds_per_partner(num_ranks: int, rounds: int) -> None:
    assert all_reduce_of(12, num_ranks).rounds == rounds


def test_rounds_are_the_messages_of_the_busiest_rank() -> None:
    entries = (Entry(Box((0,), (3,)), 0, 0),)
    messages = tuple(Message(a, b, entries) for a, b in ((0, 0), (0, 2), (1, 2), (2, 0)))
    call = Collective("all_to_all", 0, (0, 1, 2), (SRC,) * 3, (DST,) * 3, messages)
    assert call.rounds == 2
