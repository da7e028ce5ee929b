"""A server of vLLM, as the documentation starts it, is updated by HTTP."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from rvdcomm import CommError
from rvdcomm.interop.vllm import HTTPClient, Sender
from tests.vllm.engine import needs_vllm
from tests.vllm.models import folder, made

pytestmark = needs_vllm


@contextmanager
def served(model: Path, log: Path) -> Iterator[str]:
    """The URL of a server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--port", str(port), "--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32"),
        *("--max-model-len", "64", "--max-num-seqs", "4"),
        *("--weight-transfer-config", json.dumps({"backend": "rvd"})),
    ]
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
        url = f"http://127.0.0.1:{port}"
        try:
            end = time.monotonic() + 240
            while True:
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < end
                try:
                    urlopen(f"{url}/health", timeout=2).close()
                    break
                except (URLError, OSError):
                    time.sleep(0.3)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait(30)


def test_a_server_is_updated_and_logs_what_comes(tmp_path: Path) -> None:
    weights = made("llama", 1).state_dict()
    log = tmp_path / "log"
    with served(folder("llama", 0, tmp_path), log) as url:
        sender = Sender(
            lambda: weights, HTTPClient(url), num_workers=1, rank=0, num_trainers=1, secs=20
        )
        for version in ("one", None):
            sender.send(version)
            with closing(urlopen(f"{url}/weight_info", timeout=20)) as answer:
                assert (version or "2") in answer.read().decode()
        sender.close()
        with pytest.raises(CommError, match=r"127\.0\.0\.1:1/init_weight_transfer_engine"):
            Sender(
                lambda: weights, HTTPClient("http://127.0.0.1:1"), num_workers=1, rank=0,
                num_trainers=1, secs=5,
            )  # fmt: skip
    assert "rvdcomm: an update brings" in log.read_text()
