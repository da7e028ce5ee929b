"""Memory lines: a sample of a line keeps its peak and its bottom."""

from __future__ import annotations

from itertools import pairwise

import pytest

from superscaler_core.page.memory_lines import memory_lines, sampled

SERIES = tuple((float(i), (i * 7919) % 1009) for i in range(1000))


@pytest.mark.parametrize("room", [40, 97, 999, 1000, 5000])
def test_a_sample_has_room_and_keeps_the_extremes(room: int) -> None:
    found = sampled(SERIES, room)
    assert len(found) <= room + 4
    assert {*found} <= {*SERIES}
    assert max(size for _, size in found) == max(size for _, size in SERIES)
    assert min(size for _, size in found) == min(size for _, size in SERIES)
    assert (found[0], found[-1]) == (SERIES[0], SERIES[-1])
    assert all(a[0] < b[0] for a, b in pairwise(found))


def test_devices_of_equal_memory_share_a_line() -> None:
    other = ((0.0, 1), (0.5, 3))
    lines = memory_lines({0: SERIES, 1: other, 2: SERIES}, [0, 1, 2])
    assert [line["devices"] for line in lines] == [[0, 2], [1]]
    assert lines[1]["ns"] == [0, 500_000_000]
    assert lines[1]["bytes"] == [1, 3]
