"""Laws of the verifier: right programs pass; every kind of corruption is named.

Corruptions are edits of a program's text, so that each is one line to read.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

import rvdcomm as rv
from rvdcomm.layout import Box
from rvdcomm.plans import simulate_program
from rvdcomm.program import Buffer, Program
from rvdcomm.program.verify import Proof, verify
from tests.oracle import program_faults
from tests.strategies import transitions

SUM = """\
program int64
src R(1)V(2)D(1) shape(4) ranks(0,1)
dst R(1)V(1)D(2) shape(4) ranks(0,1)
buffer src rank 0: [0:4]
buffer src rank 1: [0:4]
buffer dst rank 0: [0:2]
buffer dst rank 1: [2:4]
buffer r1 rank 0: [0:2]
buffer r1 rank 1: [2:4]
collective all_to_all step 0 ranks 0,1 src,src r1,r1
  0->1: [2:4]@0>0
  1->0: [0:2]@0>0
copy rank 0 src dst: [0:2]@0>0
add rank 0 r1 dst: [0:2]@0>0
copy rank 1 src dst: [2:4]@0>0
add rank 1 r1 dst: [2:4]@0>0
"""
GATHER = """\
program int64
src R(1)V(1)D(2,1) shape(4,6) ranks(3,5)
dst R(2)V(1)D(1,1) shape(4,6) ranks(3,5)
buffer src rank 3: [0:2,0:6]
buffer src rank 5: [2:4,0:6]
buffer dst rank 3: [0:4,0:6]
buffer dst rank 5: [0:4,0:6]
collective all_gather step 0 ranks 3,5 src,src dst,dst
  3->3: [0:2,0:6]@0>0
  3->5: [0:2,0:6]@0>0
  5->3: [2:4,0:6]@0>0
  5->5: [2:4,0:6]@0>0
"""
REDUCE = """\
program int64
src R(1)V(2)D(1,1) shape(2,6) ranks(0,1)
dst R(2)V(1)D(1,1) shape(2,6) ranks(0,1)
buffer src rank 0: [0:2,0:6]
buffer src rank 1: [0:2,0:6]
buffer dst rank 0: [0:2,0:6]
buffer dst rank 1: [0:2,0:6]
copy rank 0 src dst: [0:2,0:6]@0>0
copy rank 1 src dst: [0:2,0:6]@0>0
collective all_reduce step 0 ranks 0,1 dst,dst dst,dst
  0->0: [0:2,0:6]@0>0
  1->1: [0:2,0:6]@0>0
"""
MASK = """\
program int64
src R(2)V(1)D(1) shape(4) ranks(0,1)
dst R(1)V(2)D(1) shape(4) ranks(0,1)
buffer src rank 0: [0:4]
buffer src rank 1: [0:4]
buffer dst rank 0: [0:4]
buffer dst rank 1: [0:4]
copy rank 0 src dst: [0:4]@0>0
zero rank 1 dst: [0:4]@0>0
"""
TRANSPOSE = """\
program int64
src R(1)V(1)D(3,1) shape(3,3) ranks(0:3)
dst R(1)V(1)D(1,3) shape(3,3) ranks(0:3)
buffer src rank 0: [0:1,0:3]
buffer src rank 1: [1:2,0:3]
buffer src rank 2: [2:3,0:3]
buffer dst rank 0: [0:3,0:1]
buffer dst rank 1: [0:3,1:2]
buffer dst rank 2: [0:3,2:3]
buffer s1 rank 0: [0:1,1:2] [0:1,2:3]
copy rank 0 src dst: [0:1,0:1]@0>0
copy rank 0 src s1: [0:1,1:2]@0>0 [0:1,2:3]@0>1
collective all_to_all step 0 ranks 0:3 s1,src,src dst,dst,dst
  0->1: [0:1,1:2]@0>0
  0->2: [0:1,2:3]@1>0
  1->0: [1:2,0:1]@0>0
  1->1: [1:2,1:2]@0>0
  1->2: [1:2,2:3]@0>0
  2->0: [2:3,0:1]@0>0
  2->1: [2:3,1:2]@0>0
  2->2: [2:3,2:3]@0>0
