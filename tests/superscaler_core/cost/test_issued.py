"""Issued: three numbers stand for any sequence of kernels, and compose."""

from __future__ import annotations

from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superscaler_core.cost import Issued

WHOLE = st.integers(0, 20)
KERNELS = st.lists(st.tuples(WHOLE, WHOLE), max_size=8)
"""Kernels: how long each takes the device and the host, in whole numbers."""


def one_by_one(kernels: list[tuple[int, int]], device: int, host: int) -> int:
    """The definition: a host issues each kernel, and a device executes those that are issued."""
    for on_device, on_host in kernels:
        host += on_host
        device = max(device, host) + on_device
    return device


def all_of(kernels: list[tuple[int, int]]) -> Issued:
    return reduce(Issued.then, (Issued.of(a, 1, b) for a, b in kernels), Issued())


@given(KERNELS, WHOLE, WHOLE)
def test_end_is_that_of_a_host_and_a_device_followed_kernel_by_kernel(
    kernels: list[tuple[int, int]], device: int, host: int
) -> None:
    found = all_of(kernels)
    if kernels:
        assert found.end(device, host) == one_by_one(kernels, device, host)
    assert found.host == sum(on_host for _, on_host in kernels)


@given(KERNELS, KERNELS, KERNELS)
def test_sequences_compose_in_any_grouping(
    a: list[tuple[int, int]], b: list[tuple[int, int]], c: list[tuple[int, int]]
) -> None:
    first, second, third = map(all_of, (a, b, c))
    assert first.then(second).then(third) == first.then(second.then(third))


@given(WHOLE, st.integers(1, 6), WHOLE, WHOLE, WHOLE)
def test_equal_kernels_are_those_that_share_the_time(
    each: int, num: int, issue: int, device: int, host: int
) -> None:
    found = Issued.of(each * num, num, issue)
    assert found.end(device, host) == one_by_one([(each, issue)] * num, device, host)


@given(st.lists(st.tuples(WHOLE, st.integers(0, 5)), max_size=6))
def test_host_that_takes_no_time_changes_nothing(ops: list[tuple[int, int]]) -> None:
    found = reduce(Issued.then, (Issued.of(secs, num) for secs, num in ops), Issued())
    assert found == (sum(secs for secs, _ in ops), 0, sum(secs for secs, _ in ops))


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_share_of_a_kernel_takes_the_host_no_longer_than_its_share(share: float) -> None:
    assert Issued.of(8 * share, share, 4.0) == (8 * share, 4 * share, (8 + 4) * share)
