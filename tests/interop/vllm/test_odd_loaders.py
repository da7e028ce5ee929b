"""Loaders that do odd things: what arrives is what they make of a whole checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from rvdcomm import RVD, Box, Layout, LayoutError
from rvdcomm.interop.vllm.receiver import needs_in
from rvdcomm.interop.vllm.record import Record, TensorMeta, recorded
from rvdcomm.interop.vllm.transfer import Offer, Transfer

CPU = torch.device("cpu")
Weights = Iterable[tuple[str, Tensor]]
Loader = Callable[[Tensor, Weights], None]

BYTES = torch.arange(64, dtype=torch.uint8).reshape(8, 8)
VALUES = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
LOADERS: dict[str, tuple[Loader, dict[str, Tensor], torch.dtype]] = {}


def case(
    weights: dict[str, Tensor] | Tensor, dtype: torch.dtype = torch.float32
) -> Callable[[Loader], Loader]:
    """A loader of a parameter ``[8, 8]``, with the tensors that it gets."""

    def add(loader: Loader) -> Loader:
        given = weights if isinstance(weights, dict) else {"w": weights}
        LOADERS[loader.__name__] = loader, given, dtype
        return loader

    return add


@case(VALUES.to(torch.float8_e4m3fn), torch.uint8)
def bits_of_bytes(to: Tensor, weights: Weights) -> None:
    for _, tensor in weights:
        to.copy_(tensor.view(torch.uint8))


@case(BYTES, torch.bfloat16)
def bits_of_pairs(to: Tensor, weights: Weights) -> None:
    for _, tensor in weights:
        to[:, :4].copy_(tensor.view(torch.bfloat16))


@case(VALUES)
def strides_of_a_copy(to: Tensor, weights: Weights) -> None:
    for _, tensor in weights:
        to.copy_(tensor.t().contiguous().as_strided((8, 8), (8, 1)))


@case(VALUES)
def negated_view(to: Tensor, weights: Weights) -> None:
    for _, tensor in weights:
        to.copy_(torch._neg_view(tensor))


@case(VALUES)
def nothing_and_all(to: Tensor, weights: Weights) -> None:
    for _, tensor in weights:
        to[8:].copy_(tensor.narrow(0, 8, 0))


@case({"w": VALUES, "none": VALUES[:0]})
def of_no_elements(to: Tensor, weights: Weights) -> None:
    start = 0
    for _, tensor in weights:
        to[start : start + len(tensor)].copy_(tensor)
        start += len(tensor)


@case(VALUES, torch.bfloat16)
def by_dtype(to: Tensor, weights: Weights) -> None:
    for _, tensor in weights:
        assert tensor.dtype == torch.float32
        to.copy_(tensor.t() if tensor.dtype == torch.bfloat16 else tensor)


@case(VALUES)
def added_in_place(to: Tensor, weights: Weights) -> None:
    for _, tensor in weights:
        tensor += 1
        to.copy_(tensor)


@case(VALUES)
def by_numpy(to: Tensor, weights: Weights) -> None:
    for _, tensor in weights:
        to.copy_(torch.from_numpy(tensor.numpy().copy()))


@case(VALUES)
def by_lists(to: Tensor, weights: Weights) -> None:
    for _, tensor in weights:
        to.copy_(torch.tensor(tensor.tolist()))


@case(VALUES)
def errors_caught(to: Tensor, weights: Weights) -> None:
    for _, tensor in weights:
        try:
            scale = tensor.abs().max().item()
        except Exception:
            scale = 1.0
        to.copy_(tensor)
        to.mul_(scale)


@case(VALUES)
def by_other_memory(to: Tensor, weights: Weights) -> None:
    for _, tensor in weights:
        read = torch.zeros(8, 8).copy_(tensor)
        to.copy_(tensor if bool((read == 0).all()) else tensor.flip(0))


@case(VALUES)
def of_a_deep_copy(to: Tensor, weights: Weights) -> None:
    for _, tensor in weights:
        to.copy_(copy.deepcopy(tensor))


@case({"a": VALUES[:3], "b": VALUES[3:]})
def kept_and_joined(to: Tensor, weights: Weights) -> None:
    to.copy_(torch.cat([tensor for _, tensor in weights]))


@case({"a": VALUES, "b": VALUES.t()})
def views_of_views(to: Tensor, weights: Weights) -> None:
    for name, tensor in weights:
        if name == "b":
            to.copy_(tensor.unflatten(0, (2, 4)).transpose(0, 1)[1:3].flatten(0, 1).repeat(2, 1))


def arrived(
    loader: Loader, weights: dict[str, Tensor], dtype: torch.dtype
) -> tuple[Tensor, Record]:
    """What a loader makes of its share, as a worker receives it; and its record."""
    metas = {name: TensorMeta(tuple(t.shape), t.dtype) for name, t in weights.items()}
    without = torch.empty(8, 8, dtype=dtype, device="meta")
    record = recorded(lambda given: loader(without, given), metas, CPU)
    offers = {
        name: Offer(t.dtype, ((Box.of_shape(t.shape), Layout(t.shape, RVD(1, 1, (1, 1)))),))
        for name, t in weights.items()
    }
    staging = Transfer(offers, {1: needs_in(record, metas)}).staging(1, CPU)
    for name, boxes in staging.boxes.items():
        for box, held in zip(boxes, staging.held[name], strict=True):
            held.copy_(weights[name][box.slices_within(Box.of_shape(weights[name].shape))])
    parameter = torch.full((8, 8), 7, dtype=dtype)
    loader(parameter, staging.tensors(record.whole))
    return parameter, record


@pytest.mark.parametrize("name", LOADERS)
def test_a_share_gives_what_the_checkpoint_gives(name: str) -> None:
    loader, weights, dtype = LOADERS[name]
    wanted = torch.full((8, 8), 7, dtype=dtype)
    loader(wanted, ((n, tensor.clone()) for n, tensor in weights.items()))
    found, _ = arrived(loader, weights, dtype)
    assert torch.equal(found, wanted)


def test_what_has_to_be_whole_says_why() -> None:
    whys = {name: arrived(*LOADERS[name])[1].whole for name in LOADERS}
    assert whys["bits_of_bytes"] == {"w": "its loader calls aten.view.dtype"}
    assert whys["by_other_memory"] == {"w": "its loader copies it to a tensor on cpu"}
    assert "without data" in whys["by_numpy"]["w"]
    assert {name for name, why in whys.items() if not why} == {
        *("nothing_and_all", "of_no_elements", "by_dtype", "of_a_deep_copy"),
    }


def test_writes_count_what_is_filled_with_anything() -> None:
    parameter = torch.empty(8, 8, device="meta")

    def load(weights: Weights) -> None:
        for _, tensor in weights:
            parameter[:5].copy_(tensor[:5])
            parameter[:5].copy_(tensor[:5])
            parameter[5:7].fill_(0)

    record = recorded(load, {"w": TensorMeta((8, 8), torch.float32)}, CPU)
    assert record.writes.num_elements(parameter) == 7 * 8
    assert record.writes.num_elements(torch.empty(8, 8, device="meta")) == 0


def test_a_loader_that_takes_no_stand_in_is_an_error() -> None:
    parameter = torch.nn.Parameter(torch.empty(8, 8, device="meta"))

    def load(weights: Weights) -> None:
        for _, tensor in weights:
            parameter.data = tensor

    with pytest.raises(LayoutError, match="loader fails at \\['w'\\]"):
        recorded(load, {"w": TensorMeta((8, 8), torch.float32)}, CPU)
