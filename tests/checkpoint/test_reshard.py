"""Reshard: from every form to every form, bit for bit, with few reads, in bounded memory."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import rvdcomm as rv
from rvdcomm.checkpoint import (
    Rules,
    commit_shards,
    open_checkpoint,
    plan_reshard,
    reshard,
    save_shards,
)
from rvdcomm.checkpoint.forms import FORMS
from rvdcomm.checkpoint.plan import MIN_MEMORY_LIMIT
from tests.checkpoint.models import (
    LOADERS,
    RULES,
    SOURCES,
    are_equal,
    files_of,
    make,
    model,
)
from tests.covering import covering, each_value

LARGE = {
    "rows": torch.arange(300 * 517).reshape(300, 517).to(torch.int32),
    "columns": torch.arange(7 * 20_001).reshape(7, 20_001).bfloat16(),
    "cube": torch.arange(33 * 17 * 129).reshape(33, 17, 129).double(),
    "line": torch.arange(200_003).to(torch.uint8),
}
LARGE_LAYOUTS = {
    "rows": "R(1)V(1)D(1,4) shape(300,517)",
    "columns": "R(2)V(1)D(1,2) shape(7,20001) cuts(0,7;0,1,20001)",
    "cube": "R(1)V(1)D(2,1,2) shape(33,17,129)",
    "line": "R(4)V(1)D(1) shape(200003)",
}
LARGE_RULES = Rules(
    {
        "rows": "R(1)V(1)D(1,3)",
        "columns": "R(3)V(1)D(1,1)",
        "cube": "R(1)V(1)D(3,1,1)",
        "line": "R(1)V(3)D(1)",
    },
    ranks=range(3),
)


# --- output -------------------------------------------------------------------------------------


@each_value(kind=SOURCES, to=FORMS)
def test_reshard_of_every_form_to_every_form_keeps_every_bit(
    kind: str, to: str, tmp_path: Path
) -> None:
    rules = None if to == "whole" else RULES
    reshard(make(kind, tmp_path), tmp_path / "dst", rules, to=to, verify=True)
    assert are_equal(LOADERS[to](tmp_path / "dst", model()), model())
    reshard(tmp_path / "dst", tmp_path / "again", to="whole")
    assert are_equal(LOADERS["whole"](tmp_path / "again", model()), model())


@pytest.mark.parametrize("to", FORMS)
@pytest.mark.parametrize("kind", ["whole", "sharded", "dcp-transposed"])
def test_small_windows_change_no_bit(kind: str, to: str, tmp_path: Path) -> None:
    rules = None if to == "whole" else LARGE_RULES
    src = make(kind, tmp_path, LARGE, LARGE_LAYOUTS)
    if to == "dcp":
        rules = Rules({"rows": "R(1)V(1)D(1,3)"}, ranks=range(3))
    plan = plan_reshard(src, rules, to=to, memory_limit=MIN_MEMORY_LIMIT)
    assert all(len(list(target.windows())) > 2 for target in plan.targets)
    reshard(src, tmp_path / "dst", rules, to=to, memory_limit=MIN_MEMORY_LIMIT, verify=True)
    assert are_equal(LOADERS[to](tmp_path / "dst", LARGE), LARGE)


@pytest.mark.parametrize("rank", [0, 3])
def test_files_stay_below_max_file_bytes(rank: int, tmp_path: Path) -> None:
    rules = Rules(ranks=(rank,))
    reshard(make("whole", tmp_path), tmp_path / "dst", rules, to="whole", max_file_bytes=200)
    index = json.loads((tmp_path / "dst/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in model().values())
    found = [
        load_file(tmp_path / "dst" / name) for name in sorted(set(index["weight_map"].values()))
    ]
    assert len(found) > 2
    sizes = [[t.nbytes for t in tensors.values()] for tensors in found]
    assert all(sum(size) <= 200 or len(size) == 1 for size in sizes)
    assert are_equal({n: t for tensors in found for n, t in tensors.items()}, model())


@pytest.mark.parametrize("kind", ["whole", "sharded", "dcp"])
def test_floats_are_converted_as_torch_does(kind: str, tmp_path: Path) -> None:
    reshard(make(kind, tmp_path), tmp_path / "dst", RULES, dtype="float32")
    expected = {
        name: t.float() if t.dtype in (torch.bfloat16, torch.float16, torch.float64) else t
        for name, t in model().items()
    }
    assert are_equal(LOADERS["sharded"](tmp_path / "dst", expected), expected)


def test_names_are_renamed_before_layouts_are_matched(tmp_path: Path) -> None:
    rules = Rules(
        {"blocks.*": "R(1)V(1)D(1,2)"}, {r"^layers\.(\d+)\.q": r"blocks.\1.query"}, (0, 1)
    )
    tensors = {"layers.12.q": torch.arange(6.0).reshape(2, 3), "q": torch.ones(2)}
    reshard(make("whole", tmp_path, tensors), tmp_path / "dst", rules)
    found = open_checkpoint(tmp_path / "dst").tensors
    assert set(found) == {"blocks.12.query", "q"}
    assert len(found["blocks.12.query"].blocks) == 2


def test_torch_dcp_reads_our_sharded_safetensors_files(tmp_path: Path) -> None:
    reshard(make("whole", tmp_path), tmp_path / "dst", RULES)
    found = {name: torch.zeros_like(tensor) for name, tensor in model().items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "dst")))
    assert are_equal(found, model())


def test_elements_are_aligned_in_files(tmp_path: Path) -> None:
    reshard(make("whole", tmp_path), tmp_path / "dst", RULES)
    for tensor in open_checkpoint(tmp_path / "dst").tensors.values():
        item_bytes = getattr(torch, tensor.dtype).itemsize
        assert all(block.extent.start % item_bytes == 0 for block in tensor.blocks)


# --- reads --------------------------------------------------------------------------------------


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], int]:
    """Count from now on how often every byte of every file is read."""
    counts: dict[tuple[str, int], int] = {}
    preadv = os.preadv

    def counting(descriptor, buffers, offset):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        found = preadv(descriptor, buffers, offset)
        for i in range(offset, offset + found):
            counts[path, i] = counts.get((path, i), 0) + 1
        return found

    monkeypatch.setattr("rvdcomm.checkpoint.reader.os.preadv", counting)
    return counts


@pytest.mark.parametrize("kind", SOURCES)
def test_every_element_is_read_once_from_one_replica(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src = make(kind, tmp_path)
    counts = counted_reads(monkeypatch)
    report = reshard(src, tmp_path / "dst", RULES)
    tensors = open_checkpoint(src).tensors.values()
    expected = sum(tensor.num_bytes * tensor.num_parts for tensor in tensors)
    assert set(counts.values()) == {1}
    assert len(counts) == expected == report.plan.read_bytes == sum(report.read_bytes.values())


def test_reads_are_spread_over_the_files_of_all_replicas(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.full((40,), float(i)) for i in range(64)}
    rules = Rules(ranks=range(4))
    reshard(make("whole", tmp_path, tensors), tmp_path / "replicated", rules)
    report = reshard(tmp_path / "replicated", tmp_path / "dst", to="whole")
    assert len(report.read_bytes) == 4
    assert max(report.read_bytes.values()) < 2 * 64 * 160 / 4


# --- memory -------------------------------------------------------------------------------------


@covering(to=FORMS, kind=["whole", "sharded"], dtype=[None, "float64"])
def test_buffers_stay_below_the_limit(
    kind: str, to: str, dtype: str | None, tmp_path: Path
) -> None:
    tensors = {"w": torch.arange(1 << 21).reshape(1 << 11, -1).float()}  # 8 MiB
    src = make(kind, tmp_path, tensors, {"w": "R(1)V(2)D(2,2) shape(2048,1024)"})
    limit = 2 << 20
    rules = None if to == "whole" else Rules({"w": "R(1)V(1)D(1,4)"}, ranks=range(4))
    options = {"to": to, "dtype": dtype, "memory_limit": limit}
    # Imports and caches are not counted.
    reshard(src, tmp_path / "warm", rules, **options)
    tracemalloc.start()
    report = reshard(src, tmp_path / "dst", rules, **options)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Besides buffers there are names and headers, and what Python's own machinery takes.
    assert limit / 2 < report.plan.peak_bytes <= limit
    assert report.plan.peak_bytes <= peak < limit + (256 << 10)


def test_memory_limit_that_is_too_small_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(rv.CheckpointError, match="memory_limit=1000 is too small: use at least"):
        plan_reshard(make("whole", tmp_path), memory_limit=1000)


# --- plans --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SOURCES)
def test_plan_predicts_the_files_and_bytes_of_the_reshard(kind: str, tmp_path: Path) -> None:
    plan = plan_reshard(make(kind, tmp_path), RULES)
    report = reshard(tmp_path / kind, tmp_path / "dst", RULES)
    files = [load_file(path) for path in (tmp_path / "dst").glob("*.safetensors")]
    assert plan.num_files == len(files) == 4
    assert plan.write_bytes == sum(t.nbytes for tensors in files for t in tensors.values())
    assert plan.read_bytes == sum(report.read_bytes.values())
    assert str(plan) == str(report.plan)


def test_printed_plan_has_one_line_per_tensor(tmp_path: Path) -> None:
    prefix = "model.language_model.layers.0.self_attn.projection_of_"
    tensors = {prefix + "x" * i: torch.ones(1 << i) for i in range(20)}
    rules = Rules({"*": "R(1000)V(1)D(1)"}, ranks=range(1000))
    plan = plan_reshard(make("whole", tmp_path, tensors), rules, dtype="bfloat16")
    lines = str(plan).splitlines()
    assert len(lines) == 1 + 20 + 2
    assert max(map(len, lines)) <= 100
    assert lines[-2] == "total  20 tensors, 1 -> 1000 files, whole -> sharded"
    assert lines[-1] == "       read 4 MiB, write 1.953 GiB, peak 3 MiB"


# --- rejected requests --------------------------------------------------------------------------


def test_source_as_destination_is_rejected(tmp_path: Path) -> None:
    src = make("whole", tmp_path)
    with pytest.raises(rv.CheckpointError, match="is source and destination"):
        reshard(src, tmp_path / "whole/../whole")
    assert list(files_of(src)) == ["model.safetensors"]


def test_destination_with_other_files_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst/mine.txt").write_text("mine")
    with pytest.raises(rv.CheckpointError, match=r"is not empty: it holds 'mine.txt'"):
        reshard(make("whole", tmp_path), tmp_path / "dst")
    assert files_of(tmp_path / "dst") == {"mine.txt": b"mine"}


def test_entries_that_are_no_tensors_are_dropped_only_if_requested(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(3), "step": 7, "name": "me"}
    src = make("dcp", tmp_path, tensors)  # type: ignore[arg-type]
    with pytest.raises(rv.CheckpointError, match="2 entries that are no tensors, such as 'name'"):
        reshard(src, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()
    report = reshard(src, tmp_path / "dst", tensors_only=True)
    assert report.plan.source.others == ("name", "step")


@pytest.mark.parametrize(
    "rules, options, message",
    [
        (Rules({"ids": "R(1)V(1)D(1,2)"}, ranks=(0, 1)), {}, r"tensor 'ids' of shape \[11\], rule"),
        (Rules({"ids": "R(1)V(1)D(3)"}, ranks=(0, 1)), {}, "needs 3 ranks"),
        (Rules({"ids": "R(1)V(1)D(2) ranks(0,5)"}, ranks=(0, 1)), {}, "names rank 5"),
        (Rules({"mask": "R(1)V(2)D(1)"}, ranks=(0, 1)), {}, "bool values cannot be summed"),
        (Rules({"ids": "R(1)V(2)D(1)"}, ranks=(0, 1)), {"to": "dcp"}, "holds no value parts"),
        (Rules({}, {"ids|mask": "x"}), {}, "'ids' and 'mask' the same name|'mask' and 'ids'"),
        (RULES, {"to": "whole"}, "leave out layouts and ranks"),
        (Rules({"idz": "R(1)V(1)D(1)", "*": "R(1)V(1)D(1)"}), {}, r"\[layouts\] has .* 'idz', whi"),
        (Rules({}, {"^modul.": ""}), {}, r"\[rename\] has .*'\^modul.', which no .* as 'embed.wei"),
        (None, {"to": "zip"}, "to='zip' is no kind of checkpoint; use sharded, whole, dcp"),
        (None, {"dtype": "float8_e5m2"}, "it needs a scale"),
        (None, {"dtype": "float12"}, "dtype 'float12' is unknown"),
    ],
)
def test_invalid_requests_are_rejected(
    rules: Rules | None, options: dict[str, str], message: str, tmp_path: Path
) -> None:
    src = make("whole", tmp_path)
    with pytest.raises((rv.CheckpointError, rv.LayoutError), match=message):
        reshard(src, tmp_path / "dst", rules, **options)
    assert not (tmp_path / "dst").exists()


def test_value_parts_of_a_dtype_without_sum_are_rejected(tmp_path: Path) -> None:
    layout = rv.Layout((3,), "R(1)V(2)D(1)")
    for rank in layout.ranks:
        save_shards(tmp_path / "src", {"m": torch.tensor([True, False, True])}, {"m": layout}, rank)
    commit_shards(tmp_path / "src", layout.ranks)
    with pytest.raises(rv.CheckpointError, match="2 value parts of bool, which has no sum"):
        plan_reshard(tmp_path / "src")


# --- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["embed.weight", "scale", "ids", "layers.0.fp8"])
def test_flipped_bit_of_the_source_is_detected(name: str, tmp_path: Path) -> None:
    src = make("sharded", tmp_path)
    block = open_checkpoint(src).tensors[name].chosen[-1].extent
    data = bytearray((src / block.file).read_bytes())
    data[block.start + block.num_bytes - 1] ^= 4
    (src / block.file).write_bytes(data)
    with pytest.raises(
        rv.CheckpointError,
        match=rf"{block.file}: bytes \d+ to \d+, of tensor '{name}' .* are damaged",
    ):
        reshard(src, tmp_path / "dst", RULES)
    # No file of the damaged batch was written, and the folder is not a checkpoint.
    assert list(files_of(tmp_path / "dst")) == ["rvdcomm-journal.jsonl"]
    with pytest.raises(rv.CheckpointError, match="has not finished"):
        open_checkpoint(tmp_path / "dst")


def test_flipped_bit_is_detected_when_a_tensor_is_read_in_windows(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(100_000.0).reshape(100, 1000)}
    rules = Rules({"w": "R(1)V(1)D(1,3)"}, ranks=range(3))
    reshard(make("whole", tmp_path, tensors), tmp_path / "src", rules)
    path = tmp_path / "src/rank-00001-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(rv.CheckpointError, match="are damaged"):
        reshard(tmp_path / "src", tmp_path / "dst", memory_limit=MIN_MEMORY_LIMIT)


def test_file_that_shrinks_while_it_is_read_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src = make("whole", tmp_path)
    monkeypatch.setattr("rvdcomm.checkpoint.reader.os.preadv", lambda *_: 0)
    with pytest.raises(rv.CheckpointError, match="it was cut off or changed while it was read"):
        reshard(src, tmp_path / "dst")
