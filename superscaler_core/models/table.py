"""The table of models: each by name, with its sizes and example inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from superscaler_core.models import gpt, mlp, moe, swin
from superscaler_core.table import Table


@dataclass(frozen=True)
class Model:
    """A kind of model.

    Attributes:
        config: class of its sizes, with ``presets()``.
        build: from the sizes to a module whose ``forward`` returns the loss.
        example_inputs: from the sizes, a batch and a generator to arguments of ``forward``.
        recycled: the last arguments, if they are results of the pass before; as in ``capture``.
    """

    config: Any
    build: Callable[[Any], nn.Module]
    example_inputs: Callable[[Any, int, torch.Generator], tuple[Tensor, ...]]
    recycled: Mapping[str, int] = field(default_factory=dict)


MODELS: Table[Model] = Table(
    "models",
    {
        "gpt": Model(gpt.GPTConfig, gpt.GPT, gpt.example_inputs),
        "moe": Model(moe.MoEConfig, moe.MoETransformer, moe.example_inputs),
        "mlp": Model(mlp.MLPConfig, mlp.MLPModel, mlp.example_inputs),
        "swin": Model(swin.SwinConfig, swin.Swin, swin.example_inputs),
    },
)
"""Models by name; ``published`` and other installed packages bring further ones."""


def config_of(name: str, preset: str = "tiny", **sizes: Any) -> Any:
    """The sizes of a model: those of a preset, and others in place of some.

    Raises:
        ValueError: there is no such model, preset or size; the message names those there are.

    >>> config_of("gpt", "tiny", layers=4).layers
    4
    """
    if name not in MODELS:
        raise ValueError(f"there is no model {name!r}; there are {', '.join(MODELS)}.")
    presets = MODELS[name].config.presets()
    if preset not in presets:
        raise ValueError(f"model {name} has no preset {preset!r}; it has {', '.join(presets)}.")
    try:
        return replace(presets[preset], **sizes)
    except TypeError as error:
        known = ", ".join(vars(presets[preset]))
        raise ValueError(f"model {name}: {error}; its sizes are {known}.") from None


def build(name: str, preset: str = "tiny", **sizes: Any) -> nn.Module:
    """A model by name, on torch's default device (such as ``with torch.device("meta")``).

    Raises:
        ValueError: as in ``config_of``.
    """
    config = config_of(name, preset, **sizes)
    return MODELS[name].build(config)


def example_inputs(
    name: str, batch: int, preset: str = "tiny", *, seed: int = 0, **sizes: Any
) -> tuple[Tensor, ...]:
    """Random arguments of a model's ``forward``, the same for the same seed.

    Raises:
        ValueError: as in ``config_of``.
    """
    config = config_of(name, preset, **sizes)
    generator = torch.Generator().manual_seed(seed)
    return MODELS[name].example_inputs(config, batch, generator)
