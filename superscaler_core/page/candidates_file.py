"""Candidates file: the candidates of a search, beside the file of the plan that it chose."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path

from rvdcomm.whole_file import replacing
from superscaler_core.errors import PlanError
from superscaler_core.page.candidate_row import CandidateRow

SUFFIX = ".candidates.json"


def candidates_path(plan: str | Path) -> Path:
    """The file beside a plan: ``best.candidates.json`` beside ``best.plan``."""
    return Path(plan).with_suffix(SUFFIX)


def save_candidates(rows: Iterable[CandidateRow], plan: str | Path) -> Path:
    """Write the candidates of a search beside the plan that it chose; return the file's path.

    Args:
        rows: the candidates.
        plan: the file of the plan, which is there already.

    Raises:
        OSError: the plan cannot be read, or the file cannot be written.
    """
    path = candidates_path(plan)
    value = {"plan": _digest(plan), "candidates": [row.value for row in rows]}
    with replacing(path) as name:
        name.write_text(json.dumps(value, indent=1), encoding="utf-8")
    return path


def load_candidates(plan: str | Path) -> Sequence[CandidateRow]:
    """The candidates beside a plan; none if there is no such file, or it is of another plan.

    Raises:
        PlanError: the file is not one that ``save_candidates`` wrote.
    """
    # A plan may be the name of an sProgram.
    if not Path(plan).is_file() or not candidates_path(plan).is_file():
        return ()
    path = candidates_path(plan)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        # A plan that was written later under this name is not of this search.
        if value["plan"] != _digest(plan):
            return ()
        return [CandidateRow.of_value(each) for each in value["candidates"]]
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(
            f"{path}: these are no candidates that a search wrote ({error!r}); remove the file, or "
            "search again with --out."
        ) from None


def _digest(plan: str | Path) -> str:
    return sha256(Path(plan).read_bytes()).hexdigest()
