"""Laws of captures of models whose forward registers hooks when it is first called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.front_end.hooks import Hooks, hooks_kept


class Recording(nn.Module):
    """Adds what a hook recorded of each layer to the loss, as models of HuggingFace do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def record(self, module: nn.Module, args: Any, result: Tensor) -> None:
        self.recorded.append(result)

    def forward(self, x: Tensor) -> Tensor:
        self.recorded: list[Tensor] = []
        if not getattr(self, "is_recording", False):
            for layer in self.layers:
                layer.register_forward_hook(self.record)
            self.is_recording = True
        for layer in self.layers:
            x = layer(x)
        return x.sum() + sum(each.square().mean() for each in self.recorded)


def test_every_capture_of_a_model_that_registers_hooks_is_alike() -> None:
    model, x = Recording(), torch.randn(4, 6)
    graphs = [ss.capture(model, (x,)) for _ in range(3)]
    assert [str(graph) for graph in graphs] == [str(graphs[0])] * 3
    assert sum(op.kind == "mean" for op in graphs[0].ops) == 2


def test_capture_leaves_no_hooks() -> None:
    model = Recording()
    ss.capture(model, (torch.randn(4, 6),))
    assert not any(layer._forward_hooks for layer in model.layers)


def test_put_gives_every_module_its_hooks_again() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    kept = model[0].register_forward_hook(lambda *_: None)
    before = Hooks(model)
    with hooks_kept(model):
        model[1].register_forward_pre_hook(lambda *_: None)
        kept.remove()
    assert [*model[0]._forward_hooks] == [kept.id]
    assert not model[1]._forward_pre_hooks
    kept.remove()
    before.put()
    assert [*model[0]._forward_hooks] == [kept.id]
