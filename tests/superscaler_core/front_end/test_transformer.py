"""torch's own Transformer is captured with its dropout, whatever masks it is given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import superscaler_core as ss
from tests.superscaler_core.as_torch import check_as_in_torch, compiled, on_ranks

X = torch.randn(4, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
CAUSAL = nn.Transformer.generate_square_subsequent_mask(5).double()


class Model(nn.Module):
    def __init__(self, dropout: float, masks: dict[str, Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Transformer(8, 2, 1, 2, 16, dropout, batch_first=True, dtype=torch.float64)
        self.masks = masks

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        masks = self.masks if mask is None else {"tgt_mask": mask}
        made: Tensor = self.inner(x, x, **masks)
        return (made**2).mean()


MASKS: dict[str, dict[str, Tensor]] = {
    "decoder": {"tgt_mask": CAUSAL},
    "all": {"src_mask": CAUSAL, "tgt_mask": CAUSAL, "memory_mask": CAUSAL},
    "padding": {"src_key_padding_mask": torch.zeros(4, 5, dtype=torch.bool)},
}


@pytest.mark.parametrize("masks", MASKS)
def test_transformer_has_the_loss_of_torch(masks: str, tmp_path: Path) -> None:
    check_as_in_torch(Model(0.0, MASKS[masks]), [X], "data_parallel", tmp_path)


def test_transformer_with_dropout_draws_the_masks_of_one_device(tmp_path: Path) -> None:
    graph = ss.capture(Model(0.1, MASKS["all"]), (X,))
    assert not graph.opaque
    losses = [
        loss
        for number in (1, 2)
        for loss in on_ranks(
            compiled(graph, "data_parallel", number), tmp_path / str(number), lambda t: t.step(X)
        )
    ]
    torch.testing.assert_close(losses[1:], losses[:1] * 2, rtol=1e-9, atol=0)


def test_mask_of_the_decoder_may_be_an_input() -> None:
    assert not ss.capture(Model(0.1, {}), (X, CAUSAL)).opaque
