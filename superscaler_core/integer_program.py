"""IntegerProgram: a linear objective and constraints, built row by row and solved by HiGHS."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

INFEASIBLE, FAILED = 2, 4
"""Status codes of scipy's ``milp``."""


@dataclass(frozen=True, eq=False)
class Optimum:
    """The best known values of all variables.

    Attributes:
        values: the value of every variable, ``[variable]``.
        cost: the objective at these values.
        bound: the lower bound of the objective that HiGHS proved; minus infinity if none.
    """

    values: NDArray[np.float64]
    cost: float
    bound: float


@dataclass(eq=False)
class IntegerProgram:
    """A minimization problem over variables that are at least 0.

    >>> program = IntegerProgram()
    >>> x, y = program.variables(2, cost=1.0, is_whole=True).tolist()
    >>> program.row([(x, 2.0), (y, 3.0)], least=3.0)
    >>> program.solve().values.round().tolist()
    [0.0, 1.0]
    >>> program.solve(is_relaxed=True).bound
    1.0
    """

    _costs: list[float] = field(default_factory=list)
    _whole: list[bool] = field(default_factory=list)
    _most: list[float] = field(default_factory=list)
    _values: list[float] = field(default_factory=list)
    _columns: list[int] = field(default_factory=list)
    _ends: list[int] = field(default_factory=lambda: [0])
    _bounds: list[tuple[float, float]] = field(default_factory=list)

    def variables(
        self,
        num: int,
        *,
        cost: float | Sequence[float] = 0.0,
        is_whole: bool = False,
        most: float = np.inf,
    ) -> NDArray[np.int64]:
        """Add variables, with one common cost or one cost each; return their numbers."""
        first = len(self._costs)
        self._costs += cost if isinstance(cost, Sequence) else [cost] * num
        self._whole += [is_whole] * num
        self._most += [most] * num
        return np.arange(first, first + num)

    def row(
        self, entries: Iterable[tuple[int, float]], *, least: float = -np.inf, most: float = np.inf
    ) -> None:
        """Add a constraint: bounds of the sum of ``(variable, factor)`` products."""
        for variable, factor in entries:
            self._columns.append(int(variable))
            self._values.append(float(factor))
        self._ends.append(len(self._columns))
        self._bounds.append((least, most))

    def solve(self, limit_secs: float | None = None, *, is_relaxed: bool = False) -> Optimum | None:
        """The best values of all variables; None if no feasible values were found.

        Args:
            limit_secs: time limit; at its end the best known values are returned.
            is_relaxed: whether all variables may be fractional (the linear relaxation).
        """
        shape = len(self._bounds), len(self._costs)
        rows = csr_array((self._values, self._columns, self._ends), shape=shape)
        least, most = zip(*self._bounds, strict=True)
        # On a few feasible programs, the presolve of HiGHS fails or reports infeasibility.
        for presolve in (True, False):
            found = milp(
                self._costs,
                integrality=np.array(self._whole, dtype=int) * (not is_relaxed),
                bounds=Bounds(0.0, np.array(self._most)),
                constraints=LinearConstraint(rows, least, most),
                options={
                    "mip_rel_gap": 0.0,
                    "presolve": presolve,
                    **({} if limit_secs is None else {"time_limit": limit_secs}),
                },
            )
            if found.status not in (INFEASIBLE, FAILED):
                break
        if found.x is None:
            return None
        # The optimum of a relaxation is its own bound; HiGHS reports a bound for integers only.
        bound = found.fun if found.success else -np.inf
        if found.mip_dual_bound is not None:
            bound = min(found.mip_dual_bound, found.fun)
        return Optimum(np.asarray(found.x), float(found.fun), float(bound))
