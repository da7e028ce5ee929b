"""Clients: how the first rank of a trainer reaches an engine."""

from __future__ import annotations

import json
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from rvdcomm import CommError


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


class HTTPClient:
    """A server of vLLM, started with ``VLLM_SERVER_DEV_MODE=1``.

    Args:
        url: such as ``http://engine:8000``.
        secs: how long a call may take.
    """

    def __init__(self, url: str, secs: float = 300.0) -> None:
        self._url, self._secs = url.rstrip("/"), secs

    def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        request = Request(
            f"{self._url}/{path}",
            data=json.dumps(body or {}).encode(),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        try:
            with urlopen(request, timeout=self._secs) as answer:
                answer.read()
        except HTTPError as error:
            said = error.read().decode(errors="replace")[:1000]
            raise CommError(f"{self._url}/{path}: {error}: {said}") from None
        except URLError as error:
            raise CommError(f"{self._url}/{path}: {error.reason}") from None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the workers meet the trainer."""
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._post("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let the workers receive."""
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Let the workers load what they received."""
        self._post("finish_weight_update", {"weight_version": weight_version})

    def reset_prefix_cache(self) -> None:
        """Forget the keys and values that old weights computed."""
        self._post("reset_prefix_cache")
