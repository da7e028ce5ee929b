"""Tables of what is found by name: rows of this package, and rows that other packages bring.

A package brings a row by an entry point, in its ``pyproject.toml``::

    [project.entry-points."superscaler_core.plans"]
    mine = "my_package.plans:mine"

``superscaler_core.published``, which reproduces published systems, brings its rows in this way too.
A row is imported when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar, cast

from superscaler_core.errors import PluginError

Row = TypeVar("Row")


class Table(Mapping[str, Row], Generic[Row]):
    """Rows by name; those of this package come first, in their order.

    Args:
        kind: what a row is, in the plural; the entry points' group is ``superscaler_core.KIND``.
        rows: the rows of this package.

    >>> plans = Table("plans", {"mine": print})
    >>> plans["mine"], "nobodys" in plans
    (<built-in function print>, False)
    """

    def __init__(self, kind: str, rows: Mapping[str, Row]) -> None:
        self._kind, self._own = kind, dict(rows)
        self._loaded: dict[str, Row] = {}

    @cached_property
    def _brought(self) -> dict[str, list[EntryPoint]]:
        """The entry points by name; a package that is found twice counts once."""
        found: dict[str, dict[str, EntryPoint]] = {}
        for point in entry_points(group=f"superscaler_core.{self._kind}"):
            found.setdefault(point.name, {})[point.value] = point
        return {name: [*points.values()] for name, points in found.items()}

    def __getitem__(self, name: str) -> Row:
        """The row of a name.

        Raises:
            KeyError: there is none.
            PluginError: several packages bring a row of this name, or it cannot be imported.
        """
        if name not in self._loaded:
            points = self._brought.get(name, [])
            if name in self._own and not points:
                return self._own[name]
            if name in self._own or len(points) > 1:
                owners = ["superscaler_core"] * (name in self._own) + [p.value for p in points]
                raise PluginError(
                    f"{name!r} of {self._kind} is brought by {' and by '.join(owners)}: give one "
                    "of them another name, or uninstall its package."
                )
            if not points:
                raise KeyError(name)
            self._loaded[name] = self._load(points[0])
        return self._loaded[name]

    def _load(self, point: EntryPoint) -> Row:
        try:
            return cast(Row, point.load())
        except Exception as error:
            package = point.dist.name if point.dist else "a package"
            raise PluginError(
                f"{point.name!r} of {self._kind}, which {package} brings as {point.value}, cannot "
                f"be imported: {type(error).__name__}: {error}"
            ) from error

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._brought

    def __iter__(self) -> Iterator[str]:
        return iter({**self._own, **self._brought})

    def __len__(self) -> int:
        return len({**self._own, **self._brought})
