"""What no plan has is refused by name, and nothing is ignored."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import superscaler_core.integrations
from superscaler_core.errors import PlanError
from superscaler_core.integrations import PlanTrainer
from superscaler_core.integrations.refused import REFUSED, WORKING, check_arguments
from tests.superscaler_core.integrations.small_runs import Rows, arguments, llama, trainer


def test_every_field_of_the_arguments_works_or_is_refused() -> None:
    names = {field.name for field in fields(transformers.TrainingArguments)}
    assert names == WORKING | set(REFUSED)
    assert not WORKING & set(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_field_is_named_with_what_to_use(tmp_path: Path, name: str) -> None:
    args = arguments(tmp_path)
    # Set afterwards: the library itself needs other libraries or devices for some of them.
    setattr(args, name, True)
    with pytest.raises(PlanError, match=r"does not take \w+=True; use instead: \w"):
        check_arguments(args)


CHOICES: dict[str, tuple[dict[str, Any], str]] = {
    "optimizer": ({"optim": "lion_32bit"}, "optim='lion_32bit'.*optimizer_cls_and_kwargs"),
    "order": ({"train_sampling_strategy": "group_by_length"}, "group_by_length.*pads"),
    "loader": ({"accelerator_config": {"split_batches": True}}, "split_batches.*whole batch"),
    "fp16": ({"fp16": True}, "fp16=True; use instead: bf16"),
}


@pytest.mark.parametrize("options, match", CHOICES.values(), ids=CHOICES)
def test_values_that_no_plan_has_are_refused(
    tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(PlanError, match=match):
        trainer(tmp_path, "zero3", options)


def test_a_field_that_is_newer_than_the_tables_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("superscaler_core.integrations.refused.WORKING", WORKING - {"seed"})
    with pytest.raises(PlanError, match="seed=7; use instead: its default, 42"):
        check_arguments(arguments(tmp_path, seed=7))


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "loss": ({"compute_loss_func": print}, "compute_loss_func.*forward"),
    "init": ({"model_init": llama}, "model_init"),
    "optimizer": (
        {"optimizers": (torch.optim.SGD([torch.zeros(1)]), None)},
        "optimizer_cls_and_kwargs=",
    ),
}


@pytest.mark.parametrize("more, match", OPTIONS.values(), ids=OPTIONS)
def test_options_that_no_plan_has_are_refused(
    tmp_path: Path, more: dict[str, Any], match: str
) -> None:
    with pytest.raises(PlanError, match=match):
        trainer(tmp_path, "zero3", **more)


def test_a_subclass_with_a_loss_of_its_own_is_refused(tmp_path: Path) -> None:
    class Mine(PlanTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    with pytest.raises(PlanError, match=r"Mine\.compute_loss; use instead: compute the loss in"):
        Mine(llama(), arguments(tmp_path))


def test_predictions_that_are_not_kept_are_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path, "zero3", compute_metrics=None)
    with pytest.raises(PlanError, match=r'results=\("logits",\)'):
        made.predict(Rows(2, seed=0))


def test_a_checkpoint_of_a_plain_trainer_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, None, {"save_strategy": "epoch"}).train()
    with pytest.raises(PlanError, match="has the optimizer of a plain Trainer"):
        trainer(tmp_path, "zero3").train(resume_from_checkpoint=True)


@pytest.mark.parametrize("library", ["accelerate", "transformers"])
def test_a_library_that_is_missing_is_named_with_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"{library}: pip install 'rvdcomm\[trainer\]'"):
        _ = superscaler_core.integrations.__getattr__("PlanTrainer")
