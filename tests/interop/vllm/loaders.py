"""A model as vLLM loads it: fused, cut, padded and converted parameters, filled by loaders."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rvdcomm.interop.vllm.record import TensorMeta

HIDDEN, HEADS, KV_HEADS, HEAD, WIDE, EXPERTS, VOCAB = 8, 4, 2, 2, 6, 3, 13

SHAPES = {
    "embed": (VOCAB, HIDDEN),
    "head": (VOCAB, HIDDEN),
    "q": (HEADS * HEAD, HIDDEN),
    "k": (KV_HEADS * HEAD, HIDDEN),
    "v": (KV_HEADS * HEAD, HIDDEN),
    "o": (HIDDEN, HEADS * HEAD),
    "gate": (WIDE * 2, HIDDEN),
    "up": (WIDE * 2, HIDDEN),
    "fused_up": (EXPERTS, HIDDEN, 2 * WIDE),
    "norm": (HIDDEN,),
    "table": (HIDDEN, HIDDEN),
    "scale": (),
    "small": (HIDDEN, HIDDEN),
    "small_scale": (HIDDEN, 1),
    "unused": (5,),
}


def checkpoint(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The tensors of a checkpoint, with values of their own."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(_dtype(name, dtype))
        for name, shape in SHAPES.items()
    }


def metas(dtype: torch.dtype = torch.float32) -> dict[str, TensorMeta]:
    return {name: TensorMeta(shape, _dtype(name, dtype)) for name, shape in SHAPES.items()}


def _dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """That of a tensor in a checkpoint of ``dtype``: one is quantised, and has scales."""
    return torch.float8_e4m3fn if name == "small" else dtype


class Engine:
    """The parameters of one worker, of ``size`` that cut the model; more share key heads."""

    def __init__(self, rank: int, size: int, dtype: torch.dtype, device: str = "cpu") -> None:
        self.rank, self.size = rank, size

        def made(*shape: int) -> Tensor:
            return torch.full(shape, 7.0, dtype=dtype, device=device)

        heads, keys = HEADS // size, max(KV_HEADS // size, 1)
        rows = -(-VOCAB // (2 * size)) * 2
        self.parameters = {
            "embed": made(rows, HIDDEN),
            "qkv": made((heads + 2 * keys) * HEAD, HIDDEN),
            "o": made(HIDDEN, heads * HEAD),
            "gate_up": made(2 * (2 * WIDE // size), HIDDEN),
            "w13": made(EXPERTS, 2 * WIDE // size, HIDDEN),
            "norm": made(HIDDEN),
            "table": made(HIDDEN, HIDDEN),
            "scale": made(1),
            "small": made(HIDDEN // size, HIDDEN).to(torch.float8_e4m3fn),
            "small_scale": made(HIDDEN // size, 1),
        }

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Fill the parameters as loaders of vLLM do; returns the names of those that were."""
        found = {self._load(name, tensor) for name, tensor in weights}
        return found - {""}

    def _load(self, name: str, tensor: Tensor) -> str:
        rank, size, to = self.rank, self.size, self.parameters
        match name:
            case "embed":
                rows = to["embed"].shape[0]
                start = min(rank * rows, VOCAB)
                part = tensor.narrow(0, start, min(rows, VOCAB - start))
                to["embed"][: part.shape[0]].copy_(part)
                to["embed"][part.shape[0] :].fill_(0)
            case "q" | "k" | "v":
                heads, keys = HEADS // size, max(KV_HEADS // size, 1)
                count = heads if name == "q" else keys
                index = rank if name == "q" else rank * KV_HEADS // max(size, KV_HEADS)
                index = rank if KV_HEADS % size == 0 else index
                first = {"q": 0, "k": heads, "v": heads + keys}[name] * HEAD
                to["qkv"].narrow(0, first, count * HEAD).copy_(
                    tensor.narrow(0, index * count * HEAD, count * HEAD)
                )
                return "qkv"
            case "o":
                to["o"].copy_(tensor.chunk(size, dim=1)[rank])
            case "gate" | "up":
                width = 2 * WIDE // size
                part = tensor.view(size, width, HIDDEN)[rank]
                to["gate_up"].narrow(0, (name == "up") * width, width).copy_(part.to(to["o"].dtype))
                return "gate_up"
            case "fused_up":
                width = WIDE // size
                for half, whole in enumerate(tensor.transpose(1, 2).chunk(2, dim=1)):
                    for expert in range(EXPERTS):
                        part = whole[expert].narrow(0, rank * width, width)
                        to["w13"][expert].narrow(0, half * width, width).copy_(part)
                return "w13"
            case "table":
                to["table"].copy_(tensor + 1)
            case "small" | "small_scale":
                to[name].copy_(tensor.chunk(size)[rank])
            case "scale":
                to["scale"].fill_(tensor.item())
            case "norm":
                to["norm"].copy_(tensor)
            case _:
                return ""
        return name

    def without_data(self) -> Engine:
        """The engine as a record fills it."""
        return Engine(self.rank, self.size, self.parameters["o"].dtype, "meta")


def loaded(rank: int, size: int, weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Any]:
    """The parameters of a worker that loaded a whole checkpoint."""
    engine = Engine(rank, size, dtype)
    engine.load_weights(weights.items())
    return engine.parameters
