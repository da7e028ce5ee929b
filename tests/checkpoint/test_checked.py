"""Checked reads: every block that is read is compared, whole or not, and read once."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import rvdcomm as rv
from rvdcomm.checkpoint import load_shards, open_checkpoint, reshard
from rvdcomm.checkpoint.checked import Damage, checked
from rvdcomm.checkpoint.checksums import (
    BLOCK_BYTES,
    BlockSum,
    check_checksum,
    checksum_of,
    placeholder,
)
from tests.checkpoint.models import make, model

SIZE = 10_007
BLOCK = 1000


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(0).randbytes(SIZE)


def block_checksum(data: bytes) -> str:
    found = BlockSum(BLOCK)
    found.update(data[: SIZE // 3])
    found.update(data[SIZE // 3 :])
    return found.text()


def ranges_of(generator: random.Random, count: int, is_sorted: bool) -> list[tuple[int, int]]:
    cuts = sorted(generator.sample(range(SIZE + 1), 2 * count))
    ranges = list(zip(cuts[::2], cuts[1::2], strict=True))
    if not is_sorted:
        generator.shuffle(ranges)
    return ranges


@pytest.mark.parametrize("seed", range(6))
def test_any_ranges_are_read_right_and_their_blocks_are_compared(seed: int, data: bytes) -> None:
    generator = random.Random(seed)
    ranges = ranges_of(generator, generator.randint(1, 40), seed % 3 != 0)
    touched = {i // BLOCK for lo, hi in ranges for i in range(lo, hi)}
    flipped = generator.randrange(SIZE)
    for is_damaged in (False, True):
        stored = bytearray(data)
        stored[flipped] ^= is_damaged << generator.randrange(8)
        reads = checked(block_checksum(data), SIZE)
        read: list[int] = []

        def fill(
            offset: int, out: memoryview, stored: bytes = stored, read: list[int] = read
        ) -> None:
            out[:] = stored[offset : offset + len(out)]
            read += range(offset, offset + len(out))

        found = None
        try:
            for lo, hi in ranges:
                out = bytearray(hi - lo)
                reads.read(lo, memoryview(out), fill)
                assert is_damaged or out == data[lo:hi]
            reads.finish(fill)
        except Damage as damage:
            found = damage.start // BLOCK
        assert found == (flipped // BLOCK if is_damaged and flipped // BLOCK in touched else None)
        if seed % 3 and not is_damaged:  # In ascending order: each byte of each block once.
            assert sorted(read) == [i for i in range(SIZE) if i // BLOCK in touched]


def test_checksum_text_says_what_it_is() -> None:
    data = bytes(BLOCK_BYTES + 1)
    assert checksum_of(data) == f"crc32c/1048576:14298c12{checksum_of(bytes(1))[-8:]}"
    assert len(placeholder(len(data))) == len(checksum_of(data))
    assert checksum_of(b"") == placeholder(0) == "crc32c/1048576:"
    with pytest.raises(rv.CheckpointError, match="2 checksums of blocks of 1048576 bytes are no"):
        check_checksum(checksum_of(data), BLOCK_BYTES)


# --- checkpoints --------------------------------------------------------------------------------

ROWS, COLUMNS = 1024, 1152  # A matrix of 4.5 blocks.


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {"w": torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS).int()}
    layout = f"R(1)V(1)D(1,1) shape({ROWS},{COLUMNS})"
    return make("sharded", tmp_path_factory.mktemp("big"), tensors, {"w": layout})


PARTS = {"rows": "R(1)V(1)D(7,1)", "columns": "R(1)V(1)D(1,9)", "both": "R(1)V(1)D(3,3)"}


@pytest.mark.parametrize("damage", ["a flipped bit", "a zeroed block"])
@pytest.mark.parametrize("part", PARTS)
def test_damage_is_noticed_where_a_part_is_read(
    part: str, damage: str, big: Path, tmp_path: Path
) -> None:
    shutil.copytree(big, tmp_path / "src")
    path = tmp_path / "src/rank-00000.safetensors"
    start = open_checkpoint(big).tensors["w"].blocks[0].extent.start  # type: ignore[union-attr]
    layout = {"w": rv.Layout((ROWS, COLUMNS), PARTS[part])}
    rank = 4
    box = layout["w"].cell(rank).box
    # An element that is read: the last one of the box.
    at = start + 4 * ((box.hi[0] - 1) * COLUMNS + box.hi[1] - 1)
    data = bytearray(path.read_bytes())
    if damage == "a flipped bit":
        data[at] ^= 64
    else:
        data[at - at % 4096 : at - at % 4096 + 4096] = bytes(4096)
    path.write_bytes(data)
    with pytest.raises(rv.CheckpointError, match=r"bytes \d+ to \d+, of tensor 'w' .* are damaged"):
        load_shards(tmp_path / "src", layout, rank)
    assert load_shards(tmp_path / "src", layout, rank, verify=False)["w"].shape == box.shape


@pytest.mark.parametrize("part", PARTS)
def test_part_is_read_with_its_blocks_and_each_byte_once(
    part: str, big: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[int, int]] = []
    preadv = os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        read.append((offset, preadv(descriptor, buffers, offset)))
        return read[-1][1]

    monkeypatch.setattr("rvdcomm.checkpoint.reader.os.preadv", counting)
    layout = rv.Layout((ROWS, COLUMNS), PARTS[part])
    shard = load_shards(big, {"w": layout}, 2)["w"]
    whole = torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS).int()
    box = layout.cell(2).box
    assert torch.equal(shard, whole[box.lo[0] : box.hi[0], box.lo[1] : box.hi[1]])
    ends = sorted((offset, offset + size) for offset, size in read)
    assert all(a[1] <= b[0] for a, b in pairwise(ends))
    num_bytes = sum(size for _, size in read)
    assert num_bytes <= (shard.nbytes + 2 * BLOCK_BYTES if part == "rows" else 4 * whole.numel())


@pytest.mark.parametrize("is_damaged", [False, True])
def test_checkpoints_of_version_2_are_read_and_compared(is_damaged: bool, tmp_path: Path) -> None:
    src = make("sharded", tmp_path)
    path = src / "rvdcomm-manifest.json"
    said = json.loads(path.read_text())
    catalog = open_checkpoint(src)
    for name, tensor in said["tensors"].items():
        rank_blocks = catalog.tensors[name].blocks
        for shard, block in zip(tensor["shards"], rank_blocks, strict=True):
            extent = block.extent
            assert extent is not None
            data = (src / extent.file).read_bytes()[extent.start :][: extent.num_bytes]
            shard[1] = hashlib.sha256(data).hexdigest()
    path.write_text(json.dumps(said | {"version": 2}))
    if is_damaged:
        extent = catalog.tensors["ids"].chosen[0].extent
        assert extent is not None
        changed = bytearray((src / extent.file).read_bytes())
        changed[extent.start] ^= 1
        (src / extent.file).write_bytes(changed)
        with pytest.raises(rv.CheckpointError, match=r"'ids' .* are damaged: their sha256 is"):
            reshard(src, tmp_path / "dst")
        return
    reshard(src, tmp_path / "dst", to="whole")
    found = load_shards(tmp_path / "dst", {"ids": rv.Layout((11,), "R(1)V(1)D(1)")}, 0)
    assert torch.equal(found["ids"], model()["ids"])
