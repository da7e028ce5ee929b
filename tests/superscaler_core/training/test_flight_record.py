"""Flight records: the calls of the user are entries of torch's schema, with where they failed."""

from __future__ import annotations

import ast
import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest

from superscaler_core.run import Trail
from superscaler_core.training.flight_record import FOLDER_VARIABLE, PREFIX, dump_flight_record
from superscaler_core.training.user_calls import UserCalls

NUMBERS = itertools.count(100, 10)


class Alone:
    """A transport of a rank that hears of no other one."""

    def __init__(self) -> None:
        # Models of earlier tests may still be alive; these ranks tell their records apart.
        first = next(NUMBERS)
        self.global_ranks = first, first + 3

    def tell(self, text: str) -> None: ...

    def told(self) -> dict[int, str]:
        return {}


def fail_in_step_2() -> UserCalls:
    users, trail = UserCalls((0, 1), Alone()), Trail()  # type: ignore[arg-type]
    users.trail = lambda: trail
    with users.inside("step"):
        pass

    def step() -> None:
        with users.inside("step"):
            trail.note("receive", ("e3", 1))
            raise TimeoutError("late")

    with pytest.raises(TimeoutError):
        step()
    return users


def entries_of(file: Path, users: UserCalls) -> list[dict[str, Any]]:
    """The entries of a model's calls."""
    record = pickle.loads(file.read_bytes())
    return [e for e in record["entries"] if ranks_of(record, e) == [*users.global_ranks]]


def ranks_of(record: dict[str, Any], entry: dict[str, Any]) -> Any:
    return ast.literal_eval(record["pg_config"][entry["process_group"][0]]["ranks"])


def test_calls_are_entries_in_their_order_with_the_place_of_the_failure(tmp_path: Path) -> None:
    users = fail_in_step_2()
    first, second = entries_of(dump_flight_record(tmp_path), users)
    assert (first["collective_seq_id"], first["state"]) == (1, "completed")
    assert (second["collective_seq_id"], second["state"]) == (2, "started")
    assert [frame["name"] for frame in first["frames"]] == ["step 1"]
    assert [frame["name"] for frame in second["frames"]] == [
        "instruction 1: receive e3 mb 1", "step 2",
    ]  # fmt: skip


def test_a_failure_leaves_a_record_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_in_step_2()
    assert [*tmp_path.iterdir()] == []
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "new"))
    users = fail_in_step_2()
    assert len(entries_of(tmp_path / "new" / f"{PREFIX}0", users)) == 2


def test_a_record_that_cannot_be_written_does_not_hide_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file"))
    with pytest.warns(UserWarning, match=r"no record is written: .*exists"):
        fail_in_step_2()
