"""Workload: a model with its batch and optimizer, and the model's graphs."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import superscaler_core as ss
from superscaler_core.evaluation import Resizing
from superscaler_core.models import MODELS

NUM_CAPTURED = 3
"""The sizes that are captured first: one sample, and the two from which ``Resizing`` makes all
larger ones."""

Sizes = tuple[tuple[str, Any], ...]
"""Sizes of a model as (name, value) pairs."""


@dataclass(frozen=True)
class Workload:
    """A model to train, with its batch and optimizer.

    Attributes:
        model: a name of ``MODELS``.
        sizes: sizes of the model, by name.
        dtype: dtype of weights and activations.
        batch: samples per step.
        optimizer: a name of ``memory.STATES``.
        master_dtype: dtype of the master weights and optimizer states; ``dtype`` if None.
        recycle: forwards without gradient per microbatch.
    """

    model: str
    sizes: Mapping[str, Any]
    dtype: str
    batch: int
    optimizer: str = "adam"
    master_dtype: str | None = "float32"
    recycle: int = 0

    @property
    def samples(self) -> tuple[int, ...]:
        """All microbatch sizes: the divisors of ``batch``."""
        return tuple(n for n in range(1, self.batch + 1) if self.batch % n == 0)

    @property
    def graphs(self) -> Resizing:
        """The model's graphs for all microbatch sizes; the last ones asked for are kept."""
        return _resizing(*self.captures)

    @property
    def captures(self) -> tuple[str, Sizes, str, tuple[int, ...]]:
        """What ``graphs`` depends on: workloads with equal values have equal graphs."""
        return self.model, tuple(self.sizes.items()), self.dtype, self.samples

    def capture(self) -> None:
        """Capture the model with the first sizes; the graphs of all others derive from these."""
        for samples in self.samples[:NUM_CAPTURED]:
            captured(self, samples)


def num_parameters(workload: Workload) -> int:
    """The number of trained parameters, in elements."""
    kind = MODELS[workload.model]
    with torch.device("meta"):
        module = kind.build(kind.config(**dict(workload.sizes)))
    return sum(parameter.numel() for parameter in module.parameters())


# --- graphs -------------------------------------------------------------------------------------

Timed = tuple[ss.Graph, float]
"""A graph, and the seconds that capturing it took."""

FOLDER = "BENCH_GRAPHS"
"""Environment variable with the folder that stores graphs; child processes inherit it.

Until ``keep_graphs`` sets the variable, graphs are not stored.
"""


def keep_graphs(folder: Path) -> None:
    """From now on, store captured graphs in ``folder``, and read those that it already has.

    Reading takes a thousandth of the time of capturing, which is half a minute for a large
    Evoformer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[FOLDER] = str(folder.absolute())


def captured(workload: Workload, batch: int) -> ss.Graph:
    """The model's graph with a microbatch of ``batch`` samples."""
    model, sizes, dtype, _ = workload.captures
    return _graph(model, sizes, dtype, batch)


@lru_cache(maxsize=1)
def _resizing(model: str, sizes: Sizes, dtype: str, samples: Sequence[int]) -> Resizing:
    """The graphs of all sizes in ``samples``.

    A search reserves the time of a capture, which is unknown where graphs are read from a file.
    """
    secs = max(_captured(model, sizes, dtype, num)[1] for num in samples[:NUM_CAPTURED])
    return Resizing(partial(_graph, model, sizes, dtype), samples, secs)


def _graph(model: str, sizes: Sizes, dtype: str, batch: int) -> ss.Graph:
    return _captured(model, sizes, dtype, batch)[0]


@lru_cache(maxsize=8)
def _captured(model: str, sizes: Sizes, dtype: str, batch: int) -> Timed:
    if FOLDER not in os.environ:
        return _capture(model, sizes, dtype, batch)
    key = sha256(repr((model, sizes, dtype, batch)).encode()).hexdigest()[:16]
    path = Path(os.environ[FOLDER]) / f"{model}-{batch}-{key}.pickle"
    if path.exists():
        kept: Timed = pickle.loads(path.read_bytes())
        return kept
    timed = _capture(model, sizes, dtype, batch)
    # Written under another name and renamed when complete: another process may read at any time.
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(pickle.dumps(timed))
    part.rename(path)
    return timed


def _capture(model: str, sizes: Sizes, dtype: str, batch: int) -> Timed:
    start = time.monotonic()
    kind = MODELS[model]
    config = kind.config(**dict(sizes))
    with torch.device("meta"):
        module = kind.build(config).to(getattr(torch, dtype))
    # Inputs of one sample: real tensors of a whole microbatch may exceed this machine's memory.
    inputs = kind.example_inputs(config, 1, torch.Generator().manual_seed(0))
    given = tuple(
        torch.empty(
            (batch, *x.shape[1:]),
            dtype=getattr(torch, dtype) if x.is_floating_point() else x.dtype,
            device="meta",
        )
        for x in inputs
    )
    return ss.capture(module, given, recycled=kind.recycled), time.monotonic() - start
