"""Laws of memberships: any group with a rank, a size, a store and a supported backend will do."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import rvdcomm as rv
from rvdcomm.run.process_group import Membership, membership_of
from rvdcomm.run.request import common_device


class _Group:
    """A group of another library."""

    rank: int
    world_size: int
    store: Any


GROUP = _Group()
BOTH = {"cpu": "gloo", "cuda": "nccl"}


def member(backends: dict[str, str]) -> Membership:
    return Membership(0, 4, "both", None, timedelta(seconds=1), backends, weakref.ref(GROUP))


@pytest.mark.parametrize(
    "backends, device, backend",
    [
        (BOTH, "cpu", "gloo"),
        (BOTH, "cuda", "nccl"),
        ({"cpu": "gloo"}, "cuda", "gloo"),
        ({"cpu": "gloo", "cuda": "gloo"}, "cuda", "gloo"),
    ],
)
def test_tensors_move_by_the_backend_of_their_device(
    backends: dict[str, str], device: str, backend: str
) -> None:
    assert member(backends).serving(device) == backend


def test_a_device_that_no_backend_serves_is_told() -> None:
    words = "process group 'both' has backend cuda:nccl, which moves no tensors on cpu; make a"
    with pytest.raises(rv.LayoutError, match=words):
        member({"cuda": "nccl"}).serving("cpu")


@pytest.mark.parametrize(
    "devices, common",
    [({0: None, 1: "cpu"}, "cpu"), ({0: "cuda", 1: None}, "cuda"), ({0: None, 1: None}, None)],
)
def test_a_rank_without_tensors_has_the_device_of_the_others(
    devices: dict[int, str | None], common: str | None
) -> None:
    assert common_device(devices, member(BOTH), "call") == common


def test_tensors_that_two_backends_would_move_are_told() -> None:
    words = "call: the tensor of rank 0 is on cpu and that of rank 2 on cuda, which gloo and nccl"
    with pytest.raises(rv.LayoutError, match=words):
        common_device({0: "cpu", 1: None, 2: "cuda"}, member(BOTH), "call")


def test_any_object_with_rank_size_and_store_is_a_group() -> None:
    store = dist.HashStore()
    group = _Group()
    group.rank, group.world_size, group.store = 1, 3, store
    found = membership_of(group)
    assert (found.rank, found.size, found.store) == (1, 3, store)
    assert found.serving("cpu") == "gloo"


def test_other_objects_are_told() -> None:
    with pytest.raises(rv.CommError, match=r"group is .*; give a torch.distributed.ProcessGroup"):
        membership_of("weights")


@pytest.fixture
def fake_group() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_backend_that_moves_nothing_is_told_at_once(fake_group: Any) -> None:
    with pytest.raises(rv.CommError, match=r"cpu:fake.* is not supported; use one of gloo, nccl"):
        rv.redistribute(torch.zeros(2), "R(1)V(1)D(2)", "R(2)V(1)D(1)", group=fake_group)
