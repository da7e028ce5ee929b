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
from rvdcomm.interop.vllm.recorded import CheckpointTensor
from rvdcomm.units import bytes_text

# Below the logger of vLLM, which has a handler.
logger = init_logger(f"vllm.{__name__}")


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
        of = self.parallel_config
        num_workers = of.data_parallel_size * of.world_size
        self._receiver = Receiver(self._recorded, self._load, device, num_workers)
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
        """The model serves its old weights as before; without staging, until the update begins."""
        self._receiver.is_open = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Begin to receive an update in the background."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Begin to receive an update in the background."""
        self._receiver.begin(update_info.number)

    def finish_weight_update(self) -> None:
        """Load the update; the old weights stay if it failed before."""
        self._receiver.finish()
        self._receiver.is_open = False
        if self._receiver.failure is not None:
            logger.error("rvdcomm: the update is not loaded: %s", self._receiver.failure)

    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        kept: dict[str, Tensor] = {}

        def passing() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if any(name == source for source, _ in self._followers):
                    kept[name] = tensor
                yield name, tensor

        with private.reload(self.model, self.model_config, self.device):
            self.model.load_weights(passing())
            parameters = private.parameters(self.model)
            for name, follower in self._followers:
                parameter: Any = parameters[follower]
                parameter.weight_loader(parameter, kept[name])

    def shutdown(self) -> None:
        """Leave the trainer."""
        self._receiver.leave()

    def _recorded(self, metas: Mapping[str, TensorMeta]) -> Record:
        # Tied parameters are one here, and several without data.
        needed = {name for name, _ in self.model.named_parameters()}
        tied = private.tied(self.model)
        with private.without_data(self.model):
            record = recorded(self.model.load_weights, metas, self.device)
            parameters = private.parameters(self.model)
            if kept := _kept(parameters):
                record = recorded(self.model.load_weights, metas, self.device, kept)
                parameters = private.parameters(self.model)
            self._followers = list(_followers(record, tied, parameters))
            written = {n: record.writes.num_elements(p) for n, p in parameters.items()}
            partly = [
                f"{name} ({written[name]} of {p.numel()} elements)"
                for name, p in parameters.items()
                if 0 < written[name] < p.numel()
            ]
        # Loaders of quantised parameters may fill them later, from others.
        if self.model_config.quantization is None:
            followers = {follower for _, follower in self._followers}
            loaded = {name for name, n in written.items() if n} | (record.loaded or set())
            missing = sorted(needed - loaded - followers)
            if missing or partly:
                raise LayoutError(
                    f"{len(missing) + len(partly)} parameters of the engine would not get all of "
                    "their values, because no tensor of the trainer has them: "
                    f"{', '.join([*missing, *partly][:5])}. Pass all tensors of the checkpoint, "
                    "with its names."
                )
        return record


def _kept(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Tensors of the checkpoint that a loader made parameters of, instead of copying them."""
    return {
        tensor.entry: "its loader keeps the tensor"
        for tensor in parameters.values()
        if isinstance(tensor, CheckpointTensor)
    }


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
