"""Workload: what is trained, as graphs and as programs of a plan."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import superscaler_core as ss
from bench.studies import cluster
from bench.studies.systems import Way
from superscaler_core.models import MODELS
from superscaler_core.planners.auto import traits


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        model: a name of ``MODELS``.
        sizes: of it.
        dtype: of weights and activations; states and gradients are in float32.
        batch: samples of a step.
    """

    model: str
    sizes: Mapping[str, Any]
    dtype: str
    batch: int


def num_parameters(workload: Workload) -> int:
    """Numbers that are trained."""
    return _num_parameters(workload.model, tuple(workload.sizes.items()))


def compiled(
    workload: Workload,
    num_gpus: int,
    sprogram: Callable[..., None],
    way: Way,
    microbatch: int,
    num_microbatches: int = 0,
) -> ss.Compiled:
    """The program of one way, for the whole batch or fewer microbatches.

    Raises:
        PlanError: the model cannot be cut so.
    """
    plan = ss.Plan(captured(workload, microbatch), range(num_gpus))
    sprogram(plan, microbatches=num_microbatches or workload.batch // microbatch, **way.knobs)
    return ss.compile(
        plan,
        topology=cluster.topology(num_gpus),
        optimizer="adam",
        master_dtype="float32",
    )


def kept_bytes(workload: Workload, batch: int) -> int:
    """What autograd saves of a microbatch that is not cut, views with what they view."""
    return _kept_bytes(captured(workload, batch))


@lru_cache(maxsize=8)
def _kept_bytes(graph: ss.Graph) -> int:
    return traits.kept_bytes(graph)


# --- graphs -------------------------------------------------------------------------------------

Sizes = tuple[tuple[str, Any], ...]
"""Of a model: names and values."""

_folders: list[Path] = []
"""Where graphs are kept; nowhere until ``keep_graphs`` says it."""


def keep_graphs(folder: Path) -> None:
    """From now on captures are kept in a folder, and those that are there are read again.

    That takes a thousandth of the time that capturing does, half a minute for a large Evoformer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _folders[:] = [folder]


def captured(workload: Workload, batch: int) -> ss.Graph:
    """The model with a microbatch of so many samples."""
    return _captured(workload.model, tuple(workload.sizes.items()), workload.dtype, batch)


@lru_cache(maxsize=8)
def _captured(model: str, sizes: Sizes, dtype: str, batch: int) -> ss.Graph:
    if not _folders:
        return _capture(model, sizes, dtype, batch)
    key = sha256(repr((model, sizes, dtype, batch)).encode()).hexdigest()[:16]
    path = _folders[0] / f"{model}-{batch}-{key}.pickle"
    if path.exists():
        graph = pickle.loads(path.read_bytes())
        assert isinstance(graph, ss.Graph)
        return graph
    graph = _capture(model, sizes, dtype, batch)
    # Renamed when it is whole: another process may look at any time.
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(pickle.dumps(graph))
    part.rename(path)
    return graph


def _capture(model: str, sizes: Sizes, dtype: str, batch: int) -> ss.Graph:
    kind = MODELS[model]
    config = kind.config(**dict(sizes))
    with torch.device("meta"):
        module = kind.build(config).to(getattr(torch, dtype))
    # Of one sample: real tensors of a whole microbatch may be larger than this machine.
    inputs = kind.example_inputs(config, 1, torch.Generator().manual_seed(0))
    given = tuple(
        torch.empty(
            (batch, *x.shape[1:]),
            dtype=getattr(torch, dtype) if x.is_floating_point() else x.dtype,
            device="meta",
        )
        for x in inputs
    )
    return ss.capture(module, given, recycled=kind.recycled)


@lru_cache
def _num_parameters(model: str, sizes: Sizes) -> int:
    kind = MODELS[model]
    with torch.device("meta"):
        module = kind.build(kind.config(**dict(sizes)))
    return sum(parameter.numel() for parameter in module.parameters())
