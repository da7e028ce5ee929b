"""Losses of transformers that are divided by a number of items from the caller."""

import pytest
import torch

import superscaler_core as ss
from superscaler_core.plans import PLANS
from tests.models.families import FAMILIES

LLAMA = FAMILIES["Llama"]


@pytest.mark.parametrize("num_items", [7, torch.tensor(7)], ids=["number", "tensor"])
@pytest.mark.parametrize("plan", ["data_parallel", "megatron"])
def test_loss_normalized_by_num_items_in_batch_equals_that_of_one_device(plan, num_items, tmp_path):
    batch = LLAMA.batch(4, 0)
    given = {**batch, "num_items_in_batch": num_items}
    model = LLAMA.model()
    made = ss.Plan(ss.capture(model, kwargs=given), range(2))
    PLANS[plan](made)
    ss.compile(made).save(tmp_path)
    tensors = {name: value for name, value in given.items() if torch.is_tensor(value)}
    found = ss.run_threads(tmp_path, lambda trainer: trainer.step(**tensors).item(), range(2))
    assert list(found.values()) == pytest.approx([model(**given).loss.item()] * 2, rel=1e-5)
