"""Picture: what is left out of a line of memory is only what nobody would see."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from superscaler_core.simulator.picture import BYTES, SECS, _name_unit, _smooth


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        # A rise in small steps stays a rise.
        (((0.0, 1), (0.1, 2), (0.2, 3), (0.3, 4)), ((0.0, 1), (0.1, 2), (0.2, 3), (0.3, 4))),
        # A short dip goes, a long one stays.
        (((0.0, 5), (2.0, 1), (2.5, 6)), ((0.0, 5), (2.5, 6))),
        (((0.0, 5), (2.0, 1), (3.5, 6)), ((0.0, 5), (2.0, 1), (3.5, 6))),
        # A short peak stays, and so does the end.
        (((0.0, 5), (2.0, 9), (2.1, 5), (9.0, 0)), ((0.0, 5), (2.0, 9), (2.1, 5), (9.0, 0))),
    ],
)
def test_only_short_dips_are_left_out(series: Any, expected: Any) -> None:
    assert _smooth(series, 1.0) == expected


class Axis(SimpleNamespace):
    """An axis that keeps what it is told."""

    def set_ticks(self, places: list[float]) -> None:
        self.places = places

    def set_major_formatter(self, text_of: Any) -> None:
        self.text_of = text_of

    def set_label_text(self, name: str) -> None:
        self.name = name


@pytest.mark.parametrize(
    ("most", "units", "name", "value", "text"),
    [
        (0.0116, SECS, "ms", 0.004, "4"),
        (3e-7, SECS, "ns", 1e-7, "100"),
        (90 * 2**20, BYTES, "MiB", 40 * 2**20, "40"),
        (0, BYTES, "B", 0, "0"),
    ],
)
def test_axes_have_the_unit_of_their_largest_value(
    most: float, units: dict[str, float], name: str, value: float, text: str
) -> None:
    pytest.importorskip("matplotlib")
    axis = Axis()
    _name_unit(axis, most, units)
    assert axis.name == name
    assert axis.text_of(value, 0) == text
    assert axis.places[-1] >= most
