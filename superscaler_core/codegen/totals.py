"""Totals: sums that generated functions accumulate term by term, so that no term is kept."""

from __future__ import annotations

from collections.abc import Hashable

from superscaler_core.codegen.names import Names
from superscaler_core.codegen.statement import Expression, Statement


class Totals:
    """The sums so far, by key.

    Args:
        names: the names of the device's file.
    """

    def __init__(self, names: Names) -> None:
        self._names = names
        self._now: dict[Hashable, Expression] = {}
        self._own: set[str] = set()

    def add(self, key: Hashable, wish: str, term: Expression) -> list[Statement]:
        """The statements that add an expression to the total of ``key``.

        Args:
            key: identifies the total.
            wish: a name for the total.
            term: the expression; the tensors that it names are not modified.
        """
        now = self._now.get(key)
        if now is None:
            self._now[key] = term
            return []
        if now.text in self._own:
            return [Statement(f"{now} += {term}", (now.text,), term.reads)]
        # The first sum of two terms is a new tensor, which can be modified in place.
        total = self._names.of((key, "total"), wish)
        self._own.add(total)
        self._now[key] = Expression.of(total)
        return [Statement(f"{total} = {now} + {term}", (total,), (*now.reads, *term.reads))]

    def of(self, key: Hashable) -> Expression | None:
        """The total, as an expression; None if nothing was added."""
        return self._now.get(key)
