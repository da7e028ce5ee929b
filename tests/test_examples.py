"""The examples run, in one process or in several."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from bench.cluster.ranks import Launch, RankFailedError, run_ranks

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
ON_PROCESSES = {
    "adapters.py": 2,
    "dtensor.py": 2,
    "mixture.py": 2,
    "recipe.py": 2,
    "redistribute_gloo.py": 3,
    "rollouts.py": 2,
    "sync_weights.py": 3,
    "train_gpt.py": 2,
}
"""Examples that need processes, with their number."""

KILLED = "finetune_llama.py"
"""The example that is killed and resumed."""

TRAINER = "hf_trainer.py"
"""The example that continues from its checkpoints, by the Trainer of transformers."""

NEEDS = {"vllm_rollouts.py": "vllm"}
"""Examples that need a package which tests do without."""

TIMEOUT_SECS = 120.0


def environment(**more: str) -> dict[str, str]:
    """Our environment, in which this repository comes before installed packages."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **more}


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize(
    "name", [name for name in EXAMPLES if name not in (*ON_PROCESSES, KILLED, TRAINER)]
)
def test_example_runs_in_one_process(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    command = [sys.executable, str(ROOT / "examples" / name)]
    done = subprocess.run(
        command,
        env=environment(),
        timeout=TIMEOUT_SECS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def launches(name: str, world_size: int, *args: str) -> list[Launch]:
    """The processes of an example, as torchrun starts them."""
    rendezvous = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": str(world_size),
    }
    return [
        Launch(
            rank=rank,
            host=0,
            command=[sys.executable, str(ROOT / "examples" / name), *args],
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **rendezvous),
        )
        for rank in range(world_size)
    ]


@pytest.mark.dist
@pytest.mark.parametrize("name, world_size", ON_PROCESSES.items())
def test_example_runs_on_processes(name: str, world_size: int) -> None:
    results = run_ranks(launches(name, world_size), timeout_secs=TIMEOUT_SECS, echo=False)
    assert all("all right" in result.stdout for result in results)


@pytest.mark.dist
def test_killed_llama_training_resumes_under_another_plan(tmp_path: Path) -> None:
    common = ["--folder", str(tmp_path), "--steps", "2", "--dtype", "float64"]
    dies = launches(KILLED, 2, "--plan", "zero3", "--die-after", "1", *common)
    with pytest.raises(RankFailedError) as died:
        run_ranks(dies, timeout_secs=TIMEOUT_SECS, echo=False)
    assert died.value.exit_status == -signal.SIGKILL
    goes_on = launches(KILLED, 2, "--plan", "megatron", *common)
    first, *_ = run_ranks(goes_on, timeout_secs=TIMEOUT_SECS, echo=False)
    ((step, loss),) = re.findall(r"^step (\d+): loss (\S+)$", first.stdout, re.MULTILINE)
    # The model itself computes its norms in float32.
    assert (step, float(loss)) == ("1", pytest.approx(losses_alone(2)[1], rel=1e-5))


@pytest.mark.dist
def test_trainer_of_transformers_continues_under_another_plan(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes((ROOT / "CONTRIBUTING.md").read_bytes()[:1024])
    common = ["--folder", str(tmp_path / "out"), "--text", str(text)]
    for plan, epochs in ("zero3", "1"), ("hybrid:tp=2,microbatches=2", "2"):
        asked = launches(TRAINER, 2, "--plan", plan, "--epochs", epochs, *common)
        results = run_ranks(asked, timeout_secs=TIMEOUT_SECS, echo=False)
        assert all("all right" in result.stdout for result in results)
    # 1024 bytes are 24 samples of training in 3 batches.
    state = json.loads((tmp_path / "out" / "checkpoint-6" / "trainer_state.json").read_text())
    assert (state["global_step"], state["epoch"]) == (6, 2.0)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "trained")
    assert saved.config.vocab_size == 256


def losses_alone(num_steps: int) -> list[float]:
    """The losses of the same training on one device, by plain torch."""
    example = runpy.run_path(str(ROOT / "examples" / KILLED))
    model = example["new_model"](torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=num_steps)
    losses = []
    for rows in example["batches"](ROOT / "CONTRIBUTING.md")[:num_steps]:
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses
