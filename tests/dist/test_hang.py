"""A hang: the error and the flight records of ranks name the rank that did not make the call."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rvdcomm as rv
import superscaler_core as ss
from tests.dist.world import Worlds
from tests.superscaler_core.run.test_results import batch, words

pytestmark = pytest.mark.dist

LIMIT_SECS = 0.5
PREFIX = "flight_record_rank_"


def named(size: int) -> dict[str, Any]:
    tokens, labels = batch(size, 0)
    return {"tokens": tokens, "labels": labels}


def hung(rank: int, folder: str) -> str:
    """The error of rank 0 in its second step, which rank 1 never makes.

    Rank 0 leaves its record by itself, and rank 1 is asked for it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_FR_BUFFER_SIZE", "100")
        if rank == 0:
            patch.setenv("SUPERSCALER_FLIGHT_RECORD", folder)
        group = dist.new_group()
        dist.all_reduce(torch.ones(3), group=group)
        parallel = ss.parallelize(words(), kwargs=named(4), plan="zero3", group=group)
        parallel.step(**named(4))
        said = ""
        if rank == 0:
            with pytest.raises(rv.CommError) as error, rv.timeout(LIMIT_SECS):
                parallel.step(**named(4))
            said = str(error.value)
        else:
            time.sleep(3 * LIMIT_SECS)
            ss.dump_flight_record(folder)
    return said


def test_the_rank_that_never_calls_is_named_by_the_error_and_by_torchfrtrace(
    worlds: Worlds, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said, _ = worlds(2).run(hung, str(tmp_path))
    _, here, there = said.splitlines()
    shapes = "with tokens [4, 6] int64, labels [4, 6] int64"
    assert here == f"Rank 0 is in step 2 {shapes}, outside of its program."
    assert there.startswith(f"Rank 1 is in no call: its last, step 1 {shapes}, ended ")
    assert [f.name for f in sorted(tmp_path.iterdir())] == [f"{PREFIX}{rank}" for rank in range(2)]
    lines = analysed(tmp_path, caplog)
    assert "Not all ranks joining collective, sequence number: 2" in lines
    assert "missing ranks: {1}" in lines
    assert any(line.startswith("group info: superscaler_core:") for line in lines)
    assert any(f"step 2 {shapes}" in line for line in lines)


def analysed(folder: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What ``torchfrtrace`` says of the records in a folder."""
    from torch.distributed.flight_recorder import fr_trace

    with caplog.at_level(logging.INFO, logger="flight_recorder"):
        fr_trace.main([str(folder), "--prefix", PREFIX])
    return [record.getMessage() for record in caplog.records]
