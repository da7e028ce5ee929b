"""PlanTrainer: the ``Trainer`` of transformers, whose steps all ranks make by a plan."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import TrainingArguments

import rvdcomm as rv
from superscaler_core.errors import PlanError
from superscaler_core.integrations.one_device import OneDeviceAccelerator, on_one_device
from superscaler_core.integrations.refused import check_arguments, check_methods, check_options
from superscaler_core.integrations.stand_in import StandIn
from superscaler_core.optim import whole
from superscaler_core.parallel import Parallel, parallelize
from superscaler_core.training.needs import needs_of_class

RUN_FOLDER = "plan"
"""The folder of a checkpoint that has parameters, optimizer and scheduler, as ranks stored them."""


class PlanTrainer(transformers.Trainer):  # type: ignore[misc]
    """A ``transformers.Trainer`` that trains one model on all ranks of the process group.

    It does what the plain ``Trainer`` does on one device, whatever the plan and the number of
    ranks: losses of steps are the same, ``per_device_train_batch_size`` is the size of the whole
    batch, and a checkpoint continues under any other plan. Only rank 0 logs and writes, but for the
    ranks' own parts of a checkpoint.

    All methods are collective. ``model`` keeps its first values; ``parallel`` has the trained ones.

    Args:
        model: as of ``parallelize``; its forward returns a loss.
        args: ``TrainingArguments``; what does not work is refused by name.
        plan: a plan, as ``parallelize`` takes it.
        options: its options as values.
        results: outputs of the model that ``predict`` returns and metrics get; if None,
            ``("logits",)`` with ``compute_metrics``, and none without.
        topology: as of ``parallelize``.
        memory_limit: bytes of each device; not checked if None.
        dtype: dtype of stored parameters; the model's if None.
        trainer: further arguments of ``transformers.Trainer``, by name. An optimizer is given as
            ``optimizer_cls_and_kwargs``; if it needs whole matrices, it is ``ss.optim.whole``.

    Raises:
        PlanError: an argument does not work with plans; the message says what does.

    >>> # trainer = PlanTrainer(model=model, args=TrainingArguments("out"), train_dataset=texts,
    >>> #                       plan="hybrid:tp=2")
    >>> # trainer.train(); trainer.save_model("trained")
    """

    optimizer: Any

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments | None = None,
        *,
        plan: Any = "data_parallel",
        options: Mapping[str, Any] | None = None,
        results: Sequence[str] | None = None,
        topology: rv.Topology | rv.Network | None = None,
        memory_limit: int | None = None,
        dtype: torch.dtype | None = None,
        **trainer: Any,
    ) -> None:
        args = args if args is not None else TrainingArguments("tmp_trainer")
        check_methods(type(self), transformers.Trainer)
        check_options(trainer, trainer.get("optimizers", (None, None))[0])
        check_arguments(args)
        if results is None:
            results = () if trainer.get("compute_metrics") is None else ("logits",)
        self._keeps = () if args.prediction_loss_only else tuple(results)
        self._how = {
            **{"plan": plan, "options": options, "topology": topology},
            **{"memory_limit": memory_limit, "dtype": dtype},
        }
        self._parallel: Parallel | None = None
        super().__init__(model, on_one_device(args), **trainer)

    @property
    def parallel(self) -> Parallel:
        """This rank's share of the model; it is made when it is first needed."""
        if self._parallel is None:
            example = self._example()
            self.model.train()
            # Programs of other shapes are captured as this one.
            with self._precision():
                self._parallel = parallelize(
                    self.model,
                    kwargs=example,
                    results=self._keeps,
                    seed=self.args.seed,
                    device=self.args.device,
                    **self._how,
                )
        return self._parallel

    def _example(self) -> dict[str, Any]:
        """The first samples as a batch; draws no random numbers that a training would draw."""
        dataset, size = self.train_dataset, self._train_batch_size
        if dataset is None:
            dataset, size = self.eval_dataset, self.args.eval_batch_size
        if isinstance(dataset, dict):
            dataset = next(iter(dataset.values()))
        if dataset is None:
            raise PlanError("PlanTrainer needs a train_dataset or an eval_dataset, for an example.")
        with _same_random_state():
            loader = self._get_dataloader(dataset, "Example", size)
            batch = next(iter(loader.base_dataloader))
        self.accelerator._dataloaders.remove(loader)
        return self._counted(
            self._prepare_inputs(batch), self._get_num_items_in_batch([batch], self.args.device)
        )

    def _counted(self, inputs: Mapping[str, Any], num_items: Any) -> dict[str, Any]:
        """The inputs of the model, with the number of labels over which its loss is a mean."""
        counts = self.model_accepts_loss_kwargs and num_items is not None
        return {**inputs, "num_items_in_batch": num_items} if counts else dict(inputs)

    def _precision(self) -> AbstractContextManager[Any]:
        if not self.args.bf16:
            return nullcontext()
        return torch.autocast(self.args.device.type, torch.bfloat16)

    # --- what the library makes -----------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, which sees one device."""
        super().create_accelerator_and_postprocess()
        # The library makes the object, whose class has no hook for this.
        self.accelerator.__class__ = OneDeviceAccelerator
        self.gather_function = self.accelerator.gather_for_metrics

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        with self.args.distributed_state.as_first():
            return super()._get_dataloader(*args, **kwargs)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> StandIn:
        def zero_grad() -> None:
            self.optimizer.zero_grad()

        return StandIn(self.model, self.parallel, zero_grad)

    def create_optimizer(self, model: Any = None) -> Any:
        """Make the optimizer over this rank's boxes, with the groups that the library makes."""
        if self.optimizer is None:
            of, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(
                self.args, self.model
            )
            if not (isinstance(of, type) and issubclass(of, torch.optim.Optimizer)):
                raise PlanError(
                    f"optimizer_cls_and_kwargs has {of!r}, and PlanTrainer takes a class of "
                    "optimizers; or replace create_optimizer in a subclass, and make the optimizer "
                    "over self.parallel.parameters()."
                )
            if needs_of_class(of)[0] is None:
                self.optimizer = of(self._groups(), **options)
            else:
                self.optimizer = whole(of, self.parallel, self._groups(), **options)
        return self.optimizer

    def _groups(self) -> list[dict[str, Any]]:
        """Parameters that decay, and those that do not."""
        decaying = set(self.get_decay_parameter_names(self.model))
        boxes: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, box in self.parallel.named_parameters():
            boxes[name in decaying].append(box)
        rates = {True: self.args.weight_decay, False: 0.0}
        return [{"params": boxes[decays], "weight_decay": rates[decays]} for decays in boxes]

    # --- steps ----------------------------------------------------------------------------------

    def training_step(
        self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Run forward and backward of one batch on all ranks; return its loss."""
        model.train()
        batch = self._counted(self._prepare_inputs(inputs), num_items_in_batch)
        # A loss that is divided by the labels of all accumulated batches adds up by itself.
        adds_up = "num_items_in_batch" in batch
        share = 1.0 if adds_up else 1.0 / self.current_gradient_accumulation_steps
        with self.parallel.scaled(share):
            loss = self.parallel.step(**batch)
        return loss.detach() * share

    def _clip_grad_norm(self, model: Any) -> Tensor:
        return self.parallel.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self.parallel.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate on a dataset, and return what ``results`` keeps of every sample.

        Raises:
            PlanError: nothing is kept.
        """
        if not (self._keeps or self.args.prediction_loss_only):
            raise PlanError(
                "predict returns outputs of the model, and this trainer keeps none: give "
                'results=("logits",) of PlanTrainer; for the loss alone, call evaluate.'
            )
        return super().predict(test_dataset, *args, **kwargs)

    # --- checkpoints ----------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the weights, as the model itself would; the only place that does."""
        folder = output_dir if output_dir is not None else self.args.output_dir
        if state_dict is None and isinstance(self.model, transformers.PreTrainedModel):
            self.parallel.save_pretrained(folder)
            # The library writes the rest: what prepares the data, and the arguments.
            with patch.object(self.model, "save_pretrained", lambda *args, **kwargs: None):
                super()._save(folder, {})
            return
        state = self.parallel.state_dict(rank0_only=True) if state_dict is None else state_dict
        with self.parallel.trainer.calls.prepared("save_model"):
            super()._save(folder, state)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir) / RUN_FOLDER
        with self.parallel.trainer.calls.prepared("save"):
            # The library writes over a checkpoint of an earlier run in the same folder.
            if self.args.should_save and folder.exists():
                shutil.rmtree(folder)
        self.parallel.save(folder, optimizer=self.optimizer, scheduler=self.lr_scheduler)

    def _save_rng_state(self, output_dir: str) -> None:
        # Random numbers of the loop are the same on all ranks, so any number of them can continue.
        if self.args.should_save:
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not (Path(resume_from_checkpoint) / RUN_FOLDER).is_dir():
            with self._weights_of_model():
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint) / RUN_FOLDER
        if folder.is_dir():
            self.parallel.load(folder, optimizer=self.optimizer, scheduler=self.lr_scheduler)
        elif (Path(checkpoint) / "optimizer.pt").exists():
            raise PlanError(
                f"{checkpoint} has the optimizer of a plain Trainer, whose state no plan reads: "
                "train from its weights, PlanTrainer(Model.from_pretrained(...)), or resume on one "
                "device."
            )

    def _load_best_model(self) -> None:
        with self._weights_of_model():
            super()._load_best_model()

    @contextmanager
    def _weights_of_model(self) -> Iterator[None]:
        """Inside, the library reads weights into the model; then all ranks take their boxes."""
        yield
        if self._parallel is not None:
            self._parallel.load_state_dict(self.model.state_dict())


@contextmanager
def _same_random_state() -> Iterator[None]:
    """Leave the random numbers of Python, numpy and torch as they were before the block."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    np.random.set_state(numpy)
