"""The engine of vLLM's workers, backend "rvd"; ``register`` makes vLLM know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.logger import init_logger

from rvdcomm import CommError, LayoutError
from rvdcomm.interop.vllm import private
from rvdcomm.interop.vllm.receiver import InitInfo, Receiver
from rvdcomm.interop.vllm.record import Record, TensorMeta, recorded
from rvdcomm.units import bytes_text

logger = init_logger(__name__)


@dataclass
class UpdateInfo:
    """Which update of the trainer comes; 0 ends one that an earlier trainer left open."""

    number: int = 0


class RvdWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives weights into staging memory, while the model serves its old ones.

    ``update_weights`` returns at once, and ``finish_weight_update`` waits for the weights, loads
    them and drops the staging memory. The model is not touched before.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._receiver = Receiver(self._recorded, device)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Meet a trainer; an earlier one is left."""
        of = self.parallel_config
        worker = of.data_parallel_index * of.world_size + of.rank
        self._receiver.join(init_info, worker)
        self._report()

    def start_weight_update(self) -> None:
        """Nothing: the model serves."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Begin to receive an update in the background."""
        info = self.parse_update_info(update_info)
        if info.number == 0:
            self._receiver.abandon()
            raise CommError("the update of an earlier trainer is ended.")
        self._receiver.begin(info.number)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Begin to receive an update; ``update_weights`` calls the receiver itself."""
        self._receiver.begin(update_info.number)

    def finish_weight_update(self) -> None:
        """Load the update; the old weights stay if it failed before."""
        staging = self._receiver.received()
        with private.reload(self.model, self.model_config, self.device):
            self.model.load_weights(staging.tensors(self._receiver.record.whole))

    def shutdown(self) -> None:
        """Leave the trainer."""
        self._receiver.leave()

    def _recorded(self, metas: Mapping[str, TensorMeta]) -> Record:
        # Tied parameters are one here, and several without data.
        needed = {name for name, _ in self.model.named_parameters()}
        with private.without_data(self.model):
            record = recorded(self.model.load_weights, metas, self.device)
        # As vLLM's own loader asks it: other loaders do not say what they fill.
        if record.loaded is not None and self.model_config.quantization is None:
            missing = sorted(needed - record.loaded)
            if missing:
                raise LayoutError(
                    f"{len(missing)} parameters of the engine would keep their old values, because "
                    f"no tensor of the trainer fills them: {', '.join(missing[:5])}. Pass all "
                    "tensors of the checkpoint, with its names."
                )
        return record

    def _report(self) -> None:
        transfer = self._receiver.transfer
        assert transfer is not None, "a trainer was met"
        rank = max(transfer.needs, key=lambda rank: rank) if transfer.needs else 0
        logger.info(
            "rvdcomm: %d tensors, staging of %s, %d tensors whole: %s",
            len(self._receiver.record.copies),
            bytes_text(transfer.share_bytes(rank)),
            len(self._receiver.record.whole),
            self._receiver.record.whole,
        )
