"""vLLM: weights of a trainer go to the workers of an engine, each getting its own share."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rvdcomm.interop.vllm.clients import HTTPClient, LocalClient
    from rvdcomm.interop.vllm.sender import Sender

__all__ = ["BACKEND", "HTTPClient", "LocalClient", "Sender", "register"]

BACKEND = "rvd"
"""The name of the backend in vLLM's ``WeightTransferConfig``."""


def register() -> None:
    """Make vLLM know the backend; vLLM calls this in each of its processes, as a plugin."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "rvdcomm.interop.vllm.engine", "RvdWeightTransferEngine"
        )


def __getattr__(name: str) -> Any:
    # vLLM imports this package as a plugin, before it needs any of this.
    from importlib import import_module

    modules = {"HTTPClient": "clients", "LocalClient": "clients", "Sender": "sender"}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{modules[name]}"), name)
