"""``OwnBatches``: the shares of all ranks are the batches of one."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch.utils.data import TensorDataset

import superscaler_core as ss
from superscaler_core.parallel.own_batches import OwnBatches
from tests.superscaler_core.parallel.small_nets import batch, net
from tests.superscaler_core.parallel.threads import on_threads


@pytest.mark.parametrize("num_samples", [8, 9, 11, 23])
@pytest.mark.parametrize("num_shares", [1, 2, 3, 4])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_sample_is_passed_once(
    num_samples: int, num_shares: int, shuffle: bool, drop_last: bool
) -> None:
    def of(share: int, num: int) -> OwnBatches:
        made = OwnBatches(num_samples, 8, share, num, shuffle, 3, drop_last)
        made.set_epoch(2)
        return made

    shares = [[*of(share, num_shares)] for share in range(num_shares)]
    assert {len(own) for own in shares} == {len(of(0, num_shares))}
    assert all(batch for own in shares for batch in own)
    together = [*chain.from_iterable(chain(*step) for step in zip(*shares, strict=True))]
    whole = [*chain.from_iterable(of(0, 1))]
    assert together == whole
    assert sorted(whole) == sorted(set(whole))
    assert len(whole) == (num_samples // 8 * 8 if drop_last else num_samples)


def test_epochs_have_orders_of_their_own() -> None:
    own = OwnBatches(20, 4, shuffle=True)
    first = [*own]
    own.set_epoch(1)
    assert [*own] != first


def test_fewer_samples_than_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="batches of 2 of 9 samples are cut among 4 ranks"):
        OwnBatches(9, 2, 0, 4)


@pytest.mark.parametrize(("kind", "plan"), [("local", "zero3"), ("whole", "megatron")])
def test_loader_trains_an_epoch_as_one_device(kind: str, plan: str) -> None:
    data = TensorDataset(batch(21))

    def work(parallel: ss.Parallel) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        loader = parallel.loader(data, 8, shuffle=True, seed=5)
        for (x,) in loader:
            parallel.step(x=x)
            optimizer.step()
            optimizer.zero_grad()
        return parallel.state_dict()

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for indices in OwnBatches(21, 8, shuffle=True, seed=5):
        model(x=data.tensors[0][indices]).backward()
        optimizer.step()
        optimizer.zero_grad()
    example = {"x": batch(8 if kind == "whole" else 4)}
    found = on_threads(net(), example, 2, work, plan=plan, batch=ss.Batch(kind=kind))
    for state in found.values():
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-14)
