"""WithWeights: what a parallel model stores, as optimizers, checkpoints and folders see it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rvdcomm as rv
from superscaler_core.compiled import Compiled
from superscaler_core.errors import PlanError
from superscaler_core.hugging_face import read_weights, write_folder
from superscaler_core.parallel.programs import Programs
from superscaler_core.parallel.reported import Reported
from superscaler_core.run.rank import Rank
from superscaler_core.run.transport import Transport
from superscaler_core.training.checkpoint import copies
from superscaler_core.training.first_values import take_first_values
from superscaler_core.training.grad_scaler import GradScaler
from superscaler_core.training.trainer import IncompatibleKeys
from superscaler_core.training.training_state import SavedRun

_log = logging.getLogger("superscaler_core")


class WithWeights(Reported):
    """What a ``Parallel`` stores, and how it is read and written."""

    _programs: Programs
    _first: Rank
    _transport: Transport

    @property
    def compiled(self) -> Compiled:
        """The program of the example's shape, which decides what is stored."""
        raise NotImplementedError

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The boxes of parameters that this rank stores, by their single-device names."""
        return self.trainer.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of ``named_parameters`` without names, as optimizers expect."""
        return self.trainer.parameters()

    def clip_grad_norm_(self, max_norm: float, *args: Any, **kwargs: Any) -> Tensor:
        """Clip the norm of all gradients of the model, as ``Trainer.clip_grad_norm_``."""
        return self.trainer.clip_grad_norm_(max_norm, *args, **kwargs)

    def grad_scaler(self, **options: Any) -> GradScaler:
        """A gradient scaler, by which all programs scale, as ``Trainer.grad_scaler``."""
        return self.trainer.grad_scaler(**options)

    def state_dict(self, **options: bool) -> dict[str, Tensor]:
        """All parameters and buffers, whole, by their names, as ``Trainer.state_dict``."""
        return self.trainer.state_dict(**options)

    def __deepcopy__(self, memo: Any) -> WithWeights:
        raise PlanError(
            "a parallel model is one rank's share of its programs, and cannot be copied: for "
            "averages of its parameters there is ss.optim.Averaged(model), and state_dict() has "
            "values for a copy on one device."
        )

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype | None = None,
        max_shard_bytes: int = 5 << 30,
    ) -> None:
        """Write a folder that ``from_pretrained`` of transformers reads; collective.

        Every rank writes some of the files, and the whole model is on no rank. Tensors have the
        names of the model, as with ``save_original_format=False``.

        Args:
            folder: a folder that all ranks share; weights that are there are replaced.
            dtype: dtype of the fractions in the files; that of the model if None.
            max_shard_bytes: most bytes of tensors in a file.

        Raises:
            CheckpointError: a rank could not write; on all ranks.
            PlanError: the model is not of transformers.
        """
        calls, first = self.trainer.calls, self._first
        with calls.users.inside("save_pretrained"):
            how = {"dtype": str(dtype), "max_shard_bytes": str(max_shard_bytes)}
            with calls.prepared("save_pretrained", **how):
                pass
            write_folder(
                folder, self._programs.model, self.trainer.stored_model, first.tables.parameters,
                first.weights.shard, self._transport, dtype=dtype, max_shard_bytes=max_shard_bytes,
            )  # fmt: skip

    def weight_shards(self) -> dict[str, tuple[Tensor, rv.Layout]]:
        """This rank's boxes of parameters, each with the layout that all ranks' boxes have.

        ``rvdcomm.interop.vllm.Sender`` takes this function, and ``rv.redistribute_many`` the two
        parts of each entry. Nothing is copied, but a parameter whose boxes form no layout is
        gathered, whole on every rank; buffers that checkpoints have are whole too. Collective.

        Returns:
            By single-device name: the box that this rank stores, and its layout.
        """
        calls, stored = self.trainer.calls, self.trainer.stored_model
        with calls.users.inside("weight_shards"), calls.prepared("weight_shards"):
            pass
        ranks, found = stored.ranks, dict[str, tuple[Tensor, rv.Layout]]()
        for name, (layout, entry) in stored.homes.items():
            own = stored.stored.get(name)
            if entry is not None:
                own = stored.whole(name, own, stored.dtypes[name])
                layout = copies(ranks, own.shape)
            if own is not None:
                found[name] = own.detach(), layout
        buffers = {
            name: (value, copies(ranks, value.shape)) for name, value in stored.buffers.items()
        }
        return found | buffers

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> IncompatibleKeys:
        """Take this rank's boxes of whole parameters, as ``Trainer.load_state_dict``."""
        found = self.trainer.load_state_dict(state, strict)
        self._programs.originals.accept()
        return found

    def save(self, folder: str | Path, **state: Any) -> None:
        """Write a checkpoint that any plan and number of ranks can load, as ``Trainer.save``."""
        self.trainer.save(folder, **state)

    def load(self, folder: str | Path, **state: Any) -> SavedRun:
        """Read a checkpoint of any plan and number of ranks, as ``Trainer.load``."""
        found = self.trainer.load(folder, **state)
        self._programs.originals.accept()
        return found

    # --- first values ---------------------------------------------------------------------------

    def _take_first_values(self, only: Sequence[str] | None = None) -> None:
        first, own = self._first, self.compiled.plan.graph.weights
        take_first_values(own, first.weights.stored, first.tables, self._transport, first.device,
                          only)  # fmt: skip

    def _read_weights(self, folder: str | Path) -> None:
        """Give parameters the values in a folder; collective."""
        what, stored, first = f"weights={str(folder)!r}", self.trainer.stored_model, self._first
        buffers = {name: value.clone() for name, value in stored.buffers.items()}
        with stored.agreed(what):
            model = self._programs.model
            missing = read_weights(folder, model, first.tables, first.weights.stored, buffers)
            if faults := stored.buffer_faults(buffers):
                raise PlanError(f"{'; '.join(faults)}.")
            own = self.compiled.plan.graph.weights
            if missing and not own:
                raise PlanError(
                    f"it lacks {len(missing)} parameters, such as {missing[0]}, and the model is "
                    "on the meta device, without values of its own: make the model that the "
                    "folder is of, or make it on the CPU."
                )
        for name, value in buffers.items():
            stored.buffers[name].copy_(value)
        if missing:
            text = "%s lacks %d parameters, such as %s: they keep the values of the model"
            _log.warning(text, what, len(missing), missing[0])
            self._take_first_values(missing)
