"""The table of families and plans in docs/models.md: ``python -m tests.models.table`` writes it."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

from superscaler_core.errors import CaptureError, OpaqueWarning, PlanError
from tests.models.cells import KNOBS, MODELS, compiled, error

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- families: python -m tests.models.table -->", "<!-- end of families -->"


def table() -> str:
    """The table of families by plans; each cell has the largest error on 2 and 4 devices."""
    rows = [["family", *(f"`{plan}`" for plan in KNOBS)], ["---"] * (1 + len(KNOBS))]
    for family in MODELS:
        rows.append([family, *(_cell(family, plan) for plan in KNOBS)])
        print(f"| {' | '.join(rows[-1])} |", flush=True)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(family: str, plan: str) -> str:
    try:
        found = [_error(family, plan, num) for num in KNOBS[plan]]
    except (CaptureError, PlanError) as fault:
        return f"refused: {fault}"
    right = max(found) <= MODELS[family].tolerance
    return f"{max(found):.0e}" if right else f"**{max(found):.0e}**"


def _error(family: str, plan: str, num_devices: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return error(family, compiled(family, plan, num_devices), Path(folder))


if __name__ == "__main__":
    # The table has separate rows for opaque experts, so the warnings are not needed.
    warnings.simplefilter("ignore", OpaqueWarning)
    made = table()
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}")
