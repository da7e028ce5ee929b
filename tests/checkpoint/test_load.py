from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import rvdcomm as rv
from rvdcomm.checkpoint import load_shards
from rvdcomm.layout import Box
from tests.checkpoint.models import SOURCES, bits, make, model
from tests.covering import each_value

LAYOUTS = {
    "embed.weight": rv.Layout((7, 10), "R(1)V(1)D(1,4)"),
    "layers.0.q.weight": rv.Layout((9, 5), "R(1)V(4)D(1,1)"),
    "layers.0.o.weight": rv.Layout((6, 4, 3), "R(1)V(1)D(2,1,2)"),
    "ids": rv.Layout((11,), "R(4)V(1)D(1)"),
    "scale": rv.Layout((), "R(4)V(1)D()"),
    "empty": rv.Layout((0, 4), "R(1)V(1)D(4,1)"),
}


def expected(name: str, rank: int) -> torch.Tensor:
    layout, whole = LAYOUTS[name], model()[name]
    box = whole[layout.cell(rank).box.slices_within(Box.of_shape(layout.shape))]
    return torch.zeros_like(box) if layout.cell(rank).part else box


def is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape, bits(a)) == (b.dtype, b.shape, bits(b))


@each_value(kind=SOURCES, rank=[0, 3])
def test_floats_are_converted_and_others_are_not(kind: str, rank: int, tmp_path: Path) -> None:
    found = load_shards(make(kind, tmp_path), LAYOUTS, rank, dtype=torch.bfloat16)
    for name, shard in found.items():
        value = expected(name, rank)
        assert is_equal(shard, value.bfloat16() if value.is_floating_point() else value)


@each_value(kind=SOURCES, rank=[1, 2])
def test_shards_are_read_into_given_tensors(
    kind: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rvdcomm.checkpoint.load.WINDOW_BYTES", 40)  # Many windows.
    out = {
        "embed.weight": torch.full(expected("embed.weight", rank).shape[::-1], -1.0).T,
        "layers.0.q.weight": torch.full((9, 5), -1.0),
        "layers.0.o.weight": torch.full_like(expected("layers.0.o.weight", rank), -1.0),
    }
    found = load_shards(make(kind, tmp_path), LAYOUTS, rank, out=out)
    for name, shard in found.items():
        assert name not in out or shard is out[name]
        value = expected(name, rank)
        assert is_equal(shard, value.float() if name == "layers.0.q.weight" else value)


def test_parameters_are_read_into_without_a_graph(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(7, 3, dtype=torch.float64))
    load_shards(make("whole", tmp_path), LAYOUTS, 0, out={"embed.weight": weight}, strict=False)
    assert weight.grad_fn is None
    assert torch.equal(weight.detach(), expected("embed.weight", 0).double())


def test_all_missing_tensors_are_named(tmp_path: Path) -> None:
    src = make("whole", tmp_path)
    layouts = LAYOUTS | {f"x{i}": LAYOUTS["ids"] for i in range(3)}
    message = "holds no 3 tensors 'x0', 'x1', 'x2'; it has 8 tensors, such as 'embed.weight'"
    with pytest.raises(rv.CheckpointError, match=message):
        load_shards(src, layouts, 0)
    many = {f"x{i}": LAYOUTS["ids"] for i in range(1000)}
    with pytest.raises(rv.CheckpointError, match=r"holds no 1000 tensors 'x0', .* and 980 more"):
        load_shards(src, many, 0)
    assert set(load_shards(src, layouts, 0, strict=False)) == set(LAYOUTS)


@pytest.mark.parametrize(
    "name, given, error, message",
    [
        ("ids", torch.zeros(11), rv.LayoutError, "'ids' is int64 and cannot be read as float32"),
        ("ids", torch.zeros(3).long(), rv.ShapeMismatchError, r"passes out 'ids' \[3\], its shard"),
        ("idz", torch.zeros(3), rv.LayoutError, r"out has \['idz'\], for which there is no layout"),
    ],
)
def test_given_tensors_that_do_not_fit_are_rejected_before_any_is_changed(
    name: str, given: torch.Tensor, error: type[Exception], message: str, tmp_path: Path
) -> None:
    first = torch.full((7, 3), -1.0)
    src = make("whole", tmp_path)
    with pytest.raises(error, match=message):
        load_shards(src, LAYOUTS, 0, out={"embed.weight": first, name: given})
    assert torch.equal(first, torch.full((7, 3), -1.0))


@pytest.mark.parametrize(
    "given, message",
    [
        (lambda: torch.zeros(1, 3).expand(7, 3), "out 'embed.weight' has elements that share"),
        (lambda: torch.zeros(7, 3, device="meta"), "out 'embed.weight' is on the device meta"),
        (lambda: torch.zeros(7, 3).to_sparse(), "out 'embed.weight' has no strides"),
        (lambda: 5, "out 'embed.weight' is of type int"),
    ],
    ids=["expanded", "meta", "sparse", "number"],
)
def test_tensors_that_cannot_be_written_are_rejected(
    given: Callable[[], Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(rv.LayoutError, match=message):
        load_shards(make("whole", tmp_path), LAYOUTS, 0, out={"embed.weight": given()})


def two(folder: Path, b: float) -> tuple[Path, dict[str, rv.Layout]]:
    """A checkpoint of "a", all 1, and of "b"; and their layouts."""
    save_file({"a": torch.ones(4), "b": torch.full((4,), b)}, folder / "model.safetensors")
    return folder, dict.fromkeys("ab", rv.Layout((4,), "R(1)V(1)D(2)"))


def test_given_tensors_that_overlap_are_rejected(tmp_path: Path) -> None:
    src, layouts = two(tmp_path, 1.0)
    p = torch.zeros(4)
    with pytest.raises(rv.LayoutError, match="out 'a' shares memory with out 'b'"):
        load_shards(src, layouts, 0, out={"a": p[:2], "b": p[1:3]})
    assert torch.equal(p, torch.zeros(4))
    load_shards(src, layouts, 0, out={"a": p[::2], "b": p[1::2]})
    assert torch.equal(p, torch.ones(4))


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_one_tensor_of_two_names_is_read_if_their_values_are_equal(
    order: str, tmp_path: Path
) -> None:
    src, layouts = two(tmp_path, 1.0)
    tied = torch.zeros(2, dtype=torch.float64)
    load_shards(src, layouts, 0, out=dict.fromkeys(order, tied))
    assert torch.equal(tied, torch.ones(2).double())
    two(tmp_path, 2.0)
    with pytest.raises(rv.CheckpointError, match=f"{order[0]!r} and {order[1]!r}, and both have"):
        load_shards(src, layouts, 0, out=dict.fromkeys(order, tied))


def test_failing_disk_is_a_checkpoint_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src = make("whole", tmp_path)

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("rvdcomm.checkpoint.reader.os.preadv", fail)
    message = "reading .*whole stopped: .*Input/output error: '.*whole/model.safetensors'; remove"
    with pytest.raises(rv.CheckpointError, match=message):
        load_shards(src, LAYOUTS, 0)
