"""The engine of vLLM's workers, backend "rvd"; ``register`` makes vLLM know it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.logger import init_logger

from rvdcomm import LayoutError
from rvdcomm.interop.vllm import private
from rvdcomm.interop.vllm.receiver import InitInfo, Receiver
from rvdcomm.interop.vllm.record import Record, TensorMeta, recorded
from rvdcomm.interop.vllm.staging import Staging
from rvdcomm.units import bytes_text

logger = init_logger(__name__)


@dataclass
class UpdateInfo:
    """Which update of the trainer comes."""

    number: int


class RvdWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives weights into staging memory, while the model serves its old ones.

    ``update_weights`` returns at once, and ``finish_weight_update`` waits for the weights, loads
    them and drops the staging memory. The model is not touched before. Failures are told to the
    trainer and logged (``Receiver``).
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._receiver = Receiver(self._recorded, device)
        # Checkpoint tensors, each with a parameter that is tied to the one that its loader fills:
        # vLLM's reload would leave what its layer has packed for the kernels as it was.
        self._followers: list[tuple[str, str]] = []

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Meet a trainer; an earlier one is left."""
        of = self.parallel_config
        receiver = self._receiver
        receiver.join(init_info, of.data_parallel_index * of.world_size + of.rank)
        if receiver.failure is not None:
            logger.error("rvdcomm: no trainer was met: %s", receiver.failure)
            return
        logger.info(
            "rvdcomm: an update brings %s of %d tensors; %d of these need data of the whole: %s",
            bytes_text(receiver.share_bytes),
            len(receiver.record.copies) + len(receiver.record.whole),
            len(receiver.record.whole),
            receiver.record.whole,
        )

    def start_weight_update(self) -> None:
        """The model serves its old weights as before."""
        self._receiver.is_open = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Begin to receive an update in the background."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Begin to receive an update in the background."""
        self._receiver.begin(update_info.number)

    def finish_weight_update(self) -> None:
        """Load the update; the old weights stay if it failed before."""
        self._receiver.finish(self._load)
        self._receiver.is_open = False
        if self._receiver.failure is not None:
            logger.error("rvdcomm: the update is not loaded: %s", self._receiver.failure)

    def _load(self, staging: Staging) -> None:
        with private.reload(self.model, self.model_config, self.device):
            self.model.load_weights(staging.tensors(self._receiver.record.whole))
            parameters = private.parameters(self.model)
            for name, follower in self._followers:
                parameter: Any = parameters[follower]
                parameter.weight_loader(parameter, staging.tensor(name))

    def shutdown(self) -> None:
        """Leave the trainer."""
        self._receiver.leave()

    def _recorded(self, metas: Mapping[str, TensorMeta]) -> Record:
        # Tied parameters are one here, and several without data.
        needed = {name for name, _ in self.model.named_parameters()}
        tied = private.tied(self.model)
        with private.without_data(self.model):
            record = recorded(self.model.load_weights, metas, self.device)
            self._followers = list(_followers(record, tied, private.parameters(self.model)))
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


def _followers(
    record: Record, tied: Sequence[Sequence[str]], parameters: Mapping[str, Tensor]
) -> Iterator[tuple[str, str]]:
    for names in tied:
        sources = {
            parameter: [each for each in record.copies if record.fills(each, parameters[parameter])]
            for parameter in names
            if parameter in parameters
        }
        filled = [source for of_one in sources.values() for source in of_one]
        for parameter, of_one in sources.items():
            if not of_one:
                yield from ((source, parameter) for source in dict.fromkeys(filled))
