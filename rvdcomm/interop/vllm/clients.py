"""Clients: how the first rank of a trainer reaches an engine."""

from __future__ import annotations

from typing import Any


class LocalClient:
    """An engine in this process: a ``vllm.LLM``."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the workers meet the trainer."""
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let the workers receive."""
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Let the workers load what they received."""
        self._llm.finish_weight_update(weight_version)

    def reset_prefix_cache(self) -> None:
        """Forget the keys and values that old weights computed."""
        self._llm.reset_prefix_cache()
