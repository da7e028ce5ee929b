"""Flight records and notes: what ranks leave for each other and for torch's analysis."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist

import rvdcomm as rv
from superscaler_core.training import recorded_by_torch
from tests.dist.on_ranks import on_ranks

pytestmark = pytest.mark.dist


def as_of_gloo(groups: list[str]) -> bytes:
    """What torch dumps for gloo: no group has its name and ranks."""
    entries = [{"record_id": i, "process_group": (name, "")} for i, name in enumerate(groups)]
    config = {"": {"name": "", "desc": "", "ranks": "[]"}}
    return pickle.dumps({"version": "2.10", "pg_config": config, "entries": entries})


@on_ranks(2)
def test_a_flight_record_has_the_ranks_of_all_groups_of_its_entries(rank: int) -> None:
    both, own = dist.new_group([0, 1]), [dist.new_group([i]) for i in range(2)][rank]
    with pytest.MonkeyPatch.context() as patch:
        dumped = as_of_gloo([both.group_name, own.group_name, "gone"])
        patch.setattr(torch._C._distributed_c10d, "_dump_fr_trace", lambda: dumped)
        found = recorded_by_torch()
    ranks = {each["process_group"][0]: found["pg_config"][each["process_group"][0]]["ranks"]
             for each in found["entries"]}  # fmt: skip
    assert ranks == {both.group_name: "[0, 1]", own.group_name: str([rank])}
    assert [each["process_group"][0] for each in found["unmatched_entries"]] == ["gone"]


@on_ranks(2, is_last=True)
def test_notes_of_all_ranks_can_be_read_also_after_a_failure(rank: int) -> None:
    group = dist.new_group()
    assert rv.told(group) == {}
    dist.barrier(group)
    rv.tell("first", group)
    rv.tell(f"note of {rank}", group)
    dist.barrier(group)
    rv.abort(ValueError("no data"), group)
    assert rv.told(group) == {0: "note of 0", 1: "note of 1"}
