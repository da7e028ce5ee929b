"""Cache: keys and values of a model of transformers that are tensors given and returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Shapes = list[tuple[tuple[int, ...], torch.dtype]]
"""Shapes ``[batch, heads, tokens, width]`` and dtypes of keys and values, layer after layer."""


def recording_cache(num_layers: int, seen: dict[int, tuple[Tensor, Tensor]]) -> Any:
    """A cache that keeps nothing, and tells which keys and values each layer makes.

    Args:
        num_layers: layers of the model.
        seen: gets keys and values, by layer.
    """
    from transformers.cache_utils import Cache, DynamicLayer

    class Recording(DynamicLayer):  # type: ignore[misc]
        _number = 0

        def update(
            self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            seen[self._number] = key_states, value_states
            return key_states, value_states

    layers: list[Any] = [Recording() for _ in range(num_layers)]
    for number, layer in enumerate(layers):
        layer._number = number
    return Cache(layers=layers)


def written_cache(tensors: Sequence[Tensor], at: Tensor) -> Any:
    """A cache in which new keys and values are written at places; ``tensors_of`` has the result.

    Args:
        tensors: keys and values ``[batch, heads, room, width]``, layer after layer; not modified.
        at: the places of the new tokens, ``[tokens]``.
    """
    from transformers.cache_utils import Cache, CacheLayerMixin

    class Written(CacheLayerMixin):  # type: ignore[misc]
        is_compileable = False
        is_sliding = False
        keys: Tensor
        values: Tensor

        def __init__(self, keys: Tensor, values: Tensor) -> None:
            super().__init__()
            self.keys, self.values, self.is_initialized = keys, values, True

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            pass

        def update(
            self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            self.keys = self.keys.index_copy(2, at, key_states)
            self.values = self.values.index_copy(2, at, value_states)
            return self.keys, self.values

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.keys.shape[2], 0

        def get_seq_length(self) -> int:
            return 0

        def get_max_length(self) -> int:
            return int(self.keys.shape[2])

    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    return Cache(layers=[Written(keys, values) for keys, values in pairs])


def tensors_of(cache: Any) -> list[Tensor]:
    """Keys and values, layer after layer."""
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def counting_cache(room: int) -> Any:
    """A cache without tensors, which tells ``generate`` how many tokens were seen (``seen``)."""
    from transformers.cache_utils import Cache

    class Counting(Cache):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(layers=[])
            self.seen = 0

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return self.seen

        def get_max_length(self, layer_idx: int | None = 0) -> int:
            return room

        def reorder_cache(self, beam_idx: Any) -> None:
            raise NotImplementedError("generate searches no beams here: num_beams is 1.")

        @property
        def is_compileable(self) -> bool:
            return False

        @property
        def is_initialized(self) -> bool:
            return True

    return Counting()


def mask_of(attention_mask: Tensor, at: Tensor, room: int, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of new tokens against a cache, ``[batch, 1, tokens, room]``.

    Args:
        attention_mask: 1 for tokens and 0 for padding, ``[batch, tokens so far]``.
        at: the places of the new tokens, the last of those so far, ``[tokens]``.
        room: places of the cache.
        dtype: dtype of the scores.
    """
    is_token = torch.nn.functional.pad(attention_mask.bool(), (0, room - attention_mask.shape[1]))
    is_past = torch.arange(room, device=at.device) <= at[:, None]
    allowed = is_token[:, None, None] & is_past[None, None]
    zero = torch.zeros((), dtype=dtype, device=at.device)
    return torch.where(allowed, zero, torch.finfo(dtype).min)
