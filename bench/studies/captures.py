"""Captures: the studies' models as graphs, kept on disk for all processes that tune them."""

from __future__ import annotations

import os
import pickle
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import superscaler_core as ss
from superscaler_core.models import MODELS

Sizes = tuple[tuple[str, Any], ...]
"""Of a model: names and values."""

_folders: list[Path] = []
"""Where graphs are kept; nowhere until ``keep`` says it."""


def keep(folder: Path) -> None:
    """From now on captures are kept in a folder, and those that are there are read again.

    That takes a thousandth of the time that capturing does, half a minute for a large Evoformer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _folders[:] = [folder]


@lru_cache(maxsize=8)
def captured(model: str, sizes: Sizes, dtype: str, batch: int) -> ss.Graph:
    """A model with a microbatch of so many samples."""
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
