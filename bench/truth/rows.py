"""Rows: measured steps of a public data set, from the folder that RVDCOMM_TRUTH_DATA names."""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

VARIABLE = "RVDCOMM_TRUTH_DATA"
"""The environment variable with the folder."""

MISSING = (
    f"{VARIABLE} is not set to a folder with vtrain/single_node.csv: the measured steps are public "
    "in github.com/VIA-Research/vTrain (docs/truth.md)."
)

NUM_FIT = 112
"""Rows of the single-node file to which constants are fitted, its first."""


class Row(NamedTuple):
    """A measured step of Megatron-DeepSpeed.

    Attributes:
        gpus, tp, dp, pp: numbers of GPUs: all, and along each axis.
        batch, micro: sequences of a step, and of a microbatch of one replica.
        width, heads, layers, sequence: sizes of the GPT.
        secs: the measured step.
    """

    gpus: int
    batch: int
    micro: int
    width: int
    heads: int
    layers: int
    sequence: int
    tp: int
    dp: int
    pp: int
    secs: float

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return self.batch // (self.micro * self.dp)

    @property
    def group(self) -> tuple[int, ...]:
        """What rows of one group share: GPUs, batch and model."""
        return self.gpus, self.batch, self.width, self.layers


_COLUMNS = (
    "# GPUs", "global batch", "micro batch", "hidden size", "attention heads", "# layers",
    "sequence length", "tensor parallelism", "data parallelism", "pipeline parallelism",
)  # fmt: skip


def folder() -> Path | None:
    """The folder of the data; None if there is none."""
    named = os.environ.get(VARIABLE)
    found = Path(named) if named else None
    return found if found and (found / "vtrain" / "single_node.csv").is_file() else None


def rows(data: Path, name: str) -> Sequence[Row]:
    """The rows of a file, ``single_node`` or ``multi_node``, in its order."""
    with (data / "vtrain" / f"{name}.csv").open(newline="") as file:
        return [
            Row(*(int(line[key]) for key in _COLUMNS), float(line["iteration time (ms)"]) / 1e3)
            for line in csv.DictReader(file)
        ]


def groups(of: Iterable[Row]) -> Mapping[tuple[int, ...], Sequence[Row]]:
    """The rows of each group, among which a planner would choose."""
    found: dict[tuple[int, ...], list[Row]] = defaultdict(list)
    for row in of:
        found[row.group].append(row)
    return found


def all_reduces(data: Path, num: int) -> Sequence[tuple[int, float]]:
    """Bytes and seconds of NCCL's all-reduce among so many GPUs of a host."""
    with (data / "vtrain" / f"AR_GPU{num}_LUT").open(newline="") as file:
        return [
            (int(line["size(B)"]), float(line["time(ns)"]) / 1e9) for line in csv.DictReader(file)
        ]
