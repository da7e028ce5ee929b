"""Trainer: a program as the user of one rank sees it; what is around the step is ordinary torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import rvdcomm as rv
from superscaler_core.errors import PlanError
from superscaler_core.run import checkpoint
from superscaler_core.run.moves import move_many
from superscaler_core.run.rank import Rank
from superscaler_core.run.together import norm_of_grads
from superscaler_core.run.transport import Transport


class Trainer:
    """One rank's share of the training of one model.

    All calls but ``parameters`` are collective over the program's ranks.

    >>> # trainer = superscaler_core.load("program")          # under torchrun
    >>> # optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-3)
    >>> # loss = trainer.step(tokens, targets)
    >>> # optimizer.step(); optimizer.zero_grad()
    """

    def __init__(self, rank: Rank, transport: Transport) -> None:
        self._rank, self._transport = rank, transport
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        """What ``update_with`` has made, by the first parameter of each."""

    @property
    def rank(self) -> int:
        """Which device of the plan this is."""
        return self._rank.tables.rank

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step."""
        return self._rank.tables.num_microbatches

    # --- training -------------------------------------------------------------------------------

    def step(self, *batch: Tensor, **named: Tensor) -> Tensor:
        """Forward and backward of a global batch; gradients are left where optimizers look.

        Args:
            batch: the model's inputs by position, whole and equal on all ranks: along dim 0
                ``num_microbatches`` times what was captured. Each rank uses its share.
            named: inputs by name.

        Returns:
            The mean loss of the microbatches, a scalar, the same on all ranks.

        Raises:
            ValueError: an input is missing or has another shape.
        """
        names = list(self._rank.tables.inputs)
        if len(batch) > len(names):
            raise ValueError(
                f"step takes {len(names)} inputs ({', '.join(names)}), got {len(batch)}."
            )
        return self._rank.step({**dict(zip(names, batch, strict=False)), **named})

    def update_with(self, make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]) -> None:
        """Let steps update weights themselves, where the program says so (``update``).

        Without this, updates are the caller's: a step leaves gradients, and he steps an optimizer.

        Args:
            make: an optimizer of the parameters of one update, as of a stage; it is called at the
                first. Gradients are let go when it has stepped.
        """

        def update(names: Sequence[str]) -> None:
            stored = self._rank.weights.stored
            if names[0] not in self.optimizers:
                self.optimizers[names[0]] = make([stored[name] for name in names])
            self.optimizers[names[0]].step()
            self.optimizers[names[0]].zero_grad()

        self._rank.updates = update

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale gradients so that their norm over the whole model is at most ``max_norm``.

        Returns:
            The norm before, the same on all ranks, as ``torch.nn.utils.clip_grad_norm_``.
        """
        stored = self._rank.weights.stored
        grads = {name: w.grad for name, w in stored.items() if w.grad is not None}
        norm = norm_of_grads(grads, self._rank.tables, self._transport)
        scale = float(max_norm / (norm + 1e-6))
        for grad in grads.values() if scale < 1 else ():
            grad.mul_(scale)
        return norm

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What this rank stores: boxes of parameters, by their single-device names."""
        yield from self._rank.weights.stored.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The same without names, as optimizers take it."""
        yield from self._rank.weights.stored.values()

    # --- parameters as on a single device -------------------------------------------------------

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's boxes out of whole parameters, by single-device names.

        Raises:
            PlanError: a parameter is missing or has another shape.
        """
        tables = self._rank.tables
        for name, entry in tables.parameters.items():
            given = state.get(name)
            if given is None or tuple(given.shape) != entry.shape:
                got = "is missing" if given is None else f"has shape {list(given.shape)}"
                raise PlanError(
                    f"load_state_dict: {name} {got}; the model has it with shape "
                    f"{list(entry.shape)}."
                )
            if entry.box is not None:
                box = rv.Box.parse(entry.box)
                with torch.no_grad():
                    index = box.slices_within(rv.Box.of_shape(entry.shape))
                    self._rank.weights.stored[name].copy_(given[index])

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint, each rank its own boxes; ``rvdcomm reshard`` makes other forms of it.

        Args:
            folder: that all ranks share, new.

        Raises:
            PlanError: a parameter is stored in boxes that form no layout.
            CheckpointError: the folder holds a checkpoint already.
        """
        checkpoint.save(folder, self._rank.tables, self._rank.weights.stored, self._transport)

    def load(self, folder: str | Path) -> None:
        """Read this rank's boxes from a checkpoint of any layouts, or of a single device.

        Raises:
            CheckpointError: a parameter is missing or has another shape.
        """
        checkpoint.load(folder, self._rank.tables, self._rank.weights.stored)

    def state_dict(self) -> dict[str, Tensor]:
        """All parameters whole, on every rank, by single-device names, tied weights by all."""
        tables = self._rank.tables
        moves = {
            name: (entry.whole, self._rank.weights.shard(name))
            for name, entry in tables.parameters.items()
        }
        found: dict[str, Tensor] = {}
        for name, box, tensor in move_many(self._transport, moves):
            whole = found.setdefault(name, tensor.new_empty(tables.parameters[name].shape))
            whole[box.slices_within(rv.Box.of_shape(whole.shape))] = tensor
        return {**found, **{alias: found[name] for alias, name in tables.aliases.items()}}
