"""An engine of vLLM in a process of its own, and a client of it that other processes use.

``python -m tests.vllm.engine FOLDER TP ADDRESS`` is the process. Calls are pickled pairs of a name
and arguments over a socket of this machine.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import pytest

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM (make vllm-test)"
)

KEY = b"rvdcomm"
PROMPTS = [[1, 2, 3, number] for number in range(8)]


class Remote:
    """The engine, for a trainer: each call opens a connection, so that trainers may die."""

    def __init__(self, address: str) -> None:
        self.address = address

    def call(self, name: str, *arguments: Any) -> Any:
        with Client(self.address, authkey=KEY) as connection:
            connection.send((name, arguments))
            is_right, value = connection.recv()
        if not is_right:
            raise RuntimeError(value)
        return value

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update", weight_version)

    def reset_prefix_cache(self) -> None:
        self.call("reset_prefix_cache")

    def tokens(self) -> Any:
        """Tokens of eight prompts, and the logarithms of their probabilities."""
        return self.call("tokens")

    def version(self) -> str:
        return str(self.call("version"))

    def faults(self, checkpoint: str) -> list[str]:
        """Parameters that differ, before prepacking, from those that the checkpoint gives."""
        return [fault for faults in self.call("faults", checkpoint) for fault in faults]

    def workers(self) -> list[dict[str, Any]]:
        """What each worker reports."""
        return list(self.call("workers"))


@contextmanager
def serving(folder: Path, tp: int, where: Path, *, backend: str = "rvd") -> Iterator[Remote]:
    """An engine that serves a checkpoint on ``tp`` workers."""
    address = str(where / f"engine-{time.monotonic_ns()}")
    log = open(f"{address}.log", "w")  # noqa: SIM115
    command = [sys.executable, "-m", "tests.vllm.engine", str(folder), str(tp), address, backend]
    process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        end = time.monotonic() + 240
        while not Path(address).exists():
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(Path(log.name).read_text()[-4000:])
            time.sleep(0.1)
        yield Remote(address)
    finally:
        with suppress(OSError, EOFError, RuntimeError):
            Remote(address).call("stop")
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait(30)
        log.close()


class Served:
    """The calls of ``Remote``, in the process of the engine."""

    def __init__(self, folder: str, tp: int, backend: str) -> None:
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        from rvdcomm.interop.vllm import LocalClient

        self.llm = LLM(
            folder,
            tensor_parallel_size=tp,
            enforce_eager=True,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=64,
            max_num_seqs=8,
            weight_transfer_config=WeightTransferConfig(backend=backend),
        )
        self.client = LocalClient(self.llm)

    def call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        own = getattr(self, f"_{name}", None)
        return own(*arguments) if own else getattr(self.client, name)(*arguments)

    def _tokens(self) -> Any:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
        params = SamplingParams(
            max_tokens=8, temperature=0, detokenize=False, logprobs=3, ignore_eos=True
        )
        found = self.llm.generate(prompts, params, use_tqdm=False)
        outputs = [each.outputs[0] for each in found]
        return [
            (
                list(output.token_ids),
                [sorted((t, p.logprob) for t, p in at.items()) for at in output.logprobs],
            )
            for output in outputs
        ]

    def _version(self) -> str:
        return str(self.llm.get_weight_version())

    def _faults(self, checkpoint: str) -> Any:
        from tests.vllm.worker import faults

        return self.llm.collective_rpc(faults, args=(checkpoint,))

    def _workers(self) -> Any:
        from tests.vllm.worker import report

        return self.llm.collective_rpc(report)

    def _watch(self) -> Any:
        from tests.vllm.worker import watch

        return self.llm.collective_rpc(watch)


def _serve(folder: str, tp: str, address: str, backend: str) -> None:
    served = Served(folder, int(tp), backend)
    served.call("watch", ())
    with Listener(address, authkey=KEY) as listener:
        while True:
            try:
                with listener.accept() as connection:
                    name, arguments = connection.recv()
                    if name == "stop":
                        connection.send((True, None))
                        return
                    try:
                        answer = True, served.call(name, arguments)
                    except Exception as error:
                        answer = False, f"{type(error).__name__}: {error}"
                    connection.send(answer)
            except (EOFError, OSError):  # A trainer that died in a call.
                continue


if __name__ == "__main__":
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(int(sys.argv[2])))),
        # Tests run functions of theirs in the workers.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "OMP_NUM_THREADS": "1",
    }
    _serve(*sys.argv[1:])
