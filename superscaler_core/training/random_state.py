"""The random state of a process: of torch on the CPU and on one GPU, of numpy and of Python."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of all generators that a training loop on ``device`` draws from."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def check_random_state(state: dict[str, Any]) -> None:
    """Check that generators can take a state, with generators that nothing else uses.

    Raises:
        ValueError, TypeError, KeyError: the state has another form.
    """
    random.Random().setstate(state["python"])
    np.random.RandomState().set_state(state["numpy"])
    for name in {"torch", "cuda"} & {*state, "torch"}:
        if not isinstance(state[name], torch.Tensor) or state[name].dtype != torch.uint8:
            raise TypeError(f"the state of {name} is no tensor of bytes")
    try:
        torch.Generator().set_state(state["torch"])
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Let all generators continue from a state, with the GPU's generator if the state has it."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
