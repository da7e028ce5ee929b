from __future__ import annotations

import random
import time

import pytest

import rvdcomm as rv
from rvdcomm.checkpoint.stored import MAX_BOXES, Extent, StoredBlock, StoredTensor, are_disjoint
from rvdcomm.layout import Box


def block(text: str, part: int = 0, file: str = "a") -> StoredBlock:
    box = Box.parse(text)
    return StoredBlock.whole(Extent(file, 0, 0, box.shape), box, part)


@pytest.mark.parametrize(
    "shape, boxes",
    [
        ((4, 6), ["[0:4,0:2]", "[0:1,2:6]", "[1:4,2:6]"]),
        ((4, 6), ["[0:4,0:6]", "[0:4,0:6]", "[2:2,0:6]"]),
        ((), ["[]"]),
        ((0, 3), []),
        ((0, 3), ["[0:0,0:3]"]),
    ],
)
def test_boxes_that_tile_the_shape_are_accepted(shape: tuple[int, ...], boxes: list[str]) -> None:
    tensor = StoredTensor("w", "float32", shape, tuple(map(block, boxes)))
    assert {b.box for b in tensor.chosen} == {
        Box.parse(text) for text in boxes if not Box.parse(text).is_empty
    }


@pytest.mark.parametrize(
    "shape, boxes, message",
    [
        ((4, 6), ["[0:4,0:2]"], r"1 shards of 8 elements do not tile shape \(4, 6\) \(24 el"),
        ((4, 6), ["[0:4,0:4]", "[0:4,2:4]"], "do not tile"),
        ((4, 6), ["[0:4,0:5]", "[0:2,4:6]"], "do not tile"),
        ((4, 6), ["[0:4,0:7]"], "has a shard .* outside of it"),
        ((4,), ["[0:2]", "[3:5]"], "has a shard .* outside of it"),
        ((), [], "do not tile"),
    ],
)
def test_boxes_that_do_not_tile_the_shape_are_rejected(
    shape: tuple[int, ...], boxes: list[str], message: str
) -> None:
    with pytest.raises(rv.CheckpointError, match=message):
        StoredTensor("w", "float32", shape, tuple(map(block, boxes)))


def test_every_value_part_must_tile_the_shape() -> None:
    halves = block("[0:2]"), block("[2:4]"), block("[0:4]", part=1)
    assert StoredTensor("w", "float32", (4,), halves, num_parts=2).chosen == halves
    with pytest.raises(rv.CheckpointError, match="do not tile"):
        StoredTensor("w", "float32", (4,), halves[:2], num_parts=2)


def block_file(blocks: tuple[StoredBlock, ...]) -> str:
    assert blocks[0].extent is not None
    return blocks[0].extent.file


def test_reads_of_many_tensors_are_spread_over_replicas() -> None:
    replicas = tuple(block("[0:4]", file=file) for file in "abcd")
    chosen = [StoredTensor(f"w{i}", "int8", (4,), replicas).chosen for i in range(400)]
    assert {len(blocks) for blocks in chosen} == {1}
    counts = [sum(block_file(blocks) == file for blocks in chosen) for file in "abcd"]
    assert min(counts) > 60


def test_are_disjoint_agrees_with_pairwise_comparison() -> None:
    draw = random.Random(0)
    verdicts = set()
    for _ in range(300):
        boxes = []
        for _ in range(draw.randint(1, 6)):
            lo = [draw.randint(0, 8) for _ in range(2)]
            boxes.append(Box(tuple(lo), tuple(a + draw.randint(1, 3) for a in lo)))
        boxes = sorted(set(boxes))
        expected = not any(a.intersect(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])
        assert are_disjoint(boxes) == expected
        verdicts.add(expected)
    assert verdicts == {True, False}


@pytest.mark.timeout(60)
def test_many_boxes_are_checked_in_bounded_time() -> None:
    # Half of the boxes overlap along dim 0, the others along dim 1: sorting along one dim does not
    # separate all of them.
    half = MAX_BOXES // 2
    rows = [block(f"[{i}:{i + 1},0:{half}]") for i in range(half)]
    columns = [block(f"[{half}:{2 * half},{i}:{i + 1}]") for i in range(half)]
    start = time.process_time()
    StoredTensor("w", "int8", (2 * half, half), (*rows, *columns))
    assert time.process_time() - start < 20
    columns[-1:] = [block(f"[{half + i}:{half + i + 1},{half - 1}:{half}]") for i in range(half)]
    with pytest.raises(rv.CheckpointError, match=f"up to {MAX_BOXES} are read"):
        StoredTensor("w", "int8", (2 * half, half), (*rows, *columns))
