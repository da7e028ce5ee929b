"""Constants: values that depend on no input, in a file that is read without unpickling."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FILE = "constants.npz"
WEIGHTS = "weights"
"""File name of a checkpoint of the captured model's whole parameters."""
TOPOLOGY = "topology.json"
"""File name of the topology that a program was compiled for."""

_NARROW = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
_WIDER = {getattr(torch, name): torch.float32 for name in _NARROW}
"""Dtypes that numpy does not have; all their values are exact in float32."""


def save_constants(folder: Path, constants: Mapping[str, Tensor]) -> None:
    """Write constants to a program's folder, each under its dtype and its name."""
    arrays = {
        f"{str(value.dtype).removeprefix('torch.')}:{name}": value.detach()
        .to(_WIDER.get(value.dtype, value.dtype))
        .cpu()
        .numpy()
        for name, value in constants.items()
    }
    with (folder / FILE).open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def load_constants(data: bytes) -> dict[str, Tensor]:
    """Read the file that ``save_constants`` wrote."""
    found = {}
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        for key in arrays.files:
            dtype, _, name = key.partition(":")
            found[name] = torch.from_numpy(arrays[key]).to(getattr(torch, dtype))
    return found