"""
GOOD = {"sum": SUM, "gather": GATHER, "reduce": REDUCE, "mask": MASK, "transpose": TRANSPOSE}


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD)
def test_correct_programs_verify_and_give_right_data(text: str) -> None:
    program = Program.parse(text)
    verify(program)
    assert program_faults(program) == []


MESSAGES_OF_0 = """\
  0->1: [0:1,1:2]@0>0
  0->2: [0:1,2:3]@1>0
"""
SHUFFLED_OF_0 = """\
  0->2: [0:1,2:3]@0>0
  0->1: [0:1,1:2]@1>0
"""
HALVES = """\
collective all_reduce step 0 ranks 0,1 dst,dst dst,dst
  0->0: [0:2,0:3]@0>0
  1->1: [0:2,0:3]@0>0
collective all_reduce step 0 ranks 0,1 dst,dst dst,dst
  0->0: [0:2,3:6]@0>0
  1->1: [0:2,3:6]@0>0
"""

# (name, program, [(old text, new text), ...], what the error says)
CORRUPTIONS = [
    # Shards.
    (
        "src is not the shard",
        SUM,
        [("buffer src rank 1: [0:4]", "buffer src rank 1: [0:2] [2:4]")],
        r"^buffer src of rank 1 is not its shard of R\(1\)V\(2\)D\(1\)",
    ),
    (
        "dst is not the shard",
        MASK,
        [("buffer dst rank 1: [0:4]", "buffer dst rank 1: [0:5]")],
        "^buffer dst of rank 1 is not its shard",
    ),
    (
        "no dst",
        SUM,
        [("buffer dst rank 1: [2:4]\n", "")],
        "^instruction 3: rank 1 has no buffer dst",
    ),
    # What is read and written.
    (
        "message dropped",
        SUM,
        [("  1->0: [0:2]@0>0\n", "")],
        r"^instruction 2: rank 0 reads \[0:2\] of r1 before it is written\.",
    ),
    (
        "add before its message",
        SUM,
        [
            ("add rank 0 r1 dst: [0:2]@0>0\n", ""),
            ("collective", "add rank 0 r1 dst: [0:2]@0>0\ncollective"),
        ],
        r"^instruction 0: rank 0 reads \[0:2\] of r1 before it is written\.",
    ),
    (
        "add to nothing",
        SUM,
        [("copy rank 0 src dst: [0:2]@0>0\n", "")],
        r"^instruction 1: rank 0 reads \[0:2\] of dst before it is written\.",
    ),
    (
        "dst not written",
        MASK,
        [("zero rank 1 dst: [0:4]@0>0", "zero rank 1 dst: [0:3]@0>0")],
        r"^rank 1 reads \[0:4\] of dst before it is written\.",
    ),
    (
        "copied twice",
        MASK,
        [("copy rank 0 src dst: [0:4]@0>0", "copy rank 0 src dst: [0:4]@0>0 [3:4]@0>0")],
        r"^instruction 0: rank 0 writes \[3:4\] of dst twice\.",
    ),
    (
        "zeroed after a copy",
        MASK,
        [("zero rank 1", "zero rank 0")],
        r"^instruction 1: rank 0 writes \[0:4\] of dst twice\.",
    ),
    (
        "received over a copy",
        SUM,
        [("src,src r1,r1", "src,src dst,r1"), ("add rank 0 r1 dst: [0:2]@0>0\n", "")],
        r"^instruction 1: rank 0 writes \[0:2\] of dst twice\.",
    ),
    (
        "copy to src",
        MASK,
        [("copy rank 0 src dst", "copy rank 0 src src")],
        "^instruction 0: rank 0 writes to src, which is the caller's",
    ),
    (
        "zero src",
        MASK,
        [("zero rank 1 dst", "zero rank 1 src")],
        "^instruction 1: rank 1 writes to src, which is the caller's",
    ),
    (
        "receive into src",
        SUM,
        [("src,src r1,r1", "src,src src,r1")],
        "^instruction 0: rank 0 writes to src, which is the caller's",
    ),
    # Sums.
    (
        "add dropped",
        SUM,
        [("add rank 0 r1 dst: [0:2]@0>0\n", "")],
        r"^in \[0:2\] src part 1 is added 0 times instead of once\.",
    ),
    (
        "add doubled",
        SUM,
        [("add rank 0 r1 dst: [0:2]@0>0\n", "add rank 0 r1 dst: [0:2]@0>0\n" * 2)],
        r"^in \[0:2\] src part 1 is added 2 times instead of once\.",
    ),
    (
        "part in both dst parts",
        MASK,
        [("zero rank 1 dst", "copy rank 1 src dst")],
        r"^in \[0:4\] src part 0 is added 2 times instead of once\.",
    ),
    (
        "part in no dst part",
        MASK,
        [("copy rank 0 src dst", "zero rank 0 dst")],
        r"^in \[0:4\] src part 0 is added 0 times instead of once\.",
    ),
    (
        "replicas differ",
        REDUCE,
        [("  1->1: [0:2,0:6]@0>0\n", "  1->1: [0:2,0:6]@0>0\nadd rank 1 src dst: [0:2,0:6]@0>0\n")],
        r"^ranks 0 and 1 are replicas but differ\.",
    ),
    # Buffers.
    (
        "no such buffer in a copy",
        MASK,
        [("copy rank 0 src dst", "copy rank 0 s9 dst")],
        r"^instruction 0: rank 0 has no buffer s9\.",
    ),
    (
        "no such piece in a copy",
        MASK,
        [("copy rank 0 src dst: [0:4]@0>0", "copy rank 0 src dst: [0:4]@1>0")],
        r"^instruction 0: rank 0 has no piece 1 of buffer src\.",
    ),
    (
        "box outside its piece",
        SUM,
        [("copy rank 0 src dst: [0:2]@0>0", "copy rank 0 src dst: [0:3]@0>0")],
        r"^instruction 1: rank 0: \[0:3\] is not inside piece 0 of dst, \[0:2\]\.",
    ),
    (
        "no such buffer in a call",
        SUM,
        [("src,src r1,r1", "src,s9 r1,r1")],
        r"^instruction 0: rank 1 has no buffer s9\.",
    ),
    (
        "no buffer to receive in",
        SUM,
        [("src,src r1,r1", "src,src -,r1")],
        r"^instruction 0: rank 0 names no buffer for its 1 boxes",
    ),
    (
        "no such piece in a call",
        SUM,
        [("  1->0: [0:2]@0>0", "  1->0: [0:2]@1>0")],
        r"^instruction 0: rank 1 has no piece 1 of buffer src\.",
    ),
    # Groups.
    (
        "group in wrong order",
        GATHER,
        [("step 0 ranks 3,5", "step 0 ranks 5,3")],
        r"^instruction 0: all_gather: group \(5, 3\) is not ascending ranks\.",
    ),
    (
        "rank twice in a group",
        GATHER,
        [("step 0 ranks 3,5", "step 0 ranks 3,3")],
        r"^instruction 0: all_gather: group \(3, 3\) is not ascending ranks\.",
    ),
    (
        "rank of no layout",
        GATHER,
        [("step 0 ranks 3,5", "step 0 ranks 3,7")],
        r"^instruction 0: all_gather: group \(3, 7\) is not ascending ranks\.",
    ),
    (
        "message leaves the group",
        TRANSPOSE,
        [("ranks 0:3 s1,src,src dst,dst,dst", "ranks 0,1 s1,src dst,dst")],
        r"^instruction 2: message 0->2 leaves group \(0, 1\)\.",
    ),
    (
        "fewer buffers than ranks",
        SUM,
        [("src,src r1,r1", "src,src r1")],
        "^instruction 0: .*needs one src and dst buffer each",
    ),
    # Runs.
    (
        "strided piece sent",
        GATHER,
        [
            ("all_gather", "all_to_all"),
            ("  3->5: [0:2,0:6]@0>0\n", "  3->5: [0:2,0:3]@0>0 [0:2,3:6]@0>0\n"),
        ],
        r"^instruction 0: rank 3: \[0:2,0:3\] breaks the contiguous run in src\.",
    ),
    (
        "gap in what is sent",
        GATHER,
        [("all_gather", "all_to_all"), ("  3->3: [0:2,0:6]@0>0\n", "  3->3: [0:1,0:6]@0>0\n")],
        r"^instruction 0: rank 3: \[0:2,0:6\] breaks the contiguous run in src\.",
    ),
    (
        "pieces swapped in what is received",
        TRANSPOSE,
        [
            ("buffer s1 rank 0: [0:1,1:2] [0:1,2:3]", "buffer s1 rank 0: [0:1,2:3] [0:1,1:2]"),
            ("src s1: [0:1,1:2]@0>0 [0:1,2:3]@0>1", "src s1: [0:1,1:2]@0>1 [0:1,2:3]@0>0"),
            (MESSAGES_OF_0, "  0->1: [0:1,1:2]@1>0\n  0->2: [0:1,2:3]@0>0\n"),
        ],
        r"^instruction 2: rank 0: \[0:1,2:3\] breaks the contiguous run in s1\.",
    ),
    (
        "messages out of the order of ranks",
        TRANSPOSE,
        [
            ("buffer s1 rank 0: [0:1,1:2] [0:1,2:3]", "buffer s1 rank 0: [0:1,2:3] [0:1,1:2]"),
            ("src s1: [0:1,1:2]@0>0 [0:1,2:3]@0>1", "src s1: [0:1,1:2]@0>1 [0:1,2:3]@0>0"),
            (MESSAGES_OF_0, SHUFFLED_OF_0),
        ],
        "^instruction 2: .*order",
    ),
    (
        "two messages of one pair",
        SUM,
        [("  1->0: [0:2]@0>0\n", "  1->0: [0:1]@0>0\n  1->0: [1:2]@0>0\n")],
        "^instruction 0: .*1->0",
    ),
    (
        "strided all_reduce",
        REDUCE,
        [("collective" + REDUCE.split("collective")[1], HALVES)],
        r"^instruction 2: rank 0: \[0:2,0:3\] breaks the contiguous run in dst\.",
    ),
    # Collectives.
    (
        "unequal all_gather",
        GATHER,
        [("[2:4,0:6]@0>0", "[2:3,0:6]@0>0")],
        r"^instruction 0: all_gather: group \(3, 5\) sends sizes \[6, 12\]\.",
    ),
    (
        "all_gather of different boxes",
        GATHER,
        [("  3->5: [0:2,0:6]@0>0", "  3->5: [0:1,0:6]@0>0")],
        "^instruction 0: all_gather: rank 3 sends different boxes to its group",
    ),
    (
        "all_reduce of different boxes",
        REDUCE,
        [("  1->1: [0:2,0:6]@0>0", "  1->1: [0:1,0:6]@0>0")],
        r"^instruction 2: all_reduce: group \(0, 1\) holds different boxes\.",
    ),
    (
        "all_reduce between ranks",
        REDUCE,
        [("  1->1: [0:2,0:6]@0>0", "  1->0: [0:2,0:6]@0>0")],
        r"^instruction 2: all_reduce: group \(0, 1\) holds different boxes\.",
    ),
    (
        "all_reduce out of place",
        REDUCE,
        [("dst,dst dst,dst", "src,src dst,dst")],
        r"^instruction 2: all_reduce works in place: src and dst must be one buffer\.",
    ),
    (
        "unknown collective",
        GATHER,
        [("all_gather", "all_scatter")],
        r"^instruction 0: unknown collective 'all_scatter'\.",
    ),
]


@pytest.mark.parametrize(
    "text, edits, message", [row[1:] for row in CORRUPTIONS], ids=[row[0] for row in CORRUPTIONS]
)
def test_corrupted_program_raises_error_that_names_the_corruption(
    text: str, edits: list[tuple[str, str]], message: str
) -> None:
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    with pytest.raises(rv.ProgramError, match=message):
        verify(Program.parse(text))


def test_unknown_operation_raises_program_error() -> None:
    program = Program.parse(MASK)
    copy, zero = program.instructions
    corrupted = replace(program, instructions=(replace(copy, op="multiply"), zero))
    with pytest.raises(rv.ProgramError, match=r"^instruction 0: unknown operation 'multiply'\."):
        verify(corrupted)


def test_two_buffers_of_one_name_raise_program_error() -> None:
    program = Program.parse(SUM)
    twin = Buffer("r1", 0, (Box((0,), (4,)),))
    with pytest.raises(rv.ProgramError, match="buffer r1 of rank 0"):
        verify(replace(program, buffers=(*program.buffers, twin)))


# --- rounding -----------------------------------------------------------------------------------


def sum_of_three(orders: tuple[tuple[int, ...], ...]) -> Program:
    """Every rank gets all parts, and adds them in the order given for this rank."""
    lines = [
        "program float32",
        "src R(1)V(3)D(1) shape(4) ranks(0:3)",
        "dst R(3)V(1)D(1) shape(4) ranks(0:3)",
        *(f"buffer src rank {rank}: [0:4]" for rank in range(3)),
        *(f"buffer dst rank {rank}: [0:4]" for rank in range(3)),
        *(f"buffer all rank {rank}: [0:4] [0:4] [0:4]" for rank in range(3)),
        "collective all_gather step 0 ranks 0:3 src,src,src all,all,all",
        *(f"  {a}->{b}: [0:4]@0>{a}" for a in range(3) for b in range(3)),
    ]
    for rank, (first, *rest) in enumerate(orders):
        lines.append(f"copy rank {rank} all dst: [0:4]@{first}>0")
        lines += [f"add rank {rank} all dst: [0:4]@{part}>0" for part in rest]
    return Program.parse("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    "orders, apart",
    [
        (((0, 1, 2), (0, 1, 2), (1, 0, 2)), ()),
        (((0, 1, 2), (2, 1, 0), (0, 1, 2)), ((0, 1),)),
        (((0, 1, 2), (1, 2, 0), (2, 1, 0)), ((0, 1), (0, 2))),
    ],
    ids=["one order", "another", "two others"],
)
def test_proof_lists_replicas_that_add_in_different_orders(
    orders: tuple[tuple[int, ...], ...], apart: tuple[tuple[int, int], ...]
) -> None:
    program = sum_of_three(orders)
    assert verify(program) == Proof(rounds_apart=apart)
    parts = {rank: np.full(4, value, np.float32) for rank, value in enumerate((1e8, -1e8, 1.0))}
    shards = simulate_program(program, parts).shards
    differ = {(0, rank) for rank in (1, 2) if shards[rank].tobytes() != shards[0].tobytes()}
    assert differ == set(apart)


@given(transitions())
def test_replicas_not_listed_in_the_proof_have_equal_bits(
    transition: tuple[rv.Layout, rv.Layout, rv.Topology],
) -> None:
    src, dst, topology = transition
    plan = rv.plan(src, dst, topology=topology)
    apart = {pair[1] for pair in plan.verify().rounds_apart}
    random = np.random.default_rng(0)
    shapes = {rank: src.cell(rank).box.shape for rank in src.ranks}
    # Replicas of one part are equal, so a part is drawn from the seed of its number.
    whole = [random.normal(size=src.shape).astype(np.float32) for _ in range(src.rvd.v)]
    shards = {
        rank: whole[src.cell(rank).part][
            src.cell(rank).box.slices_within(rv.Box.of_shape(src.shape))
        ].reshape(shapes[rank])
        for rank in src.ranks
    }
    found = rv.simulate(plan, shards).shards
    first: dict[tuple[int, object], bytes] = {}
    for rank in dst.ranks:
        if rank not in apart:
            cell = dst.cell(rank)
            bits = found[rank].tobytes()
            assert first.setdefault((cell.part, cell.box), bits) == bits


def test_plan_verifies_its_program() -> None:
    src, dst = rv.Layout((6, 10), "R(1)V(2)D(3,1)"), rv.Layout((6, 10), "R(3)V(1)D(1,2)")
    plan = rv.plan(src, dst)
    plan.__dict__["program"] = Program.parse(SUM.replace("add rank 0 r1 dst: [0:2]@0>0\n", ""))
    with pytest.raises(rv.ProgramError, match="is added 0 times"):
        plan.verify()


def test_empty_tensor_verifies() -> None:
    src, dst = rv.Layout((0, 4), "R(1)V(2)D(1,2)"), rv.Layout((0, 4), "R(4)V(1)D(1,1)")
    verify(rv.plan(src, dst).program)
