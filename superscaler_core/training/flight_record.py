"""Flight record: what ranks did last, in files that torch's ``torchfrtrace`` analyses.

torch records the collectives of its groups. Most messages of ours are no such collectives, so a
record of torch alone would show little of a hang. Here the calls of the user are added, each as a
collective of all ranks of its model: a rank that did not make a call is missing in it. The frames
of a call name the instruction in which it failed.
"""

from __future__ import annotations

import itertools
import os
import pickle
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rvdcomm.whole_file import write_whole
from superscaler_core.training.torch_record import recorded_by_torch

if TYPE_CHECKING:
    from superscaler_core.training.user_calls import UserCall, UserCalls

FOLDER_VARIABLE = "SUPERSCALER_FLIGHT_RECORD"
"""Names the folder where a rank leaves its record by itself if its communication fails."""

PREFIX = "flight_record_rank_"
"""What the names of files begin with; a rank's number follows."""

_LATER = 10**12
"""Added to the numbers of our records: the analysis drops records before the first number that all
ranks have, and torch numbers its own from 0."""

_DESC = "calls of the user"

_RECORDED: weakref.WeakSet[UserCalls] = weakref.WeakSet()
_COUNT = itertools.count()
_NUMBERS: weakref.WeakKeyDictionary[UserCalls, int] = weakref.WeakKeyDictionary()


def recorded(users: UserCalls) -> None:
    """Record the calls to a model from now on; ranks number their models in one order."""
    _NUMBERS[users] = next(_COUNT)
    _RECORDED.add(users)


def dump_flight_record(folder: str | Path) -> Path:
    """Write what this process did last, for ``torchfrtrace FOLDER``; not collective.

    Every rank calls it after a failure, with the same folder, or copies its file there. If the
    environment has ``SUPERSCALER_FLIGHT_RECORD=FOLDER``, a rank calls it by itself when its
    communication fails, before the error is raised. Set ``TORCH_FR_BUFFER_SIZE=2000`` before the
    process group is made to have torch's own record in it too.

    >>> # try: loss = model.step(**batch)
    >>> # except rv.CommError: ss.dump_flight_record("hang"); raise

    Args:
        folder: created if missing; its other files are left as they are.

    Returns:
        The file of this rank.

    Raises:
        OSError: the file cannot be written.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    record = recorded_by_torch()
    ours = [(f"superscaler_core:{_NUMBERS[users]}", users) for users in _RECORDED if users.calls]
    ours.sort(key=lambda pair: _NUMBERS[pair[1]])
    for name, users in ours:
        ranks = str(sorted(users.global_ranks))
        record["pg_config"][name] = {"name": name, "desc": _DESC, "ranks": ranks}
        record["entries"] += [_entry(name, users, call) for call in list(users.calls)]
    record["superscaler_core"] = {name: _said(users) for name, users in ours}
    made = Path(folder)
    made.mkdir(parents=True, exist_ok=True)
    file = made / f"{PREFIX}{rank}"
    write_whole(file, pickle.dumps(record))
    return file


def dump_if_asked() -> None:
    """``dump_flight_record`` where the environment says so; it never hides the error itself."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return
    try:
        dump_flight_record(folder)
    except Exception as error:
        text = f"{FOLDER_VARIABLE}={folder}: no record is written: {type(error).__name__}: {error}"
        warnings.warn(text, stacklevel=2)


def _entry(group: str, users: UserCalls, call: UserCall) -> dict[str, Any]:
    """A call in the schema of torch's recorder; the names of collectives there are a fixed set."""
    is_done = bool(call.ended_ns) and not call.failed
    return {
        "record_id": _LATER + call.seq,
        "pg_id": -1,
        "process_group": (group, _DESC),
        "collective_seq_id": call.seq,
        "p2p_seq_id": 0,
        "op_id": call.seq,
        "profiling_name": "gloo:barrier",
        "time_created_ns": call.begun_ns,
        "input_sizes": [],
        "input_dtypes": [],
        "output_sizes": [],
        "output_dtypes": [],
        "state": "completed" if is_done else "started",
        "time_discovered_started_ns": call.begun_ns,
        "time_discovered_completed_ns": call.ended_ns if is_done else None,
        "retired": is_done,
        "timeout_ms": 0,
        "is_p2p": False,
        "frames": list(_frames(users, call, is_done)),
    }


def _frames(users: UserCalls, call: UserCall, is_done: bool) -> Iterator[dict[str, Any]]:
    """The instruction in which a call is, and the call."""
    position = "" if is_done else call.position or users.position(call)
    if position:
        yield {"name": position, "filename": call.name, "line": call.number}
    yield {"name": str(call), "filename": "call", "line": call.seq}


def _said(users: UserCalls) -> dict[str, Any]:
    """The same for people: all calls, and the last instructions with their times."""
    return {
        "calls": [(str(call), call.begun_ns, call.ended_ns) for call in list(users.calls)],
        "instructions": [(mark.text, mark.since_ns) for mark in users.trail()],
    }
